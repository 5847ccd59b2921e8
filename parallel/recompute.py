"""Less memory between forward and backward: make again what is cheap to make, send the rest to the host.

    policy       kept of a layer for backward                          done twice
    none         everything that its operations save                   -
    selective    the results of products, collectives and kernels      what lies between them, see `REPEATED`
    full         its input                                             the layer

A `_Replay` is a call that is repeated. In forward it keeps its inputs and drops what autograd would save. The first
use in backward runs the call again and restores everything. With ``selective`` the call's output is dropped too:
operations that would save the output save a reference to the replay.

    none         sources  mix(sources)  h = norm(mix)  gate  up  act(gate, up)      h: read by q, k, v, ...
    selective    sources                               gate  up

A replay belongs to the graph of its own pass and to no module, so several microbatches may be under way, and the replay
goes when the graph goes. Only the first pass decides: it hands its `model.router.Decisions` (experts, the dispatcher's
plan with its exchange of counts) to the repetition, which gets no statistics to count in. The repetition computes the
routing weights again, and makes the same collectives as the first pass, in the same order.

**Offload** moves what is still kept to the host, each storage once. Parameters (products save them too), the bank's
rows (all layers share them, so they cost nothing here and would travel for each layer) and small tensors stay. On CUDA
the host memory is pinned and copies are enqueued on the stream that computes; without CUDA offload is a copy that saves
nothing.

Gradients are those of ``none``, bit for bit: the same operations on the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from model.attn_residual import ResidualMix, ResidualState
from model.documents import Documents
from model.kda import KDA, DecayGate
from model.kimi import Block, KimiModel, LayerCache
from model.layers import GatedFFN, RMSNorm
from model.moe import MoE
from model.router import Decisions
from model.stats import LayerStats

POLICIES = ("none", "selective", "full")

OFFLOAD_BYTES = 2**20
"""Smaller tensors stay: below about this size a transfer costs its latency, and they would free little."""

REPEATED: tuple[tuple[type[nn.Module], str], ...] = (
    (RMSNorm, "normalize"),
    (ResidualMix, "mix"),
    (DecayGate, "squash"),
    (GatedFFN, "activation"),
    (MoE, "activation"),
)
"""What ``selective`` repeats, by owner and attribute, and each KDA core's ``prepare`` (short convolution with its
activation, unit length): large and cheap, no product of matrices, no collective."""

Handle = Callable[[], Tensor]
"""What stands in the graph for a saved tensor: gives it back."""


@dataclass
class RecomputeConfig:
    """What is kept between forward and backward; see the module's docstring. Changes no number."""

    AT_RESUME: ClassVar[str] = ""

    policy: str = "none"
    offload: bool = False
    """Keep on the host what is kept."""

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        if self.policy not in POLICIES:
            return [f"recompute.policy={self.policy}: must be one of {', '.join(POLICIES)}; none keeps everything"]
        return []


def install_recompute(model: KimiModel, config: RecomputeConfig, *, offload_bytes: int = OFFLOAD_BYTES) -> None:
    """Make the layers of ``model`` keep less, in place. Call it after whatever else wraps what it repeats.

    Parameters, their names, the layers' classes and methods stay what they are: only attributes are wrapped. Passes
    without gradients and decoding with a cache run as before.

    Args:
        offload_bytes: tensors whose storage is smaller stay on the device.
    """
    if config.policy == "none" and not config.offload:
        return
    for block in model.layers:
        if not isinstance(block, Block):
            continue  # another pipeline rank's
        layer = _Layer(block.run, policy=config.policy, offload_bytes=offload_bytes if config.offload else None)
        if config.policy == "selective":
            for module in block.modules():
                for kind, name in REPEATED:
                    if isinstance(module, kind):
                        setattr(module, name, _Part(getattr(module, name), layer))
                if isinstance(module, KDA):
                    module.core.prepare = _Part(module.core.prepare, layer)
        block.run = layer


class _Layer:
    """Wraps a block's ``run``: opens a keeper for each pass."""

    def __init__(self, run: Callable[..., ResidualState], *, policy: str, offload_bytes: int | None) -> None:
        self.run = run
        self.policy, self.offload_bytes = policy, offload_bytes
        self.keeper: _Keeper | None = None

    def __call__(
        self,
        block: Block,
        state: ResidualState,
        *,
        documents: Documents,
        stats: LayerStats | None = None,
        cache: LayerCache | None = None,
        decisions: Decisions | None = None,
    ) -> ResidualState:
        if cache is not None or not torch.is_grad_enabled():
            return self.run(block, state, documents=documents, stats=stats, cache=cache, decisions=decisions)
        keeper = _Keeper(offload_bytes=self.offload_bytes, stay=[*block.parameters(), *state.bank])
        if self.policy == "full":
            decisions = Decisions() if decisions is None else decisions
            again = partial(self.run, block, documents=documents, decisions=decisions)
            return _Replay(again, (state,), keeper).first(partial(again, stats=stats), (state,))
        assert self.keeper is None, "a layer inside itself"
        self.keeper = keeper
        try:
            with saved_tensors_hooks(keeper.keep, _read):
                return self.run(block, state, documents=documents, stats=stats, decisions=decisions)
        finally:
            self.keeper = None
            keeper.close()


