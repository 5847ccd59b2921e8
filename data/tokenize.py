"""Tokenise text into a corpus that training reads: ``python -m data.tokenize --source SRC ... --out DIR``.

The inputs are cut into units; a process takes a unit and makes one shard of it. A finished shard is published by
renaming, its record last, so that whatever stops the command, what is there is whole: the same command again
skips finished shards, and the manifest that makes the folder a corpus is written only when all are there. It is
the same manifest, to the byte, however often the command was interrupted and however many processes ran.

    DIR/unfinished/plan.json              inputs and options; another command is refused
    DIR/unfinished/shard-00007.json       record of a finished shard
"""

import argparse
import codecs
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from data.cpus import usable_cpus
from data.edges import InputError, edge, place_error
from data.files import Held, StorageWarning, locked, remove, write_atomically
from data.manifest import (
    FORMAT,
    HASH_DTYPE,
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Shard,
    canonical,
    read_manifest,
    sha256_file,
)
from data.output import run_command
from data.readers import read_piece
from data.shards import Document, Encoder, write_shard
from data.sources import Inputs, Unit, plan_inputs, say_left_out
from data.store import TokenStore
from data.tokenizer import MIN_VOCAB_SIZE, read_tokenizer, train_bpe

BYTES_PER_TOKEN = 4
"""How much text is taken to give one token when shards are planned; their true sizes follow the text."""
MANY_REPLACED = 20
"""One document in so many with replaced text is more than damage."""
TRAINING_BYTES = 2**25
"""Text that a tokenizer is trained on, from units spread over all sources."""
UNFINISHED = "unfinished"
PLAN = "plan.json"
OWN_TOKENIZER = "own-tokenizer"
"""Mark of a tokenizer that was put into the folder, and was not there before."""


@dataclass(frozen=True)
class Options:
    """What a corpus is made with.

    tokenizer: a ``tokenizer.json``, a ``tiktoken.model``, a folder with one or a name on the hub; None trains one.
    train_vocab_size: of the tokenizer that is trained.
    suffixes: of the files that are read in folders; all known kinds if there are none.
    encoding: of text that is not UTF-8 and has no byte order mark; None refuses such text.
    """

    sources: tuple[str, ...]
    tokenizer: str | None = None
    train_vocab_size: int | None = None
    text_field: str = "text"
    append_eos: bool = True
    eos_token: str | None = None
    shard_tokens: int = 2**22
    suffixes: tuple[str, ...] = ()
    encoding: str | None = None

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        if not self.sources:
            found.append("--source: at least one is needed; name a file, a folder or hub:NAME")
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            found.append("--tokenizer: must be given, or --train-tokenizer, and not both; choose one")
        if self.train_vocab_size is not None and self.train_vocab_size < MIN_VOCAB_SIZE:
            found.append(
                f"--train-tokenizer={self.train_vocab_size}: must be at least {MIN_VOCAB_SIZE}, the bytes and the "
                "special tokens; raise it"
            )
        if self.train_vocab_size is not None and self.eos_token is not None:
            found.append("--eos-token: is for a tokenizer that is given; leave it out with --train-tokenizer")
        found += [f"--suffix={suffix}: must begin with a dot" for suffix in self.suffixes if suffix[:1] != "."]
        if self.shard_tokens < 1:
            found.append(f"--shard-tokens={self.shard_tokens}: must be at least 1")
        if not self.text_field:
            found.append("--text-field: is empty; name a field, such as text")
        if self.encoding is not None and not _is_text_encoding(self.encoding):
            found.append(f"--encoding={self.encoding}: is not known; name one of Python's, such as latin-1 or gb18030")
        return found


def _is_text_encoding(name: str) -> bool:
    """Whether Python has it: base64 and the like are codecs too."""
    try:
        return codecs.lookup(name).name != "undefined" and isinstance("\n".encode(name), bytes)
    except (LookupError, ValueError):
        return False


@dataclass(frozen=True)
class Job:
    """One shard to make; all that a process needs."""

    folder: Path
    name: str
    unit: Unit
    text_field: str
    append_eos: bool
    eos_token: str | None


