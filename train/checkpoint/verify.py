"""Which checkpoint is whole. The hashing is dealt out over the ranks, and what was verified once is trusted.

    rank 0   names the candidates, reads each seal, compares sizes          (a few small files)
    rank r   hashes its part of the files, as many bytes as any other       (the whole checkpoint, once)

Trust rests on what the file system says of every file (size, time of change, inode): as long as that is as it was
when this process wrote or hashed them, they are not hashed again. Damage that leaves all of it as it was, such as a
flipped bit, is found when the tensors are loaded (`train.checkpoint.files`).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from train.checkpoint import staging
from train.checkpoint.agreement import Agreement
from train.checkpoint.staging import Candidate, CheckpointError, FileEntry

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int, int], ...]


def deal(files: Mapping[str, FileEntry], *, ranks: int) -> list[dict[str, FileEntry]]:
    """Each rank's part of ``files``: the largest first, each to the rank with the fewest bytes so far."""
    parts: list[dict[str, FileEntry]] = [{} for _ in range(ranks)]
    sizes = [0] * ranks
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        rank = sizes.index(min(sizes))
        parts[rank][name] = files[name]
        sizes[rank] += files[name].size
    return parts


class Verifier:
    """Tells whole checkpoints under one folder from others. `find` and `problem` are called by all ranks alike."""

    def __init__(self, root: Path, *, agreement: Agreement) -> None:
        self._root = root
        self._ranks = agreement
        # Rank 0's alone: it tells the others what is left to do.
        self._trusted: dict[tuple[int, int] | None, Signature] = {}

    def trust(self, folder: Path) -> None:
        """Take ``folder`` for whole as it is now; on rank 0."""
        self._trusted[staging.identity(folder)] = staging.signature(folder)

    def problem(self, candidate: Candidate) -> str | None:
        """Why ``candidate`` is not a complete, unaltered checkpoint of its step; None if it is one. Collective.

        Files that its manifest does not name are ignored.
        """
        found, files = self._ranks.on_first("read", candidate.folder, lambda: self._look(candidate))
        if found is not None or not files:
            return found
        part = deal(files, ranks=self._ranks.ranks)[self._ranks.rank]
        found_by_rank = self._ranks.exchange(staging.find_altered(candidate.folder, part))
        found = next((line for line in found_by_rank if line is not None), None)
        if found is None and self._ranks.rank == 0:
            with staging.tolerated(f"{candidate.folder}: changed while it was verified"):
                self.trust(candidate.folder)
        return found

    def _look(self, candidate: Candidate) -> tuple[str | None, dict[str, FileEntry]]:
        """(problem of the seal, files whose content is yet to be compared)."""
        problem = staging.find_seal_problem(candidate.folder, step=candidate.step)
        if problem is not None:
            return problem, {}
        try:
            trusted = self._trusted.get(staging.identity(candidate.folder)) == staging.signature(candidate.folder)
            return None, {} if trusted else staging.read_files(candidate.folder)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing", {}

    def find(self, *, step: int | None = None) -> Candidate | None:
        """The newest verified checkpoint (of ``step`` alone if given), or None if there is no candidate. Collective.

        A candidate that fails is reported by a warning, and the next older one is tried. A folder that
        another process pruned or replaced while it was being read says nothing: the scan starts again.

        Raises:
            CheckpointError: there are candidates, but none is valid.
        """
        while True:
            problems: list[str] = []
            for candidate, before in self._ranks.on_first("read", self._root, lambda: self._candidates(step)):
                problem = self.problem(candidate)
                if self._ranks.exchange(before is None or staging.identity(candidate.folder) != before)[0]:
                    break
                if problem is None:
                    if self._ranks.rank == 0:
                        for line in problems:
                            logger.warning("%s; falling back to %s", line, candidate.folder.name)
                    return candidate
                problems.append(f"checkpoint {candidate.folder}: {problem}")
            else:
                if not problems:
                    return None
                raise CheckpointError(
                    f"none of the {len(problems)} checkpoints is valid: {'; '.join(problems)}; restore one from a "
                    f"copy, or move them away to start from step 0"
                )

    def _candidates(self, step: int | None) -> list[tuple[Candidate, tuple[int, int] | None]]:
        return [
            (candidate, staging.identity(candidate.folder))
            for candidate in staging.list_candidates(self._root)
            if step is None or candidate.step == step
        ]

    def obsolete(self, *, newest: int, keep: int) -> list[Path]:
        """What to remove to keep ``keep`` verified checkpoints up to step ``newest``: what is older than all of these.

        Checkpoints of later steps are left alone (the run was rewound on purpose), and so are invalid ones
        between the kept: they count for nothing and go when they have become the oldest. Nothing is obsolete
        unless step ``newest`` itself verifies. Collective.
        """
        kept, old = 0, []
        for candidate, _ in self._ranks.on_first("read", self._root, lambda: self._candidates(None)):
            if candidate.step > newest:
                continue
            if kept == keep:
                old.append(candidate.folder)
            elif self.problem(candidate) is None:
                kept += 1
            elif candidate.step == newest and not candidate.replaced:
                return []
        return old
