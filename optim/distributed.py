"""The optimizer of one data-parallel rank: full-precision weights and state of what it owns, nothing else.

ZeRO-1: `parallel.data` brings the summed gradient of each whole parameter to its owner; the owner updates
it here and sends it back. No rank needs another's state, and Muon never gathers a matrix.

State is named, not positioned (``<parameter>/momentum``), and exists for every parameter from the first
moment, as zeros. So the union over ranks is the same set of names at every data-parallel size, whichever
parameters have had a gradient, and another size loads it by name. Of a parameter that is cut a rank holds, owns
and updates its slice, and the state is a slice alike. Experts and heads are whole in a slice; for a matrix that
tensor parallelism cuts, and for it alone, the tp ranks exchange their slices of the update (`optim.exchange`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from model.params import ParamRole
from optim.adamw import adamw_step
from optim.exchange import make_exchanges
from optim.groups import MOMENTS, OptimConfig, make_groups
from optim.muon import batch_elements, muon_step, muon_step_cut, plan_batches
from optim.qk_clip import QKClipTarget, qk_clip
from parallel.data import DataParallel
from parallel.mesh import Axis
from parallel.sharding import ShardSpec

STATE_KINDS = (*MOMENTS["muon"], *MOMENTS["adamw"], "master")
"""What a parameter may have of state, each of the parameter's shape and cut as it is."""


class ShardedOptimizer:
    """Muon, AdamW and QK-Clip on the parameters that this rank owns.

    Where a parameter is fp32 or fp64 it is its own master weight; otherwise the owner keeps an fp32 master,
    taken from the parameter as it is now (so initialise or load the model first).

    Args:
        params: trainable parameters by name, the same that ``dp`` holds.
        roles: role of each.
        config: hyper-parameters.
        dp: data parallel over the same parameters; says who owns what.
        specs: which slice of each parameter this rank holds; None: all of it.
        tp: the ranks that hold the other parts of what is cut over tp, and own them alike; None: this one is alone.
        qk_targets: the MLA layers, if QK-Clip is on.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, ParamRole],
        config: OptimConfig,
        dp: DataParallel,
        specs: Mapping[str, ShardSpec] | None = None,
        tp: Axis | None = None,
        qk_targets: Sequence[QKClipTarget] = (),
    ) -> None:
        self.config = config
        self.dp = dp
        self.qk_targets = tuple(qk_targets)
        self.steps = 0
        self._params = {name: params[name].detach() for name in dp.owned_names}
        groups = make_groups(self._params, roles=roles, config=config, specs=specs)
        matrices = {name: group for name, group in groups.items() if group.optimizer == "muon"}
        self._muon = {name: group for name, group in matrices.items() if group.cut is None}
        self._muon_cut = {name: group for name, group in matrices.items() if group.cut is not None}
        self._adamw = {name: group for name, group in groups.items() if group.optimizer == "adamw"}
        limit = batch_elements(dp.device)
        self._batches = plan_batches(list(self._muon.values()), max_elements=limit)
        self._exchanges = make_exchanges(self._muon_cut, Axis() if tp is None else tp, round_bytes=config.bucket_bytes)
        self._batches_cut = [plan_batches(list(x.share.values()), max_elements=limit) for x in self._exchanges]
        # A no-op for fp32 and fp64, where .to returns the parameter's own storage.
        self._masters = {
            name: param.to(torch.promote_types(param.dtype, torch.float32)) for name, param in self._params.items()
        }
        self._moments: dict[str, dict[str, Tensor]] = {kind: {} for kinds in MOMENTS.values() for kind in kinds}
        for name, group in groups.items():
            for kind in group.moments:
                self._moments[kind][name] = torch.zeros_like(self._masters[name])

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor],
        *,
        lr: float,
        clip: float = 1.0,
        max_logits: Tensor | None = None,
    ) -> None:
        """One update of the owned parameters, then every rank receives all of them.

        All ranks must call it, with equal ``lr``, ``clip`` and ``max_logits``. Call it only when the
        gradient is finite.

        Args:
            gradients: `DataParallel.owned_gradients`; overwritten.
            lr: learning rate of this step.
            clip: factor for every gradient (`GradientReport.clip`).
            max_logits: [MLA layers, heads] largest logits of the step over all ranks; None skips QK-Clip.
        """
        self.steps += 1
        if clip != 1.0 and gradients:
            torch._foreach_mul_(list(gradients.values()), clip)
        muon_step(
            self._masters,
            momenta=self._moments["momentum"],
            gradients=gradients,
            groups=self._muon,
            batches=self._batches,
            lr=lr,
            config=self.config,
        )
        muon_step_cut(
            self._masters,
            momenta=self._moments["momentum"],
            gradients=gradients,
            groups=self._muon_cut,
            exchanges=self._exchanges,
            batches=self._batches_cut,
            lr=lr,
            config=self.config,
        )
        adamw_step(
            self._masters,
            exp_avgs=self._moments["exp_avg"],
            exp_avg_sqs=self._moments["exp_avg_sq"],
            gradients=gradients,
            groups=self._adamw,
            step=self.steps,
            lr=lr,
            config=self.config,
        )
        if max_logits is not None and self.config.qk_clip > 0:
            qk_clip(self._masters, targets=self.qk_targets, max_logits=max_logits, tau=self.config.qk_clip)
        for name in self._low_precision():
            self._params[name].copy_(self._masters[name])
        self.dp.broadcast_parameters()

    def _low_precision(self) -> list[str]:
        """Owned parameters that have a master of their own."""
        return [name for name, param in self._params.items() if param.dtype != self._masters[name].dtype]

    @torch.no_grad()
    def take_weights(self, values: Mapping[str, Tensor]) -> None:
        """Begin from other weights: ``values`` of the owned parameters, of any dtype, into the masters."""
        for name, master in self._masters.items():
            master.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors (copy before the next step): ``<parameter>/momentum``, ``/exp_avg``, ``/exp_avg_sq``,
        ``/master`` (low-precision parameters only) of the owned parameters, and ``step``, int64 [].

        The union over ranks is the whole state; ``step`` is equal on all.
        """
        state = {f"{name}/{kind}": x for kind, tensors in self._moments.items() for name, x in tensors.items()}
        state |= {f"{name}/master": self._masters[name] for name in self._low_precision()}
        return state | {"step": torch.tensor(self.steps, dtype=torch.int64)}

    def state_names(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of everything that `load_state_dict` wants on this rank."""
        return {key: (x.shape, x.dtype) for key, x in self.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy in the state of the owned parameters. Changes nothing if the names or shapes do not fit.

        Raises:
            ValueError: a key is missing, extra, or of another shape or dtype.
        """
        remedy = "load the state of the same model, precision and optim groups"
        own = self.state_dict()
        if own.keys() != state.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(
                f"optimizer state: {len(missing)} missing keys {missing[:3]}, {len(extra)} unexpected keys "
                f"{extra[:3]}; {remedy}"
            )
        for key, x in own.items():
            given = state[key]
            if (given.shape, given.dtype) != (x.shape, x.dtype):
                raise ValueError(
                    f"optimizer state {key}: is {given.dtype} {list(given.shape)}, must be {x.dtype} "
                    f"{list(x.shape)}; {remedy}"
                )
        for key, x in own.items():
            x.copy_(state[key])
        self.steps = int(state["step"])