class _Part:
    """Stands in for one of `REPEATED`: a replay whose result its readers keep as the replay."""

    def __init__(self, function: Callable[..., Tensor], layer: _Layer) -> None:
        self.function, self.layer = function, layer

    def __call__(self, *args: Any) -> Tensor:
        keeper = self.layer.keeper
        if keeper is None:
            return self.function(*args)
        replay = _Replay(self.function, args, keeper)
        out = replay.first(self.function, args)
        if out.numel() and out.storage_offset() == 0 and out.untyped_storage().nbytes() == out.nbytes:
            keeper.share(out, replay)
        return out


class _Keeper:
    """How one pass through one layer keeps its tensors; closed when the pass has left the layer.

    Args:
        offload_bytes: storages of at least this size go to the host; None: none does.
        stay: tensors whose storages never go.
    """

    def __init__(self, *, offload_bytes: int | None, stay: list[Tensor]) -> None:
        self.offload_bytes = offload_bytes
        self.stay = set() if offload_bytes is None else {x.untyped_storage().data_ptr() for x in stay}
        # The tensor beside what is shared keeps its address from being used again while the keeper is open.
        self.shared: dict[tuple[int, torch.dtype], tuple[Tensor, int, _Shared]] = {}

    def share(self, x: Tensor, shared: "_Shared") -> None:
        """From now on whoever saves (a view of) ``x`` reads ``shared`` instead."""
        self.shared.setdefault(_place(x), (x, x._version, shared))

    def keep(self, x: Tensor) -> Handle:
        """What stands in the graph for ``x``, which one operation wants to read in backward."""
        if _place(x) not in self.shared and self._leaves(x):
            self.share(x, _Offloaded(x))
        if _place(x) not in self.shared:
            # Detached: what an operation saves of its own result would hold the operation.
            return partial(_itself, x.detach())
        _, version, shared = self.shared[_place(x)]
        assert x._version == version, "a tensor was changed in place after it was saved"
        return shared.reader(x)

    def close(self) -> None:
        """Let go of the tensors: autograd holds on to its hooks, and so to the keeper, as long as to the graph."""
        self.shared.clear()

    def _leaves(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        large = self.offload_bytes is not None and storage.nbytes() >= self.offload_bytes
        return large and storage.data_ptr() not in self.stay


class _Shared:
    """A tensor that several operations read in backward: made for the first of them, let go after the last.

    A second pass backward through the same graph finds every reader gone and makes the tensor for each anew.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.value: Tensor | None = None

    def make(self) -> Tensor:
        """The tensor, with the storage that it had."""
        raise NotImplementedError

    def reader(self, x: Tensor) -> Handle:
        """The handle of one more reader, which wants ``x``, a view of the storage."""
        self.readers += 1
        return partial(self._view, x.shape, x.stride(), int(x.storage_offset()))

    def _view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        value = self.make() if self.value is None else self.value
        self.readers -= 1
        self.value = value if self.readers > 0 else None
        return value.as_strided(shape, stride, offset)


class _Offloaded(_Shared):
    """A storage on the host."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.device = x.device
        whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        self.host = torch.empty(whole.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self.host.copy_(whole, non_blocking=True)

    def make(self) -> Tensor:
        return self.host.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class _Input:
    """An argument of a replay."""

    read: Handle
    requires_grad: bool

    def make(self) -> Tensor:
        return self.read().detach().requires_grad_(self.requires_grad)


class _Replay(_Shared):
    """One call that is made again in backward, and the tensors that it saved inside.

    Args:
        again: makes the call from its arguments, exactly as the first time.
        args: tensors, also inside tuples, and anything else.
        keeper: keeps the tensors among them.
    """

    def __init__(self, again: Callable[..., Any], args: tuple[Any, ...], keeper: _Keeper) -> None:
        super().__init__()
        self.again = again
        self.args = _map(args, Tensor, lambda x: _Input(keeper.keep(x), x.requires_grad))
        self.saved = 0
        self.inside: dict[int, Tensor] = {}

    def first(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The first call; counts what it saves and keeps nothing of it."""
        with saved_tensors_hooks(self._count, _read):
            return call(*args)

    def _count(self, _: Tensor) -> Handle:
        self.saved += 1
        return partial(self._take, self.saved - 1)

    def _take(self, index: int) -> Tensor:
        if index not in self.inside:
            value = self.make()
            self.value = value if self.readers > 0 else None
        return self.inside.pop(index)

    def make(self) -> Any:
        """Call again, for the result and for everything inside."""
        found: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(lambda x: found.append(x.detach()), _never):
            out = self.again(*_map(self.args, _Input, _Input.make))
        assert len(found) == self.saved, f"saved {self.saved} tensors the first time and {len(found)} when repeated"
        self.inside = dict(enumerate(found))
        return _map(out, Tensor, Tensor.detach)


def _map(tree: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """``tree`` with ``function`` applied to everything of ``kind``, also inside (named) tuples."""
    if isinstance(tree, kind):
        return function(tree)
    if not isinstance(tree, tuple):
        return tree
    mapped = [_map(item, kind, function) for item in tree]
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)


def _place(x: Tensor) -> tuple[int, torch.dtype]:
    return x.untyped_storage().data_ptr(), x.dtype


def _itself(x: Tensor) -> Tensor:
    return x


def _read(handle: Handle) -> Tensor:
    return handle()


def _never(_: None) -> Tensor:
    raise AssertionError("a repeated call has no backward of its own")
