"""A run's routing on record: routing.npz in its folder, in the form of `parallel.expert.trace`.

Counts are kept in memory, 8 bytes for each step, layer and expert (K3: 0.7 MB a step), and the file is written whole,
beside the old one and then in its place, whenever the run evaluates, saves or ends. A resumed run drops the steps after
its checkpoint and goes on.
"""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from parallel.expert.trace import RoutingTrace, load_trace, save_trace

logger = logging.getLogger(__name__)


class RoutingRecorder:
    """Records the routing of a run; on rank 0. Like a tracker it warns where it cannot, and never stops the run.

    Args:
        path: the file.
        layers: indices of the expert layers.
        top_k: experts a token.
        resume_step: steps that the run had done before; those that the file has are kept.
    """

    def __init__(self, path: Path, *, layers: tuple[int, ...], top_k: int, resume_step: int) -> None:
        self._path, self._layers, self._top_k = path, np.array(layers, dtype=np.int64), top_k
        self._after = resume_step
        self._counts: list[NDArray[np.int64]] = []
        self._written = 0
        if resume_step and path.exists():
            self._continue(resume_step)

    def add(self, load: Tensor) -> None:
        """One more step: rows of each expert over all ranks, int64 [layers, E] on the host."""
        self._counts.append(load.numpy().copy())

    def write(self) -> None:
        """Bring the file up to date."""
        if self._written == len(self._counts):
            return
        staged = self._path.with_name(f".{self._path.stem}.tmp.npz")
        trace = RoutingTrace(np.stack(self._counts), self._layers, self._top_k, after=self._after)
        try:
            save_trace(staged, trace)
            staged.replace(self._path)
            self._written = len(self._counts)
        except OSError as error:
            logger.warning("%s: writing failed (%s); will be tried again", self._path, error)

    def _continue(self, step: int) -> None:
        try:
            trace = load_trace(self._path)
        except ValueError as error:
            logger.warning("%s; recording begins anew after step %d", error, step)
            return
        if not trace.after <= step <= trace.after + len(trace.counts):
            logger.warning("%s: begins after step %d or ends before it; recording begins anew", self._path, step)
            return
        self._after = trace.after
        self._counts = list(trace.counts[: step - trace.after])
