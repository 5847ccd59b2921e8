import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data import corpus
from data.corpus import list_sources, prepare_default_corpus, split_units
from data.store import TokenStore, unigram_entropy
from data.tokenizer import load_tokenizer

MODULE = '''"""Docstring."""

import os
A = 1


# About f.
@decorated
@twice(
    1)
def f():
    return 1
B = 2; C = 3

class G:
    def h(self):
        """Nested stays."""
# Before i.

async def i(): pass
def j(): pass; x = 1
if A:
    def k(): pass
# The end.
'''


def test_units_of_a_module() -> None:
    units = split_units(MODULE)
    assert "".join(units) == MODULE
    firsts = [unit.splitlines()[0] for unit in units]
    assert firsts == [
        '"""Docstring."""',
        "# About f.",
        "B = 2; C = 3",
        "class G:",
        "async def i(): pass",
        "def j(): pass; x = 1",
        "if A:",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "x = 1",
        "def f(:\n",
        "def f(): pass\x0c\ndef g(): pass\n",
        "s = '''\x0c\x1c\u2028'''\ndef f(): pass\r\n",
        "\0",
    ],
    ids=["empty", "no-newline", "no-python", "form-feed", "other-line-breaks", "null"],
)
def test_units_joined_are_the_source(source: str) -> None:
    assert "".join(split_units(source)) == source


def test_a_large_class_is_cut_into_its_methods() -> None:
    methods = "".join(f"    # About {i}.\n    def m{i}(self):\n        return '{'x' * 200}'\n\n" for i in range(50))
    source = f'class Large:\n    """Docstring."""\n\n{methods}def after(): pass\n'
    units = split_units(source)
    assert "".join(units) == source
    assert len(units) == 52
    assert units[0].startswith("class Large:")
    assert [unit.splitlines()[0].strip() for unit in units[1:-1]] == [f"# About {i}." for i in range(50)]
    small = "class Small:\n    def m(self): pass\n    def n(self): pass\n"
    assert split_units(small) == [small]


def small_library(folder: Path, *, functions: int = 40) -> Path:
    (folder / "package/test").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    for name in ("one.py", "package/__init__.py"):
        (folder / name).write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(functions)))
    (folder / "html").mkdir()
    excluded = ("package/test/no.py", "site-packages/no.py", "_sysconfigdata_x.py", "table.txt", "html/entities.py")
    for name in excluded:
        (folder / name).write_text("no = 1\n")
    return folder


def test_small_library(tmp_path: Path) -> None:
    library = small_library(tmp_path / "library")
    assert [path.name for path in list_sources(library)] == ["one.py", "__init__.py"]
    folder = prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)
    store = TokenStore.open(folder, verify="hash", vocab_size=300)
    assert store.num_documents == 80
    tokenizer = load_tokenizer(store.tokenizer_file)
    assert tokenizer.decode(store.document(3).tolist()) == "def f3(x):\n    return x + 3\n\n\n"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [f".{folder.name}.lock", folder.name]


def test_same_inputs_same_folder_and_hash_elsewhere(tmp_path: Path) -> None:
    """Two machines with caches of their own draw the same samples."""
    folders = [
        prepare_default_corpus(
            tmp_path / name / "cache", vocab_size=300, library=small_library(tmp_path / name / "library")
        )
        for name in ("a", "b")
    ]
    assert folders[0].name == folders[1].name
    hashes = {TokenStore.open(folder).manifest.content_hash for folder in folders}
    assert len(hashes) == 1


def test_other_inputs_other_folder(tmp_path: Path) -> None:
    library = small_library(tmp_path / "library")
    folders = [prepare_default_corpus(tmp_path / "cache", vocab_size=size, library=library) for size in (300, 301)]
    with (library / "one.py").open("a") as file:
        file.write("x = 1\n")
    folders.append(prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library))
    assert len(set(folders)) == 3


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the default corpus needs Python sources and .* has none"):
        prepare_default_corpus(tmp_path, vocab_size=300, library=tmp_path)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run.cache=.*file/cache: must be writable"):
        prepare_default_corpus(tmp_path / "file/cache", vocab_size=300, library=small_library(tmp_path / "library"))


def test_full_disk(tmp_path: Path) -> None:
    """A limit on a file's size, which the tokenizer fits into and the tokens do not, stands for the disk."""
    library = small_library(tmp_path / "library", functions=4000)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(
            ValueError, match=r"run.cache=.*: must be writable and have room .* \(File too large\); set"
        ):
            prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.glob("cache/stdlib-*/*")] == ["tokenizer.json"]


def test_waiting_ends(tmp_path: Path) -> None:
    library = small_library(tmp_path / "library")
    folder = prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)
    (folder / "manifest.json").unlink()
    with (tmp_path / f"cache/.{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process has held it for 0 s"):
            prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library, wait_seconds=0.1)


BUILD = """
import sys, threading
from pathlib import Path
from data import corpus
if sys.argv[3] == "held":
    def hold(*_, **__):
        print("held", flush=True)
        threading.Event().wait()
    corpus.write_shard = hold
print(corpus.prepare_default_corpus(Path(sys.argv[2]), vocab_size=300, library=Path(sys.argv[1])))
"""


def builder(library: Path, cache: Path, *, held: bool = False) -> "subprocess.Popen[str]":
    """A process that builds; ``held`` stops half way, when the tokenizer is written and the shard is not."""
    command = [sys.executable, "-c", BUILD, str(library), str(cache), "held" if held else ""]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_build_does_no_harm_and_many_builders_make_one_corpus(tmp_path: Path) -> None:
    library = small_library(tmp_path / "library", functions=2000)
    cache = tmp_path / "cache"
    killed = builder(library, cache, held=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "held\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    (unfinished,) = cache.glob("stdlib-*")
    with pytest.raises(ValueError, match="not a finished tokenised corpus"):
        TokenStore.open(unfinished)
    builders = [builder(library, cache) for _ in range(3)]
    outputs = [process.communicate()[0].split() for process in builders]
    assert [process.returncode for process in builders] == [0, 0, 0]
    (folder,) = {Path(output[-1]) for output in outputs}
    assert TokenStore.open(folder, verify="hash").num_documents == 4000
    assert sorted(path.name for path in cache.iterdir()) == [f".{folder.name}.lock", folder.name]


def test_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Big enough to train on, and built once."""
    folder = prepare_default_corpus(tmp_path)
    monkeypatch.setattr(corpus, "_build", lambda *_, **__: pytest.fail("built again"))
    assert prepare_default_corpus(tmp_path) == folder
    store = TokenStore.open(folder, vocab_size=8192)
    assert 2_000_000 < store.num_tokens < 8_000_000
    assert store.manifest.vocab_size == 8192
    assert 5.5 < unigram_entropy(store.unigram_counts()) < 8
    assert store.num_tokens / store.num_documents < 1000


@pytest.mark.parametrize("source", ["# why\ndef f():\n    pass\n", "def f():\n    pass\n", "# why\n@g\ndef f(): ..."])
def test_a_unit_that_begins_with_the_first_line_is_whole(source: str) -> None:
    assert split_units(source) == [source]
