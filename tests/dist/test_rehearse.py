"""A rehearsal on several ranks: all try, and all learn what failed on any of them."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train.rehearse
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from tests.dist.ranks import RankPool
from train.rehearse import RehearsalFailed, rehearse_saving


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def rehearse_on_rank(folder: Path, fault: str) -> str:
    """What the rehearsal says on this rank; ``fault`` is of rank 1's disk, or of the folder's."""
    run: Any = SimpleNamespace(folder=folder, mesh=build_mesh(ParallelConfig()))
    full = OSError(28, "No space left on device")
    failing = (
        patch.object(os, "fsync", side_effect=full) if fault == "disk" and dist.get_rank() == 1 else patch("os.dup")
    )
    needed = 2**70 if fault == "room" and dist.get_rank() == 1 else 1
    with failing, patch.object(train.rehearse, "bytes_to_save", lambda run: needed):
        try:
            rehearse_saving(run)
        except RehearsalFailed as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("disk", "before the first step: rank 1: {folder}/.rehearsal-"),
        ("room", "before the first step: rank 0: {folder}: has "),
    ],
    ids=["nothing fails", "a disk of one rank", "room for all ranks' parts"],
)
def test_all_ranks_say_alike_what_failed_on_any(tmp_path: Path, pool: RankPool, fault: str, said: str) -> None:
    one, other = pool.run(rehearse_on_rank, tmp_path, fault)
    assert one == other
    assert one.startswith(said.format(folder=tmp_path))
    assert (one == "") is (said == "")
    assert list(tmp_path.iterdir()) == []
