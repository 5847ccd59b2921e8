"""Recorded routing: how many rows each expert had, step by step and layer by layer.

One compressed .npz file, which needs nothing of ours to read:

    counts   int64 [steps, layers, E]   rows of each expert, over all ranks
    layers   int64 [layers]             index of each of these layers in the model
    top_k    int64 []                   experts a token
    after    int64 []                   steps that the run had done before the first of these; 0 where it is not there
"""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """What the file holds; see the module."""

    counts: NDArray[np.int64]
    layers: NDArray[np.int64]
    top_k: int
    after: int = 0


def save_trace(path: Path, trace: RoutingTrace) -> None:
    """Write ``trace``; the name should end in .npz."""
    np.savez_compressed(
        path, counts=trace.counts, layers=trace.layers, top_k=np.int64(trace.top_k), after=np.int64(trace.after)
    )


def load_trace(path: Path) -> RoutingTrace:
    """Read a trace; ValueError says what is wrong with the file."""
    try:
        with np.load(path) as file:
            arrays = dict(file) if isinstance(file, np.lib.npyio.NpzFile) else {}
    except OSError as error:
        raise ValueError(f"trace {path}: cannot be read ({error.strerror}); name a file that exists") from error
    except (ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"trace {path}: is no archive of arrays, or cut off; write it with save_trace") from error
    missing = {"counts", "layers", "top_k"} - set(arrays)
    if missing:
        raise ValueError(f"trace {path}: lacks {', '.join(sorted(missing))}; write it with save_trace")
    counts, layers, top_k = arrays["counts"], arrays["layers"], arrays["top_k"]
    if counts.dtype != np.int64 or counts.ndim != 3 or not counts.size or (counts < 0).any():
        raise ValueError(
            f"trace {path}: counts are {counts.dtype} {list(counts.shape)}; must be int64 [steps, layers, experts], "
            "none negative; write it with save_trace"
        )
    if layers.shape != counts.shape[1:2]:
        raise ValueError(f"trace {path}: {layers.size} layers for counts of {counts.shape[1]}; must be one for each")
    return RoutingTrace(counts, layers, int(top_k), int(arrays.get("after", 0)))