def tokenize(options: Options, out: Path, *, workers: int = 1, console: Console | None = None) -> Manifest:
    """Make the corpus, or finish it, or see that it is there.

    Args:
        out: its folder, created if need be.
        workers: processes; 1 works in this one.
        console: where progress is shown; nowhere by default.

    Raises:
        InputError: options or inputs are unusable, ``out`` holds or is becoming another corpus, or no document is
            left. Shards that are finished stay, for the same command to go on with.
    """
    problems = [*options.errors(), *([f"--workers={workers}: must be at least 1"] if workers < 1 else [])]
    if (problem := place_error("--out", out)) is not None:
        problems.append(problem)
    if problems:
        raise InputError("\n".join(problems))
    tokenizer = None if options.tokenizer is None else read_tokenizer(options.tokenizer)
    if tokenizer is not None:
        Encoder.parse(tokenizer, append_eos=options.append_eos, eos_token=options.eos_token)
    inputs = plan_inputs(
        options.sources,
        unit_bytes=options.shard_tokens * BYTES_PER_TOKEN,
        suffixes=options.suffixes,
        encoding=options.encoding,
    )
    console = console or Console(quiet=True)
    if inputs.left_out:
        console.print(f"left out: {say_left_out(inputs.left_out)}", soft_wrap=True, markup=False)
    plan = _plan(options, inputs, tokenizer)
    unfinished = out / UNFINISHED
    if (out / MANIFEST).exists():
        _check_plan(read_manifest(out).made_from, plan, out)
        shutil.rmtree(unfinished, ignore_errors=True)
        return TokenStore.open(out).manifest
    before = out.exists()
    unfinished.mkdir(parents=True, exist_ok=True)
    with _only_writer(unfinished / "lock", out):
        _begin(plan, tokenizer, out)
        try:
            _provide_tokenizer(options, inputs, tokenizer, out)
            jobs = [
                Job(out, f"shard-{number:05d}", unit, options.text_field, options.append_eos, options.eos_token)
                for number, unit in enumerate(inputs.units)
            ]
            _run(jobs, workers=workers, console=console)
            manifest = _finish(jobs, options, plan, out)
        except InputError:
            if not _has_shards(unfinished):
                _vacate(out, before=before)
            raise
    shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _begin(plan: dict[str, Any], tokenizer: str | None, out: Path) -> None:
    """Take the folder for this plan; a plan that came to no shard does not keep it.

    Raises:
        InputError: it holds shards of another one, or a tokenizer that is somebody else's.
    """
    path, there = out / UNFINISHED / PLAN, out / TOKENIZER
    found = {}
    if path.exists():
        with edge(path, remedy=f"remove {out} and begin anew"):
            found = dict(json.loads(path.read_bytes()))
        if _has_shards(out / UNFINISHED):
            _check_plan(found, plan, out)
        elif found != plan:
            _vacate(out, before=True)
    if found != plan and there.exists() and (tokenizer is None or there.read_bytes() != tokenizer.encode()):
        raise InputError(f"{there}: is there already and is another one; move it away, or choose another --out")
    for leftover in [*out.glob(".*.partial"), *(out / UNFINISHED).glob(".*.partial")]:
        remove(leftover)
    write_atomically(path, json.dumps(plan, indent=1).encode())


