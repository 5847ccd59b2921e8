"""What each parameter is: its role, and its first value.

Every module declares, where it creates a parameter, the *role* of that parameter. The optimizer's
groups, per-head Muon blocks, weight decay, the precision policy and initialisation all read this one
declaration, so no list of name patterns can fall out of step with the model: a parameter without a role
is an error, never a silent default.

Initialisation is by name: the generator of a parameter is seeded from (seed, name) and drawn over the
global shape, so the same weights come out on every mesh, in every order of construction. Matrix e of a stack
(the weights of experts) is drawn as a parameter of its own, from (seed, name, e): a rank draws the experts that
it holds and no others.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ParamRole:
    """What a parameter is, for everything that treats parameters differently.

    kind: "matrix" (orthogonalised by Muon), "embedding" or "vector" (AdamW).
    heads: a matrix's rows (columns if ``by_columns``) are this many heads, each orthogonalised alone.
    sections: rows inside one head that are matrices of their own (key and value part of ``kv_b``).
    by_columns: the heads lie along the columns (an output projection).
    decay: decoupled weight decay applies.
    keep_fp32: stored and computed in fp32 under the bf16 policy.
    init: which initialiser of `INITIALISERS` draws the first value.
    """

    kind: str
    heads: int = 1
    sections: tuple[int, ...] = ()
    by_columns: bool = False
    decay: bool = True
    keep_fp32: bool = False
    init: str = "normal"

    def __post_init__(self) -> None:
        assert self.kind in ("matrix", "embedding", "vector"), self.kind
        assert self.init in INITIALISERS, self.init

    def blocks(self, x: Tensor) -> list[Tensor]:
        """The logical matrices of ``x`` (a parameter, gradient or momentum of this role).

        Returns views ``[n, rows, columns]``, one per distinct shape, that together cover ``x`` exactly
        once: writing to them writes to ``x``. A leading dim of a 3-D parameter counts experts.
        """
        assert self.kind == "matrix", "only matrices have blocks"
        if x.dim() == 3:
            return [x]
        if self.by_columns:
            return [x.unflatten(1, (self.heads, -1)).transpose(0, 1)]
        per_head = x.unflatten(0, (self.heads, -1))
        if not self.sections:
            return [per_head]
        assert sum(self.sections) == per_head.shape[1], (self.sections, per_head.shape)
        return list(per_head.split(self.sections, dim=1))


Initialiser = Callable[[Tensor, torch.Generator, float], None]


def _normal(x: Tensor, generator: torch.Generator, std: float) -> None:
    x.normal_(0.0, std, generator=generator)


def _ones(x: Tensor, generator: torch.Generator, std: float) -> None:
    x.fill_(1.0)


def _zeros(x: Tensor, generator: torch.Generator, std: float) -> None:
    x.zero_()


def _conv(x: Tensor, generator: torch.Generator, std: float) -> None:
    """Uniform in +-1/sqrt(fan-in), what `torch.nn.Conv1d` draws; depthwise, so fan-in is the width."""
    bound = 1.0 / math.sqrt(x.shape[-1])
    x.uniform_(-bound, bound, generator=generator)


def _dt_bias(x: Tensor, generator: torch.Generator, std: float) -> None:
    """softplus^-1 of a time step drawn log-uniformly from [1e-3, 1e-1], at least 1e-4 (Mamba's rule,
    taken over by flash-linear-attention's KDA layer)."""
    x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
    dt = x.exp().clamp(min=1e-4)
    x.copy_(dt + torch.log(-torch.expm1(-dt)))


INITIALISERS: dict[str, Initialiser] = {
    "normal": _normal,
    "ones": _ones,
    "zeros": _zeros,
    "conv": _conv,
    "dt_bias": _dt_bias,
}


def declare(module: nn.Module, **roles: ParamRole) -> None:
    """Record on ``module`` the roles of its own parameters: ``declare(self, weight=ParamRole(...))``."""
    module._param_roles = roles  # type: ignore[assignment]


def named_roles(model: nn.Module) -> dict[str, ParamRole]:
    """Role of every parameter of ``model`` by full name, in the order of ``named_parameters``.

    Raises:
        ValueError: a parameter has no declared role.
    """
    found: dict[str, ParamRole] = {}
    for prefix, module in model.named_modules():
        declared: dict[str, ParamRole] = getattr(module, "_param_roles", {})
        for local, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{local}" if prefix else local
            if local not in declared:
                raise ValueError(
                    f"parameter {name}: no role is declared; call model.params.declare in "
                    f"{type(module).__name__}.__init__"
                )
            found[name] = declared[local]
    return {name: found[name] for name, _ in model.named_parameters()}


def seed_from_name(seed: int, name: str) -> int:
    """63-bit generator seed, a pure function of (seed, parameter name)."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def draw(
    out: Tensor, *, role: ParamRole, name: str, shape: tuple[int, ...], part: tuple[slice, ...], seed: int, std: float
) -> None:
    """Write a parameter's first value, or the part of it that a rank holds, to ``out``.

    Drawn in fp32 on the CPU, then cast and moved. Of a stack of matrices only those of ``part`` are drawn, one at a
    time; what is cut, cast or moved exists whole beside ``out``, one matrix at a time.

    Args:
        out: the shape of ``part``; any dtype and device.
        role, name: of the parameter.
        shape: global; the first of three dims counts matrices.
        part: of each dim, as `parallel.sharding.ShardSpec.slices` has it.
        seed, std: as for `initialize`.
    """
    if len(shape) == 3:
        for matrix, index in zip(out, range(shape[0])[part[0]], strict=True):
            draw(matrix, role=role, name=f"{name}.{index}", shape=shape[1:], part=part[1:], seed=seed, std=std)
        return
    in_place = out.shape == shape and out.dtype == torch.float32 and out.is_cpu and out.is_contiguous()
    whole = out if in_place else torch.empty(shape, dtype=torch.float32)
    INITIALISERS[role.init](whole, torch.Generator().manual_seed(seed_from_name(seed, name)), std)
    if not in_place:
        out.copy_(whole[part])


def initialize(model: nn.Module, *, seed: int, std: float) -> None:
    """Draw every parameter's first value, in place.

    Args:
        model: any module whose parameters all have roles.
        seed: run seed; the same seed gives the same weights on every mesh and device.
        std: standard deviation of the "normal" initialiser.
    """
    roles = named_roles(model)
    for name, param in model.named_parameters():
        whole = (slice(None),) * param.dim()
        draw(param, role=roles[name], name=name, shape=tuple(param.shape), part=whole, seed=seed, std=std)
