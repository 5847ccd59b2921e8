"""The default corpus: the Python standard library's own sources, which every machine that runs this has.

A document is one top-level unit of a module: a function, a class (or a method, if the class is large), or the
statements between them. Units are short and far more numerous than modules, so the documents mix well and the
validation split is of the same kind as the rest. They are cut by the lines of the syntax tree: the units of a file one
after another are the file.
"""

import ast
import hashlib
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data.edges import InputError, place_error
from data.encoded import decode_text
from data.files import Held, locked, remove, write_atomically
from data.manifest import FORMAT, MANIFEST, TOKENIZER, Manifest, canonical, sha256_file
from data.shards import Document, Encoder, write_shard
from data.tokenizer import train_bpe

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
"""Not ours, tests (more text than the rest together), and generated tables."""
EXCLUDED_FILES = frozenset({"html/entities.py", "locale.py"})
"""Tables: of names that occur nowhere else."""
EXCLUDED_PREFIX = "_sysconfigdata"
"""A generated table that differs between machines."""
LARGE_CLASS = 8000
"""Characters above which a class is cut into its methods: a longer document fills steps with one kind of text."""
UNITS = "2"
"""Version of the cutting below."""
WAIT_SECONDS = 600.0
"""How long a process waits for another one's build."""

logger = logging.getLogger(__name__)


def prepare_default_corpus(
    root: Path, *, vocab_size: int = 8192, library: Path | None = None, wait_seconds: float = WAIT_SECONDS
) -> Path:
    """Folder of the tokenised default corpus under ``root``, built at the first call.

    The folder's name covers all that goes into it, so another Python, library or vocabulary is another folder. Of
    many processes that call at once, one builds and the others wait; a build that is killed is begun again. Where the
    storage has no locks, all build, and write the same files to the byte.

    Args:
        library: whose sources; the running Python's standard library by default.
        wait_seconds: how long to wait for another process.

    Raises:
        InputError: there are no sources, ``root`` cannot be written to, or the wait was too long.
    """
    if (problem := place_error("run.cache", root)) is not None:
        raise InputError(problem)
    library = Path(sysconfig.get_path("stdlib")) if library is None else library
    files = list_sources(library)
    if not files:
        raise InputError(
            f"data.sources=[]: the default corpus needs Python sources and {library} has none; "
            "name a corpus of your own in data.sources"
        )
    listing = [(file.relative_to(library).as_posix(), file.stat().st_size) for file in files]
    inputs = [sys.version, vocab_size, FORMAT, UNITS, listing]
    name = f"stdlib-{vocab_size}-{hashlib.blake2b(canonical(inputs), digest_size=8).hexdigest()}"
    final = root / name
    lock = root / f".{name}.lock"
    try:
        if (final / MANIFEST).exists():
            return final
        root.mkdir(parents=True, exist_ok=True)
        with locked(lock, wait_seconds=wait_seconds):
            if not (final / MANIFEST).exists():
                logger.info("tokenising the default corpus, once: %d files of %s", len(files), library)
                _build(final, files, vocab_size=vocab_size)
    except Held:
        raise InputError(
            f"{lock}: another process has held it for {wait_seconds:.0f} s; see whether that still builds the default "
            "corpus, and stop it if not"
        ) from None
    except OSError as error:
        raise InputError(
            f"run.cache={root}: must be writable and have room for the default corpus ({error.strerror or error}); "
            "set another"
        ) from error
    return final


def list_sources(library: Path) -> list[Path]:
    """The library's modules, sorted, without what the `EXCLUDED_` constants name."""
    found: list[Path] = []
    tables = {library / name for name in EXCLUDED_FILES}
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIX)]
    return sorted(set(found) - tables, key=lambda path: path.relative_to(library).as_posix())


def split_units(source: str) -> list[str]:
    """Cut a module into its top-level units, and large classes into their methods; joined, they are ``source``.

    A function or class begins with its decorators and the comment lines directly above. What does not parse is one
    unit.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return [source]
    # Not splitlines: it also breaks at form feeds and the like, which ast does not count as lines.
    lines = source.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + lines[-1:]
    edges = [0, *_cuts(body, lines, previous_end=0), len(lines)]
    return [unit for start, stop in zip(edges, edges[1:]) if (unit := "".join(lines[start:stop]))]


def _cuts(body: list[ast.stmt], lines: list[str], *, previous_end: int) -> list[int]:
    """First lines, counted from 0, of the units that ``body`` is cut into, but for its own beginning.

    Args:
        previous_end: lines before the body.
    """
    cuts: list[int] = []
    previous_is_definition = False
    for node in body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))]) - 1
        while first > previous_end and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        if (is_definition or previous_is_definition) and first >= previous_end:
            cuts.append(first)
        end = node.end_lineno or 0
        if isinstance(node, ast.ClassDef) and sum(map(len, lines[first:end])) > LARGE_CLASS:
            cuts += _cuts(node.body, lines, previous_end=node.lineno)
        previous_end, previous_is_definition = end, is_definition
    return cuts


def _documents(files: list[Path]) -> Iterator[Document]:
    for file in files:
        text, replaced = decode_text(file.read_bytes())
        for unit in split_units(text):
            yield Document(unit, replaced)


def _build(folder: Path, files: list[Path], *, vocab_size: int) -> None:
    """Train the tokenizer and write the whole corpus, the manifest last: without it, the folder is no corpus."""
    folder.mkdir(exist_ok=True)
    for leftover in folder.glob(".*.partial"):
        remove(leftover)
    documents = list(_documents(files))
    texts = (document.text or "" for document in documents)
    tokenizer_file = folder / TOKENIZER
    write_atomically(tokenizer_file, train_bpe(texts, vocab_size=vocab_size).encode())
    encoder = Encoder.load(tokenizer_file, append_eos=True)
    shard, counts = write_shard(folder, "shard-00000", documents, encoder=encoder)
    if shard is None:
        raise InputError("data.sources=[]: the default corpus is empty; name a corpus of your own in data.sources")
    Manifest(
        tokenizer_sha256=sha256_file(tokenizer_file),
        vocab_size=encoder.vocab_size,
        dtype=encoder.dtype,
        eos_id=encoder.eos_id,
        shards=(shard,),
        counts=counts,
        made_from={"sources": [f"Python {sys.version.split()[0]} standard library"]},
    ).write(folder)
