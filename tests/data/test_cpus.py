import os
import subprocess
import sys
from pathlib import Path

import pytest

from data import cpus
from data.cpus import cgroup_cpus, usable_cpus


def group(root: Path, name: str, *, quota: str | None = None, old: tuple[int, int] | None = None) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    if quota is not None:
        (folder / "cpu.max").write_text(quota + "\n")
    if old is not None:
        (folder / "cpu.cfs_quota_us").write_text(f"{old[0]}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{old[1]}\n")


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "own"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_process_bound_to_one_processor() -> None:
    """As by ``taskset -c 0``, or by a batch system."""
    code = (
        "import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})\n"
        "from data.cpus import usable_cpus; print(usable_cpus())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_command_asks_for_as_many(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from data import tokenize

    asked = []
    monkeypatch.setattr(tokenize, "usable_cpus", lambda: 3)
    monkeypatch.setattr(tokenize, "tokenize", lambda *_, workers, **__: asked.append(workers) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokenize.main(["--source", "x", "--train-tokenizer", "300", "--out", "x"])
    assert asked == [3]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", None), ("400000 100000", 4.0), ("50000 100000", 0.5), ("nonsense", None)],
)
def test_quota_of_its_own_group(tmp_path: Path, quota: str, expected: float | None) -> None:
    group(tmp_path / "fs", "a/b", quota=quota)
    assert cgroup_cpus(own=own(tmp_path, "0::/a/b"), root=tmp_path / "fs") == expected


def test_the_smallest_of_the_groups_above(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, "a", quota="200000 100000")
    group(root, "a/b", quota="800000 100000")
    group(root, "other", quota="1 100000")
    assert cgroup_cpus(own=own(tmp_path, "0::/a/b/c"), root=root) == 2.0


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path / "fs", "", quota="300000 100000")
    assert cgroup_cpus(own=own(tmp_path, "0::/somewhere/else"), root=tmp_path / "fs") == 3.0


@pytest.mark.parametrize(("quota", "expected"), [(150_000, 1.5), (-1, None)])
def test_the_older_version(tmp_path: Path, quota: int, expected: float | None) -> None:
    group(tmp_path / "fs", "cpu,cpuacct/job", old=(quota, 100_000))
    lines = ("12:memory:/job", "3:cpu,cpuacct:/job", "1:name=systemd:/", "0::/")
    assert cgroup_cpus(own=own(tmp_path, *lines), root=tmp_path / "fs") == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.5, 1), (2.9, 2), (64.0, 8)])
def test_the_lesser_of_both(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: quota)
    assert usable_cpus() == expected


def test_no_such_files(tmp_path: Path) -> None:
    assert cgroup_cpus(own=tmp_path / "none", root=tmp_path) is None
    assert usable_cpus() >= 1
