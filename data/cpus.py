"""How many processors a process may use: those that it is bound to, and no more than its control group pays for."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """At least one. A machine's own number is no measure: a job often has a part of it."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus()
    return max(1, bound if quota is None else min(bound, int(quota)))


def cgroup_cpus(*, own: Path = OWN_CGROUP, root: Path = CGROUPS) -> float | None:
    """Processors' worth of time that the process' control groups, from its own to the root, allow; None is no limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        # A container may see its own group as the root of the tree, under whatever name.
        folder = base / name.lstrip("/")
        above = [place for place in (folder, *folder.parents) if base in place.parents]
        found += [_quota(place) for place in (base, *above)]
    limits = [quota for quota in found if quota is not None]
    return min(limits, default=None)


def _quota(folder: Path) -> float | None:
    """Of one group, in either version's files."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
