"""The source distribution is the tree: whoever unpacks it can read the pages, run the tests and install it."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = (".ci", "configs", "data", "docs", "launch", "model", "optim", "parallel", "tests", "train")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since building leaves files behind."""
    tree = tmp_path_factory.mktemp("package") / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    return tree


def test_the_source_distribution_holds_every_file(tree: Path, tmp_path: Path) -> None:
    expected = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.split("/", 1)[1] for name in packed.getnames() if "/" in name}
    assert sorted(expected - found) == []
    assert any(name.startswith("configs/model/") for name in expected)
    assert any(name.startswith("tests/oracles/") for name in expected)


def test_it_has_its_licence() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")
