"""The report: complete from full metrics, present from partial ones, self-contained, escaped, legible, bounded."""

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import train.report.page
from train.report import write_report
from train.report.header import duration_text
from train.report.page import smooth


def make_record(step: int, **changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": step,
        "loss": 3 + 6 / step,
        "grad_norm": 1 / step,
        "tokens": 16_384 * step,
        "tokens_per_second": 12_000.0 + step,
        "learning_rate": 1e-3 / step,
        "step_seconds": 1.5,
        "samples_hash": f"{step:08x}",
        "mfu": 0.2,
        "max_logit": 20.0 + step,
        "max_over_mean_load": 1 + 1 / step,
    }
    return record | changes


def make_run(folder: Path, records: list[dict[str, Any]], *, facts: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    if facts is not None:
        (folder / "facts.json").write_text(json.dumps(facts), "utf-8")
    return folder


def full_run(folder: Path, *, steps: int = 40) -> Path:
    records = [make_record(step) for step in range(1, steps + 1)]
    for record in records[9::10]:
        load = {"1": [10, 30, 20, 20], "2": [0, 80, 0, 0], "10": [20, 20, 20, 20]}
        record |= {"validation_loss": 3.5 + 5 / record["step"], "expert_load": load}
        record["sample"] = "if a < b & c:\n    return '<script>alert(1)</script>'"
    records[6] |= {"loss": None, "grad_norm": None, "finite": False, "skipped": True, "sample_ids": [41, 42]}
    facts = {
        "parameters": 28_400_000,
        "training_tokens": 1_310_720,
        "bytes_per_token": 3.25,
        "begun": "2031-03-05T08:09:11+01:00",
        "started": "2031-04-06T08:09:11+0100",
        "user": "alice",
        "versions": "perilune 0.1.0, torch 2.13.0, Python 3.12.1",
        "matmul_flops_per_second": 1.5e11,
        "active_parameters": 11_200_000,
        "unigram_entropy": 6.31,
        "tokenizer": "<bpe>",
        "rate": 1.234e12,
        "ranks": 2,
    }
    run = make_run(folder, records, facts=facts)
    (run / "config.yaml").write_text("data: {name: '<x>'}\n", "utf-8")
    return run


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a full run, in a folder whose name needs escaping."""
    run = full_run(tmp_path_factory.mktemp("runs") / "a <b> & c")
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text("utf-8")


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def chart_of(page: str, heading: str) -> str:
    """The first chart under a heading: of two, the one for wide windows."""
    return re.findall(r"<svg .*?</svg>", page[page.index(f"<h2>{heading}") :], re.DOTALL)[0]


def test_a_full_run_shows_everything(full_page: str) -> None:
    assert headings(full_page) == [
        "Loss",
        "Speed",
        "Model FLOPs utilisation",
        "Learning rate",
        "Gradient norm",
        "Largest attention logit",
        "Expert load",
        "Balance over time",
        "Text samples",
        "Skipped steps (1)",
        "Configuration",
    ]
    for text in ("28.4M", "11.2M active", "41, 42", "not finite", "rate <b>1.234T</b>"):
        assert text in full_page, text
    assert full_page.count("<summary>step ") == 4
    for label in ("training", "validation", "unigram entropy", "tokens"):
        assert f">{label}</text>" in chart_of(full_page, "Loss"), label
    assert ">all experts equal</text>" in chart_of(full_page, "Balance over time")
    for label in ("loss (nats/token)", "tokens/s", "learning rate", "load / mean load", "expert", "layer"):
        assert f">{label}</text>" in full_page, label


def test_the_header_is_in_units_that_a_reader_knows(full_page: str) -> None:
    tiles = {
        label: (value, note)
        for label, value, note in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><small>(.*?)</small>", full_page)
    }
    recent = sum(3 + 6 / step for step in range(31, 41)) / 10
    assert tiles == {
        "training loss": (f"{recent:.4f}", "nats/token, mean of 10 steps"),
        "validation loss": ("3.6250", "nats/token, best"),
        "perplexity": (f"{math.exp(3.625):.1f}", "per token, held-out text"),
        "bits per byte": (f"{3.625 / math.log(2) / 3.25:.3f}", "held-out text"),
        "unigram entropy": ("6.3100", "nats/token, by token counts alone"),
        "steps": ("40", ""),
        "trained on": ("655.4k", "tokens, 0.5 x the corpus"),
        "corpus": ("1.311M", "tokens of 3.25 bytes"),
        "model": ("28.4M", "parameters, 11.2M active"),
        "speed": ("12.02k", "tokens/s, median"),
        "training took": ("1 min 0 s", "begun 05 Mar 2031, 07:09 UTC"),
    }
    facts = full_page[full_page.index('<p class="facts">') : full_page.index("</header>")]
    assert "alice" not in facts
    for text in ("<b>2</b> ranks", "matrix products <b>150 GFLOP/s</b>", "<b>perilune 0.1.0, torch 2.13.0, Python 3.1"):
        assert text in facts, text


def test_versions_may_be_told_by_package(tmp_path: Path) -> None:
    facts = {"versions": {"python": "3.12.1", "torch": "2.13.0", "cuda": None}}
    page = write_report(make_run(tmp_path / "run", [make_record(1)], facts=facts)).read_text("utf-8")
    assert '<p class="facts"><b>python 3.12.1, torch 2.13.0</b></p>' in page


def test_without_validation_the_header_says_that_it_is_of_training(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [make_record(step) for step in (1, 2, 3)], facts={"bytes_per_token": 4.0})
    page = write_report(run).read_text("utf-8")
    mean = (9 + 6 + 5) / 3
    assert f"<dt>perplexity</dt><dd>{math.exp(mean):.1f}</dd><small>per token, training</small>" in page
    assert f"<dt>bits per byte</dt><dd>{mean / math.log(2) / 4:.3f}</dd><small>training</small>" in page


def test_it_is_self_contained_and_escaped(full_page: str) -> None:
    page = full_page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<title>a &lt;b&gt; &amp; c</title>" in page
    assert "<b>&lt;bpe&gt;</b>" in page
    assert "data: {name: &#x27;&lt;x&gt;&#x27;}" in page
    assert not re.search(r"<(link|iframe|object|embed)\b|@import|url\((?!#)", page)
    fetched = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', page)
    assert fetched == []


def test_charts_are_well_formed_and_take_the_pages_colours(full_page: str) -> None:
    charts = re.findall(r"<svg .*?</svg>", full_page, re.DOTALL)
    # Five of one size; expert load, the loss and balance for wide windows and narrow ones, and a plot left alone.
    assert len(charts) == 4 + 2 * 4
    for chart in charts:
        ElementTree.fromstring(chart)
        assert "var(--muted)" in chart
        assert not re.search(r"#0[1-6]0[1-6]0[1-6]", chart), "no placeholder is left"
    assert "var(--series-1)" in charts[0]
    assert "var(--series-2)" in charts[0]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([], id="no-steps"),
        pytest.param([make_record(1)], id="one-step"),
        pytest.param([make_record(1), make_record(2)], id="two-steps"),
        pytest.param([{"step": 1}], id="bare-step"),
        pytest.param(
            [make_record(1, loss=None, grad_norm=None, finite=False, skipped=True, validation_loss=None)], id="nan"
        ),
        pytest.param([make_record(1, grad_norm=0.0, learning_rate=0.0, mfu=0.0, tokens_per_second=0.0)], id="zeros"),
        pytest.param([make_record(1, expert_load={"0": [0, 0]}, max_over_mean_load=1.0)], id="no-routed-tokens"),
        pytest.param([make_record(1, expert_load={"0": [1, 2], "1": [3]}, sample="")], id="uneven-layers"),
        pytest.param([make_record(1), make_record(2, grad_norm=1e-30), make_record(3, loss=1e30)], id="extremes"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_short_and_partial_runs_have_a_report(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = write_report(make_run(tmp_path / "run", records)).read_text("utf-8")
    assert page.rstrip().endswith("</html>")
    assert ("Loss" in headings(page)) == any(record.get("loss") is not None for record in records)
    assert "NaN" not in page
    assert "nan" not in re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [make_record(1), make_record(2)])
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    assert "<dt>steps</dt><dd>2</dd>" in write_report(run).read_text("utf-8")


BALANCE = {
    "1": {"entropy": 0.9, "before": 2.25, "after": 1.0, "borrowed": 3, "lent_bytes": 12_000, "dropped": 0},
    "10": {"entropy": 0.8, "before": 1.75, "after": 1.02, "borrowed": 1, "lent_bytes": 4_000, "dropped": 0},
    "2": {"entropy": 1.0, "before": 1.5, "after": 1.0, "borrowed": 2, "lent_bytes": 8_000, "dropped": 0},
}


def test_ranks_are_shown_before_and_after_balancing(tmp_path: Path) -> None:
    records = [make_record(1), make_record(2, expert_balance=BALANCE), make_record(3)]
    page = write_report(make_run(tmp_path / "run", records)).read_text("utf-8")
    assert headings(page)[-1] == "Ranks before and after balancing"
    assert "at step 2. Lent: 6 copies of experts, 24k bytes. Rows dropped: 0." in page
    chart = chart_of(page, "Ranks before and after balancing")
    ElementTree.fromstring(chart)
    # By series, layers in their order.
    assert re.findall(r">(\d\.\d\d)</text>", chart) == ["2.25", "1.50", "1.75", "1.00", "1.00", "1.02"]
    for label in ("every expert at its home", "as computed", "all ranks equal", "layer", "busiest rank / mean"):
        assert f">{label}</text>" in chart, label
    ticks = chart[: chart.index(">layer</text>")]
    assert re.findall(r">(\d+)</text>", ticks) == ["1", "2", "10"]


def test_many_layers_have_bars_without_numbers(tmp_path: Path) -> None:
    balance = {str(layer): BALANCE["1"] for layer in range(60)}
    page = write_report(make_run(tmp_path / "run", [make_record(1, expert_balance=balance)])).read_text("utf-8")
    chart = chart_of(page, "Ranks before and after balancing")
    assert chart.count('id="patch_') > 120
    assert "2.25" not in chart


def test_on_one_rank_there_is_nothing_to_balance(tmp_path: Path) -> None:
    record = make_record(1, expert_balance={"1": {"entropy": 0.9}})
    page = write_report(make_run(tmp_path / "run", [record])).read_text("utf-8")
    assert "Ranks before and after balancing" not in headings(page)


def test_forced_routing_has_a_banner(tmp_path: Path, full_page: str) -> None:
    records = [make_record(1, forced_routing="zipf(<2>)"), make_record(2, forced_routing="zipf(<2>)")]
    page = write_report(make_run(tmp_path / "run", records)).read_text("utf-8")
    banner = '<p class="card banner"><b>Forced routing: zipf(&lt;2&gt;).</b>'
    assert page.count(banner) == 1
    assert page.index(banner) < page.index("<h2>")
    assert "banner" not in full_page[full_page.index("<body>") :]


def test_one_hot_expert_does_not_pale_the_others(tmp_path: Path) -> None:
    def chart(load: list[int]) -> str:
        record = make_record(1, expert_load={"1": load})
        page = write_report(make_run(tmp_path / str(max(load)), [record])).read_text("utf-8")
        return chart_of(page, "Expert load")

    assert ">≥ 4</text>" in chart([500, 20, 20, 20, 20, 20, 20, 20])
    assert ">3.2</text>" in chart([40, 20, 10, 10, 10, 0, 10, 0])


def test_layers_are_in_their_order(full_page: str) -> None:
    chart = chart_of(full_page, "Expert load")
    ticks = chart[chart.index('id="matplotlib.axis_2"') : chart.index(">layer</text>")]
    assert re.findall(r">(\d+)</text>", ticks) == ["1", "2", "10"]


def test_a_long_run_has_a_smoothed_line_and_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [make_record(step, loss=3 + math.sin(step)) for step in range(1, 20_001)])
    path = write_report(run)
    assert path.stat().st_size < 1_000_000
    page = path.read_text("utf-8")
    assert ">smoothed</text>" in chart_of(page, "Loss")
    assert "Smoothed over 958 neighbouring steps." in page


def test_smoothing_neither_shifts_a_slope_nor_its_ends() -> None:
    slope = [0.5 * place for place in range(50)]
    assert smooth(slope, half=7) == pytest.approx(slope, rel=1e-12)
    assert smooth([1.0, -1.0] * 20, half=2)[2:-2] == pytest.approx([0.2, -0.2] * 18, rel=1e-12)
    assert smooth([2.5], half=5) == [2.5]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (1430, "23 min"), (3 * 3600 + 61, "3 h 1 min"), (9e5, "10 d")],
)
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_logarithmic_axes_have_marks(full_page: str) -> None:
    chart = chart_of(full_page, "Gradient norm")
    axis = chart[chart.index('id="matplotlib.axis_2"') :]
    assert axis.count('id="ytick_') >= 10, "labelled marks and those between"
    assert ">0.1</text>" in axis
    assert 'id="m' in axis, "the mark itself is drawn"


def test_charts_that_fill_the_page_are_drawn_again_for_narrow_windows(full_page: str) -> None:
    broad, slim = (
        [float(width) for width in re.findall(rf'<div class="{name}"><svg [^>]*?viewBox="0 0 ([\d.]+)', full_page)]
        for name in ("broad", "slim")
    )
    assert len(broad) == len(slim) == 4
    # Points at which the 9 points of the letters are at least 10 pixels in a card of 450 pixels.
    assert max(slim) <= 450 * 9 / 10
    assert min(broad) > 1.5 * max(slim)


LAYERS = {str(layer): [step % 5 for step in range(64)] for layer in range(8)}


def test_an_evaluation_reads_no_more_at_step_50_000_than_at_step_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two reports lies the same number of steps; what is read, kept and written must be the same too."""
    read: list[int] = []
    update = train.report.page.Summary.update

    def counting(summary: train.report.page.Summary) -> int:
        read.append(update(summary))
        return read[-1]

    monkeypatch.setattr(train.report.page.Summary, "update", counting)
    run = make_run(tmp_path / "run", [])
    sizes, step = [], 0
    for last in (450, 500, 49_950, 50_000):
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            while step < last:
                step += 1
                large = {"expert_load": LAYERS, "sample": "x = 1", "validation_loss": 3.0} if step % 50 == 0 else {}
                stream.write(json.dumps(make_record(step, **large)) + "\n")
        write_report(run)
        sizes.append([(run / name).stat().st_size for name in ("summary.json", "report.html")])
    _, early, between, late = read
    assert between > 90 * early
    assert late < 1.2 * early
    assert max(sizes[3]) < 700_000
    assert all(late_size < 4 * early_size for late_size, early_size in zip(sizes[3], sizes[1]))


def test_the_command_writes_and_prints_the_path(tmp_path: Path) -> None:
    run = full_run(tmp_path / "demo")
    command = [sys.executable, "-m", "train.report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{run / 'report.html'}\n"
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == f"run folder {tmp_path}: must hold metrics.jsonl; name the folder of a run\n"
