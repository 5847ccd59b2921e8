"""How much memory tensors take at once, on any device: a number that means something on a CPU too.

Resident memory says little there: allocators keep what was freed, libraries and stacks come on top, and a rank of a
test is mostly torch itself. So every operation's results are watched: a storage counts from the operation that first
returned it until nothing refers to it. What an operation allocates inside and frees before it returns is not seen, nor
what collectives buffer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside, counts the storages that operations return.

    now, peak: bytes at present, and at most.

    Args:
        known: tensors whose storages do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        # Storages that do not count are held on to, so that no other can take their identity.
        self._seen: dict[int, object] = {id(s): s for s in (x.untyped_storage() for x in known)}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen or size == 0:
            return
        self._seen[key] = weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of ``tensors``, each once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
