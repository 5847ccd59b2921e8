"""What the optimizer does to each parameter, derived from its declared role and from nothing else.

The same rows that drive the update are what `describe_groups` prints, so the dump cannot differ from what
happens. A parameter without a role, or a "matrix" that has no rows and columns, is an error.

A role speaks of the whole parameter; where a rank holds a slice, the `ShardSpec` says which. A cut between heads
leaves each rank whole matrices, fewer of them; any other cut over tp goes through the matrices themselves.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from model.params import ParamRole, named_roles
from optim.rounds import newton_schulz_cost
from parallel.sharding import ShardSpec

NS_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

MOMENTS = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}
"""What an optimizer remembers of a parameter: tensors of its shape, fp32 at least."""

_ELEMENTWISE_COST = 200.0
"""Cost of the elementwise part per element, in Newton-Schulz FLOPs: about 40 bytes of traffic per element
at the few FLOPs per byte that separate matrix products from copies on CPUs and GPUs alike."""


@dataclass
class OptimConfig:
    """Muon for matrices, AdamW for the rest, one learning rate for both.

    Defaults as in Kimi K3 technical report 2.5 and 3.3 where it says them, else as kept from Kimi K2.
    """

    AT_RESUME: ClassVar[str] = "another optimizer: the steps to come would follow another rule"
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("bucket_mb",)

    lr: float = 1e-3
    """Peak learning rate; Muon's update is scaled to the size of AdamW's, so both use it."""
    weight_decay: float = 0.1
    """Decoupled: each step multiplies the weights by ``1 - lr * weight_decay``."""
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: str = "auto"
    """Newton-Schulz precision: auto (bf16 on accelerators, fp32 on CPU), bf16, fp32 or fp64."""
    per_head: bool = True
    """Orthogonalise each head's rows of the q, k, v and gate projections alone."""
    output_per_head: bool = False
    """Orthogonalise each head's columns of the output projection alone."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 never clips."""
    qk_clip: float = 100.0
    """Largest attention logit of a head before its weights are scaled down; 0 is off."""
    bucket_mb: float = 32.0
    """Size of a gradient bucket in MiB, and of what a rank makes whole in one round of Muon's exchange over tp."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return int(self.bucket_mb * 2**20)

    def errors(self) -> list[str]:
        """Every contradiction in this config, one line each: field, value, rule, remedy."""
        found = [
            f"optim.{name}={getattr(self, name)}: must be above 0"
            for name in ("lr", "eps", "bucket_mb")
            if not getattr(self, name) > 0
        ]
        found += [
            f"optim.{name}={getattr(self, name)}: must be at least 0"
            for name in ("weight_decay", "clip_norm", "qk_clip")
            if not getattr(self, name) >= 0
        ]
        if self.bucket_mb > 2**20:
            found.append(f"optim.bucket_mb={self.bucket_mb}: must be at most {2**20}, 1 TiB; 32 is usual")
        if not 0 <= self.momentum < 1:
            found.append(f"optim.momentum={self.momentum}: must lie in [0, 1)")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            found.append(f"optim.betas={list(self.betas)}: must be two numbers in [0, 1)")
        elif self.betas[0] ** 2 > self.betas[1]:
            # Without a gradient the update is multiplied by beta1 / sqrt(beta2) from step to step.
            found.append(
                f"optim.betas={list(self.betas)}: the square of the first must be at most the second, or an update "
                "grows after its gradient has ceased; raise the second"
            )
        if not 1 <= self.ns_steps < 100:
            found.append(f"optim.ns_steps={self.ns_steps}: must lie in 1..99; 5 is usual")
        if self.ns_dtype not in NS_DTYPES:
            found.append(f"optim.ns_dtype={self.ns_dtype}: must be one of {', '.join(NS_DTYPES)}")
        return found


@dataclass(frozen=True)
class Group:
    """How one parameter is updated.

    shape: of what this rank holds.
    optimizer: "muon" or "adamw".
    blocks: (count, rows, columns) of the matrices that Muon orthogonalises one by one; empty for AdamW.
    role: the declared role, with heads=1 if per-head Muon is off, else with this rank's heads.
    cut: (dim, parts) if tensor parallelism splits each matrix; ``blocks`` still gives the unsplit sizes. None: this
        rank holds whole matrices.
    """

    name: str
    shape: tuple[int, ...]
    optimizer: str
    blocks: tuple[tuple[int, int, int], ...]
    weight_decay: float
    role: ParamRole
    cut: tuple[int, int] | None = None

    def matrices(self, x: Tensor) -> list[Tensor]:
        """Views [n, rows, columns] of this rank's parts of the matrices, one for each shape of ``blocks``.

        Args:
            x: the parameter, or its gradient or momentum, as this rank holds it.
        """
        return self.role.blocks(x) if self.cut is None else [x.view(-1, *self.shape[-2:])]

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors that the optimizer keeps."""
        return MOMENTS[self.optimizer]

    @property
    def cost(self) -> float:
        """Work of one update for this rank, in FLOPs or their equivalent."""
        elementwise = _ELEMENTWISE_COST * math.prod(self.shape)
        matrices = sum(count * newton_schulz_cost(rows, columns) for count, rows, columns in self.blocks)
        return elementwise + matrices / (1 if self.cut is None else self.cut[1])


