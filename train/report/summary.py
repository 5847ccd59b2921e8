"""What the report needs of `metrics.jsonl`, in bounded room however long the run is.

    metrics.jsonl   | step 1 | step 2 | step 3 | step 4 | ... | step 99,999 | step 100,000 |
    summary.json    |--- bin 0 -------|--- bin 1 -------| ... |--- bin 399 --------------|

A bin stands for neighbouring steps: of each number it keeps how many steps had it, their sum, least and largest; of
what is large (expert loads, samples, skipped steps) it keeps where in the file the line is. When there are too many
bins, neighbours are joined in pairs. An evaluation reads the lines since the one before and nothing else, so it costs
no more at step 100,000 than at step 100.

A resumed run drops the lines after its checkpoint and writes others. A bin therefore keeps a checksum of its last line:
bins whose last line is no longer there are given up, and the file is read again from where the first of them began.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from train.metrics import METRICS_FILE, parse_step, reversed_lines

SUMMARY_FILE = "summary.json"
FORMAT = 1

MOST_BINS = 600
"""More are joined in pairs: a chart has fewer columns of pixels than that."""

MOST_SKIPPED = 4
"""Skipped steps of a bin whose lines are remembered."""

NUMBERS = (
    "loss",
    "validation_loss",
    "tokens_per_second",
    "step_seconds",
    "mfu",
    "learning_rate",
    "grad_norm",
    "max_logit",
    "max_over_mean_load",
)

LARGE = ("expert_load", "expert_balance", "sample")
"""Fields of which a bin remembers the last line that has them."""

Record = dict[str, Any]


class Range(NamedTuple):
    """One number over some steps."""

    steps: int
    total: float
    least: float
    largest: float

    @property
    def mean(self) -> float:
        return self.total / self.steps

    def joined(self, other: "Range") -> "Range":
        return Range(
            self.steps + other.steps,
            self.total + other.total,
            min(self.least, other.least),
            max(self.largest, other.largest),
        )


@dataclass(slots=True)
class Bin:
    """Neighbouring steps.

    first, last: steps.
    tokens: consumed after the last step, if known.
    start, tail, end: bytes in the file at which its first line and its last line begin, and its last line ends.
    check: CRC-32 of the last line.
    numbers: by name, those of `NUMBERS` that any of the steps had.
    lines: by name, those of `LARGE`: at which byte the last line begins that has it.
    skipped: how many updates were skipped; ``skipped_lines`` at which bytes the first few of their lines begin.
    forced: rules that chose the experts.
    """

    first: int
    last: int
    tokens: int | None
    start: int
    tail: int
    end: int
    check: int
    numbers: dict[str, Range] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    skipped_lines: list[int] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: Record, line: bytes, *, start: int) -> "Bin":
        """The bin of one step, whose line begins at byte ``start``."""
        step, skipped, rule = record["step"], bool(record.get("skipped")), record.get("forced_routing")
        values = {name: record[name] for name in NUMBERS if record.get(name) is not None}
        return cls(
            first=step,
            last=step,
            tokens=record.get("tokens"),
            start=start,
            tail=start,
            end=start + len(line),
            check=zlib.crc32(line),
            numbers={name: Range(1, value, value, value) for name, value in values.items()},
            lines={name: start for name in LARGE if record.get(name)},
            skipped=int(skipped),
            skipped_lines=[start] if skipped else [],
            forced=[rule] if rule else [],
        )

    def joined(self, later: "Bin") -> "Bin":
        """This bin and the next one as one."""
        numbers = dict(self.numbers)
        for name, value in later.numbers.items():
            numbers[name] = numbers[name].joined(value) if name in numbers else value
        return Bin(
            first=self.first,
            last=later.last,
            tokens=later.tokens,
            start=self.start,
            tail=later.tail,
            end=later.end,
            check=later.check,
            numbers=numbers,
            lines=self.lines | later.lines,
            skipped=self.skipped + later.skipped,
            skipped_lines=(self.skipped_lines + later.skipped_lines)[:MOST_SKIPPED],
            forced=sorted({*self.forced, *later.forced}),
        )

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


class Summary:
    """The bins of a run's metrics, in order; ``width`` is the steps of a full one."""

    def __init__(self, path: Path, *, bins: list[Bin], width: int = 1) -> None:
        """
        Args:
            path: `metrics.jsonl`.
            bins: as they were saved; empty to read all.
            width: as it was saved.
        """
        self.path = path
        self.bins = bins
        self.width = width

    def update(self) -> int:
        """Bring the bins up to what the file holds now; returns how many bytes were read for it."""
        with self.path.open("rb") as stream:
            while self.bins and not _holds(stream, self.bins[-1]):
                self.bins.pop()
            begun = self.bins[-1].end if self.bins else 0
            stream.seek(begun)
            for single in _read(stream, start=begun):
                self._add(single)
            return stream.tell() - begun

    def _add(self, single: Bin) -> None:
        if self.bins and self.bins[-1].steps < self.width:
            self.bins[-1] = self.bins[-1].joined(single)
        else:
            self.bins.append(single)
        if len(self.bins) > MOST_BINS:
            self.width *= 2
            pairs = zip(self.bins[::2], self.bins[1::2])
            rest = self.bins[len(self.bins) // 2 * 2 :]
            self.bins = [one.joined(other) for one, other in pairs] + rest

    def record(self, start: int) -> Record:
        """The whole line that begins at byte ``start``."""
        with self.path.open("rb") as stream:
            stream.seek(start)
            return json.loads(stream.readline())

    def save(self) -> None:
        """Write `summary.json` beside the metrics, whole or not at all."""
        content = {"format": FORMAT, "width": self.width, "bins": [asdict(item) for item in self.bins]}
        staged = self.path.with_name(f".{SUMMARY_FILE}.tmp")
        staged.write_text(json.dumps(content), "utf-8")
        staged.replace(self.path.with_name(SUMMARY_FILE))


def load_summary(run_dir: Path) -> Summary:
    """The summary that was saved, or an empty one where none was or what is there is not one."""
    path = run_dir / METRICS_FILE
    try:
        content = json.loads((run_dir / SUMMARY_FILE).read_text("utf-8"))
        if content["format"] != FORMAT:
            return Summary(path, bins=[])
        bins = [
            Bin(**item | {"numbers": {name: Range(*value) for name, value in item["numbers"].items()}})
            for item in content["bins"]
        ]
        return Summary(path, bins=bins, width=content["width"])
    except (OSError, ValueError, KeyError, TypeError):
        return Summary(path, bins=[])


def last_records(path: Path, count: int) -> list[Record]:
    """The last ``count`` steps of `metrics.jsonl` in order, read from its end."""
    parsed = (parse_step(line) for _, line in reversed_lines(path))
    return list(islice((record for record in parsed if record is not None), count))[::-1]


def _holds(stream: BinaryIO, expected: Bin) -> bool:
    """Whether the file still has the last line of ``expected`` where it was."""
    stream.seek(expected.tail)
    return zlib.crc32(stream.read(expected.end - expected.tail)) == expected.check


def _read(stream: BinaryIO, *, start: int) -> Iterator[Bin]:
    """A bin for each step from byte ``start`` on; a torn last line is left for the next time."""
    for line in stream:
        if not line.endswith(b"\n"):
            stream.seek(start)
            return
        record = parse_step(line)
        if record is not None:
            yield Bin.of(record, line, start=start)
        start += len(line)
