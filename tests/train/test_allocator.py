"""The allocator's setting, seen as page faults of a fresh process."""

import multiprocessing
import resource
import sys

import pytest
import torch

from train.allocator import keep_freed_memory

MIB = 2**20


def faults(keep: bool) -> int:
    """Page faults of filling a freed block of 48 MiB 4 times, once the heap has settled."""
    if keep:
        assert keep_freed_memory()
    for _ in range(16):
        torch.empty(48 * MIB, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(48 * MIB, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_blocks_are_used_again() -> None:
    found = {}
    for keep in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[keep] = pool.apply(faults, (keep,))
    pages = 48 * MIB // resource.getpagesize()
    assert found[True] < pages // 4
    assert found[False] > pages


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