def make_group(
    name: str, *, param: Tensor, role: ParamRole, config: OptimConfig, spec: ShardSpec | None = None
) -> Group:
    """The update rule of one parameter.

    Args:
        param: what this rank holds of it.
        role: of the whole parameter.
        spec: which slice ``param`` is; None: all of it.

    Raises:
        ValueError: a role "matrix" on a parameter that has neither 2 dims nor 3 (experts, rows, columns).
    """
    weight_decay = config.weight_decay if role.decay else 0.0
    shape = tuple(param.shape)
    if role.kind != "matrix":
        return Group(name, shape, "adamw", (), weight_decay, role)
    if param.dim() not in (2, 3):
        raise ValueError(
            f"parameter {name}: role matrix needs 2 dims, or 3 for stacked experts, and it has shape "
            f"{list(shape)}; declare it as vector or embedding"
        )
    if not (config.output_per_head if role.by_columns else config.per_head):
        role = dataclasses.replace(role, heads=1, sections=(), by_columns=False)
    cut = None if spec is None else _tp_cut(spec, shape)
    if cut is not None and role.heads > 1:
        dim, parts = cut
        assert dim == (1 if role.by_columns else 0), f"{name}: heads are cut"
        role, cut = dataclasses.replace(role, heads=role.heads // parts), None
    if cut is not None:
        dim, parts = cut
        *leading, rows, columns = (size * parts if d == dim else size for d, size in enumerate(shape))
        return Group(name, shape, "muon", ((math.prod(leading), rows, columns),), weight_decay, role, cut)
    blocks = tuple((x.shape[0], x.shape[1], x.shape[2]) for x in role.blocks(param))
    return Group(name, shape, "muon", blocks, weight_decay, role)


def _tp_cut(spec: ShardSpec, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(dim, parts) of the cut over tp, if it has more than one part."""
    cuts = [(dim, spec.shape[dim] // shape[dim]) for dim, axis in spec.shards if axis == "tp"]
    return next((cut for cut in cuts if cut[1] > 1), None)


def make_groups(
    params: Mapping[str, Tensor],
    *,
    roles: Mapping[str, ParamRole],
    config: OptimConfig,
    specs: Mapping[str, ShardSpec] | None = None,
) -> dict[str, Group]:
    """The update rule of every parameter, by name, in the given order; ``specs`` None: all are whole."""
    return {
        name: make_group(
            name, param=param, role=roles[name], config=config, spec=None if specs is None else specs[name]
        )
        for name, param in params.items()
    }


def describe_groups(model: nn.Module, *, config: OptimConfig) -> list[Group]:
    """One row for each trainable parameter of ``model``; also works on the meta device."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return list(make_groups(params, roles=named_roles(model), config=config).values())