def _has_shards(unfinished: Path) -> bool:
    """Whether any finished shard is recorded that holds a document."""
    for record in unfinished.glob("shard-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if json.loads(record.read_bytes())["shard"] is not None:
                return True
    return False


def _vacate(out: Path, *, before: bool) -> None:
    """Remove what a tokenisation that came to no shard has left: its plan, records and tokenizer; never fatal.

    Args:
        before: the folder was there before; it stays, even if it is empty.
    """
    unfinished = out / UNFINISHED
    mine = [out / TOKENIZER, unfinished / OWN_TOKENIZER] if (unfinished / OWN_TOKENIZER).exists() else []
    for path in [*mine, *unfinished.glob("*.json"), *out.glob("shard-[0-9]*.*")]:
        remove(path)
    if not before:
        remove(unfinished / "lock")
        with suppress(OSError):
            unfinished.rmdir()
            out.rmdir()


def _plan(options: Options, inputs: Inputs, tokenizer: str | None) -> dict[str, Any]:
    """Everything that decides the corpus, in a few comparable values; None is what an older plan does not have."""
    trained = f"train {options.train_vocab_size}"
    plan = {
        "format": FORMAT,
        "sources": list(options.sources),
        "inputs": blake2b(canonical(inputs.files), digest_size=16).hexdigest(),
        "tokenizer": trained if tokenizer is None else sha256(tokenizer.encode()).hexdigest(),
        "text_field": options.text_field,
        "append_eos": options.append_eos,
        "eos_token": options.eos_token,
        "shard_tokens": options.shard_tokens,
        "suffixes": list(options.suffixes),
        "encoding": options.encoding,
    }
    return {name: value for name, value in plan.items() if value is not None}


def _check_plan(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """
    Raises:
        InputError: naming what differs.
    """
    different = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if different:
        raise InputError(
            f"--out={out}: was made from other inputs or options ({'; '.join(different)}); "
            "choose another folder, or remove this one"
        )


def _provide_tokenizer(options: Options, inputs: Inputs, tokenizer: str | None, out: Path) -> None:
    """Put the tokenizer into the corpus' folder, the given one or one trained now, unless an earlier try did that."""
    target = out / TOKENIZER
    if target.exists():
        return
    write_atomically(out / UNFINISHED / OWN_TOKENIZER, b"")
    if tokenizer is None:
        assert options.train_vocab_size is not None
        texts = _training_texts(inputs.units, text_field=options.text_field)
        tokenizer = train_bpe(texts, vocab_size=options.train_vocab_size)
    write_atomically(target, tokenizer.encode())


def _training_texts(units: Sequence[Unit], *, text_field: str) -> Iterator[str]:
    """Texts of about `TRAINING_BYTES`, from the beginnings of up to 64 units spread over all."""
    every = max(1, len(units) // 64)
    chosen = units[::every]
    for unit in chosen:
        left = TRAINING_BYTES // len(chosen)
        for document in _documents(unit, text_field=text_field):
            if left <= 0:
                break
            text = (document.text or "")[:left]
            left -= len(text)
            yield text


def _documents(unit: Unit, *, text_field: str) -> Iterator[Document]:
    """The unit's documents in order."""
    for piece in unit.pieces:
        yield from read_piece(piece, text_field=text_field)


def _run(jobs: Sequence[Job], *, workers: int, console: Console) -> None:
    """Do all jobs that have no record yet."""
    waiting = [job for job in jobs if _finished(job) is None]
    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[done]}/{task.fields[jobs]} shards"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = sum(job.unit.size for job in jobs)
        left, before = sum(job.unit.size for job in waiting), len(jobs) - len(waiting)
        task = progress.add_task("", total=total, completed=total - left, done=before, jobs=len(jobs))
        for done, job in enumerate(_completed(waiting, workers=workers), start=before + 1):
            progress.update(task, advance=job.unit.size, done=done)


def _completed(jobs: Sequence[Job], *, workers: int) -> Iterator[Job]:
    """Yields each job when it is done.

    Raises:
        InputError: the first that a job raised; jobs not yet begun are left.
    """
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            _work(job)
            yield job
        return
    with ProcessPoolExecutor(
        max_workers=min(workers, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
    ) as pool:
        # Submitting starts the processes, which inherit the mask: an interrupt is the parent's to handle.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = {pool.submit(_work, job): job for job in jobs}
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise InputError(
                "--workers: a process was killed, perhaps for want of memory; run the same command again to go on, "
                "with fewer --workers if that was why"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """One thread a process, and no process that outlives a killed parent."""
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore", StorageWarning)  # the parent has said it
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@lru_cache(maxsize=1)
def _encoder(path: Path, append_eos: bool, eos_token: str | None) -> Encoder:
    """The encoder of this process."""
    return Encoder.load(path, append_eos=append_eos, eos_token=eos_token)


def _work(job: Job) -> None:
    """Make one shard and then its record."""
    encoder = _encoder(job.folder / TOKENIZER, job.append_eos, job.eos_token)
    shard, counts = write_shard(job.folder, job.name, _documents(job.unit, text_field=job.text_field), encoder=encoder)
    record = {"shard": None if shard is None else asdict(shard), "counts": asdict(counts)}
    write_atomically(_record_path(job), json.dumps(record).encode())


def _record_path(job: Job) -> Path:
    return job.folder / UNFINISHED / f"{job.name}.json"


def _finished(job: Job) -> tuple[Shard | None, Counts] | None:
    """A finished job's record; None if it is to be done, or done again because its files are not as recorded."""
    try:
        record = json.loads(_record_path(job).read_bytes())
        counts = Counts(**record["counts"])
        shard = None if record["shard"] is None else Shard(**record["shard"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    if shard is None:
        return None, counts
    files = {
        shard.tokens_file: shard.bytes,
        shard.index_file: shard.index_bytes,
        shard.hashes_file: shard.hashes_bytes,
    }
    for name, size in files.items():
        path = job.folder / name
        if not path.exists() or path.stat().st_size != size:
            return None
    return shard, counts


def _finish(jobs: Sequence[Job], options: Options, plan: dict[str, Any], out: Path) -> Manifest:
    """Write the manifest over all shards."""
    shards, counts = [], Counts()
    for job in jobs:
        record = _finished(job)
        assert record is not None, job.name
        shard, counted = record
        counts += counted
        if shard is not None:
            shards.append(shard)
    if not shards:
        raise InputError(
            f"--source: there is no document in {', '.join(options.sources)} ({counts.empty} empty, {counts.missing} "
            f"without the field {options.text_field}); name other sources or another --text-field"
        )
    encoder = Encoder.load(out / TOKENIZER, append_eos=options.append_eos, eos_token=options.eos_token)
    manifest = Manifest(
        tokenizer_sha256=sha256_file(out / TOKENIZER),
        vocab_size=encoder.vocab_size,
        dtype=encoder.dtype,
        eos_id=encoder.eos_id,
        shards=tuple(shards),
        counts=counts,
        made_from=plan,
        copies=_count_copies(shards, out),
    )
    manifest.write(out)
    return manifest


def _count_copies(shards: Sequence[Shard], out: Path) -> int:
    """Documents whose ids are those of an earlier one."""
    hashes = np.concatenate([np.fromfile(out / shard.hashes_file, dtype=HASH_DTYPE) for shard in shards])
    return len(hashes) - len(np.unique(hashes))


@contextmanager
def _only_writer(path: Path, out: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
        InputError: another process holds it.
    """
    try:
        with locked(path):
            yield
    except Held:
        raise InputError(f"--out={out}: another process is writing there; wait for it or choose another") from None


def _parse(arguments: Sequence[str] | None) -> tuple[Options, str, int]:
    """Options, output folder as it was given, and workers."""
    parser = argparse.ArgumentParser(prog="python -m data.tokenize", description="Tokenise text for training.")
    parser.add_argument("--source", action="append", default=[], help="file, folder, glob or hub:NAME[:CONFIG][:SPLIT]")
    parser.add_argument("--tokenizer", help="tokenizer.json, Kimi's tiktoken.model, a folder with one, or a hub name")
    parser.add_argument("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N ids instead")
    parser.add_argument("--out", required=True, help="folder of the corpus")
    parser.add_argument(
        "--text-field",
        default=Options.text_field,
        help="field of .jsonl, .json, .parquet and hub rows; data.text is a field inside another",
    )
    parser.add_argument("--encoding", help="of text that is not UTF-8, such as latin-1")
    parser.add_argument("--suffix", action="append", default=[], help="read only such files of folders, like .py")
    parser.add_argument("--append-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--eos-token", help="name of the end-of-text token, if it is an unusual one")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="processes")
    parser.add_argument("--shard-tokens", type=int, default=Options.shard_tokens, help="about so many a shard")
    given = parser.parse_args(arguments)
    options = Options(
        sources=tuple(given.source),
        tokenizer=given.tokenizer,
        train_vocab_size=given.train_tokenizer,
        text_field=given.text_field,
        append_eos=given.append_eos,
        eos_token=given.eos_token,
        shard_tokens=given.shard_tokens,
        suffixes=tuple(given.suffix),
        encoding=given.encoding,
    )
    return options, given.out, given.workers


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options, out, workers = _parse(arguments)
    console = Console(stderr=True, highlight=False)
    try:
        # As it was given: a Path has lost a slash of an address.
        if (problem := place_error("--out", out)) is not None:
            raise InputError(problem)
        if not out.strip():
            raise InputError("--out: is empty; name a folder for the corpus")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: console.print(
                f"warning: {message}", soft_wrap=True, markup=False
            )
            manifest = tokenize(options, Path(out).expanduser(), workers=workers, console=console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename or out}: {error.strerror or error}; put that right and run the same command "
            "again, it goes on from the finished shards",
            file=sys.stderr,
        )
        return 1
    except MemoryError:
        print("error: memory is full; run the same command again with fewer --workers to go on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    counts = manifest.counts
    if counts.replaced * MANY_REPLACED > manifest.documents:
        console.print(
            f"warning: {counts.replaced:,} of {manifest.documents:,} documents had bytes that are not UTF-8; if they "
            "are text of another encoding, make the corpus again with --encoding",
            soft_wrap=True,
            markup=False,
        )
    print(
        f"{out}: {manifest.documents:,} documents, {manifest.tokens:,} tokens ({manifest.dtype}) in "
        f"{len(manifest.shards)} shards; skipped {counts.empty} empty and {counts.missing} without text; "
        f"replaced invalid text in {counts.replaced}; {manifest.copies or 0:,} are copies of others"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
