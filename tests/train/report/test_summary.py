"""The summary: equal to the whole file however it was read, across rewinds, torn lines and files that are none."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from train.metrics import rewind
from train.report.summary import MOST_BINS, MOST_SKIPPED, NUMBERS, SUMMARY_FILE, Summary, last_records, load_summary


def write_steps(path: Path, first: int, last: int, *, noise: float = 0.0) -> None:
    """Append steps; ``noise`` stands for the clock, which differs when a step is done again."""
    with path.open("a", encoding="utf-8") as stream:
        for step in range(first, last + 1):
            record: dict[str, Any] = {"step": step, "loss": 1 / step, "tokens": 10 * step, "step_seconds": 1 + noise}
            if step % 7 == 0:
                record |= {"validation_loss": 2 / step, "sample": f"text {step}", "expert_load": {"1": [step, 3]}}
            if step % 11 == 0:
                record |= {"loss": None, "skipped": True}
            stream.write(json.dumps(record) + "\n")


def read(folder: Path) -> Summary:
    """As a report does: what was saved, brought up to date and saved."""
    summary = load_summary(folder)
    summary.update()
    summary.save()
    return summary


def whole(folder: Path) -> Summary:
    summary = Summary(folder / "metrics.jsonl", bins=[])
    summary.update()
    return summary


def check_is_of_the_file(summary: Summary) -> None:
    """Every number of the summary is that of the lines."""
    records = [json.loads(line) for line in summary.path.read_text("utf-8").splitlines()]
    assert [(one.last + 1) for one in summary.bins[:-1]] == [other.first for other in summary.bins[1:]]
    assert (summary.bins[0].first, summary.bins[-1].last) == (records[0]["step"], records[-1]["step"])
    assert len(summary.bins) <= MOST_BINS
    assert sum(item.skipped for item in summary.bins) == sum("skipped" in record for record in records)
    for item in summary.bins:
        steps = records[item.first - 1 : item.last]
        assert item.tokens == steps[-1]["tokens"]
        assert len(item.skipped_lines) == min(MOST_SKIPPED, item.skipped)
        for name in NUMBERS:
            values = [record[name] for record in steps if record.get(name) is not None]
            assert (name in item.numbers) == bool(values)
            if values:
                found = item.numbers[name]
                assert (found.steps, found.least, found.largest) == (len(values), min(values), max(values))
                assert found.total == pytest.approx(sum(values), rel=1e-12)
        samples = [record["step"] for record in steps if "sample" in record]
        assert ("sample" in item.lines) == bool(samples)
        if samples:
            assert summary.record(item.lines["sample"])["step"] == samples[-1]


@pytest.mark.parametrize("steps", [1, 2, MOST_BINS, MOST_BINS + 1, 2 * MOST_BINS + 3, 5 * MOST_BINS])
def test_bins_hold_what_the_lines_hold(tmp_path: Path, steps: int) -> None:
    write_steps(tmp_path / "metrics.jsonl", 1, steps)
    check_is_of_the_file(read(tmp_path))


def test_reading_in_pieces_is_reading_at_once(tmp_path: Path) -> None:
    random, step = Random(3), 0
    while step < 3 * MOST_BINS:
        more = random.randint(1, 200)
        write_steps(tmp_path / "metrics.jsonl", step + 1, step + more)
        step += more
        assert read(tmp_path).bins == whole(tmp_path).bins


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2000)
    assert load_summary(tmp_path).update() == path.stat().st_size
    read(tmp_path)
    assert load_summary(tmp_path).update() == 0
    before = path.stat().st_size
    write_steps(path, 2001, 2010)
    assert load_summary(tmp_path).update() == path.stat().st_size - before


@pytest.mark.parametrize("back", [1, 2, 50, 1400, 2499])
def test_a_rewound_run_is_summarised_as_it_went_on(tmp_path: Path, back: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2500)
    read(tmp_path)
    rewind(path, step=2500 - back)
    write_steps(path, 2500 - back + 1, 2600, noise=0.25)
    summary = read(tmp_path)
    check_is_of_the_file(summary)
    assert summary.bins[-1].numbers["step_seconds"].mean == 1.25
    again = load_summary(tmp_path)
    assert again.update() == 0


def test_a_rewound_run_is_read_again_from_its_bin_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 40_000)
    read(tmp_path)
    rewind(path, step=39_990)
    kept = path.stat().st_size
    assert load_summary(tmp_path).update() < kept / 200


def test_a_rewind_to_the_beginning_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 50)
    read(tmp_path)
    rewind(path, step=0)
    assert read(tmp_path).bins == []
    write_steps(path, 1, 3, noise=0.5)
    check_is_of_the_file(read(tmp_path))


def test_a_torn_last_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    line = path.read_bytes().splitlines(keepends=True)[2].replace(b'"step": 3', b'"step": 4')
    with path.open("ab") as stream:
        stream.write(line[:9])
    assert read(tmp_path).bins[-1].last == 3
    with path.open("ab") as stream:
        stream.write(line[9:])
    assert read(tmp_path).bins[-1].last == 4


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": 0, "bins": []}', '{"format": 1, "width": 1, "bins": [{"first": 1}]}', "\ufffd"],
)
def test_a_summary_that_is_none_is_made_anew(tmp_path: Path, content: str) -> None:
    write_steps(tmp_path / "metrics.jsonl", 1, 30)
    (tmp_path / SUMMARY_FILE).write_text(content, "utf-8")
    check_is_of_the_file(read(tmp_path))


def test_the_last_steps_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    assert [record["step"] for record in last_records(path, 10)] == [1, 2, 3]
    write_steps(path, 4, 30)
    with path.open("a") as stream:
        stream.write('{"step": 31, "lo')
    assert [record["step"] for record in last_records(path, 4)] == [27, 28, 29, 30]
