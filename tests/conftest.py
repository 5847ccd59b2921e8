"""How the suite runs: on all cores, alike every time, and without a clock in any verdict.

    worker 1    all modules that start ranks, one after another: ranks of two pools on the same cores would starve
    worker 2    the other modules, file by file, so that what a module sets up is set up once
    ...

Processes share no folder but pytest's own, where every test has its own `tmp_path`. A run of a few named files stays in
one process.
"""

import functools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]

MOST_WORKERS = 8
"""Each imports torch: some 0.4 GB."""

RANKS = "modules that start ranks"
STARTS_RANKS = ("RankPool", "Pools", "torch.distributed.run", "launch.certify")
"""A module that names one of these starts ranks."""

# The same examples every time. What makes an example slow is the machine, never the example.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of ``-n auto``: the cores that this process may use; none for a few files by name."""
    if all(Path(argument.split("::")[0]).is_file() for argument in config.args):
        return 0
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


class Scheduling(LoadFileScheduling):
    """File by file; the modules that start ranks count as one file, which comes first as the largest."""

    def _split_scope(self, nodeid: str) -> str:
        module = super()._split_scope(nodeid)
        return RANKS if starts_ranks(module) else module


@functools.cache
def starts_ranks(module: str) -> bool:
    """Whether the test module at this path, from the root, starts processes that wait for each other."""
    text = (ROOT / module).read_text("utf-8")
    return any(name in text for name in STARTS_RANKS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)
