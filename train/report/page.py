"""`report.html`: one self-contained page about a run, from the files in its folder.

    metrics.jsonl   one object per step (`train/metrics.py`); read through `summary.json` (`train/report/summary.py`)
    facts.json      what the run knew at its start                -> header
    config.yaml     the composed configuration                    -> folded at the end

No script and nothing remote: the page can be mailed. Whatever is missing is left out, so a run of one
step, or one that was killed, has a report too.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from train.metrics import METRICS_FILE
from train.report.charts import (
    MUTED,
    NARROW,
    SERIES_1,
    SERIES_2,
    SERIES_3,
    WIDE,
    Bars,
    Line,
    bar_chart,
    heat_map,
    line_chart,
)
from train.report.facts import read_facts
from train.report.header import count_text, make_header
from train.report.style import PAGE
from train.report.summary import Bin, Record, Summary, last_records, load_summary

REPORT_FILE = "report.html"

RECENT = 10
"""Steps whose mean is shown as the training loss: one alone is a matter of luck."""

LEAST_REACH = 5
"""Points to each side over which a loss is smoothed, at least."""

MOST_SAMPLES = 30
MOST_SKIPPED_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart of one number of the records; the options are those of `line_chart`."""

    name: str
    title: str
    y_label: str
    log: bool = False
    percent: bool = False
    from_zero: bool = True


_SMALL_PLOTS = (
    Plot(name="tokens_per_second", title="Speed", y_label="tokens/s"),
    Plot(name="mfu", title="Model FLOPs utilisation", y_label="MFU (% of peak)", percent=True),
    Plot(name="learning_rate", title="Learning rate", y_label="learning rate"),
    Plot(name="grad_norm", title="Gradient norm", y_label="norm before clipping", log=True, from_zero=False),
    Plot(name="max_logit", title="Largest attention logit", y_label="logit", from_zero=False),
)


@dataclass(frozen=True)
class Series:
    """One number over the run, a point for each bin that has it: its place in steps, mean, least and largest."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    widest: int = 0

    @classmethod
    def of(cls, bins: Sequence[Bin], name: str) -> "Series":
        """A bin's place is its middle, and of a number that few steps have, its last step."""
        having = [(item, item.numbers[name]) for item in bins if name in item.numbers]
        return cls(
            [(item.first + item.last) / 2 if value.steps > 1 else float(item.last) for item, value in having],
            [value.mean for _, value in having],
            [value.least for _, value in having],
            [value.largest for _, value in having],
            max((value.steps for _, value in having), default=0),
        )

    def line(self, label: str, *, colour: str = SERIES_1, marked: bool = False, faint: bool = False) -> Line:
        """This series as a line, in a band from the least to the largest where a point is more than one step."""
        low, high = (self.low, self.high) if self.widest > 1 else ([], [])
        return Line(label=label, x=self.x, y=self.y, low=low, high=high, colour=colour, marked=marked, faint=faint)


def write_report(run_dir: Path, *, rebuild: bool = False) -> Path:
    """Write ``run_dir/report.html`` from the metrics, facts and configuration found there; its path.

    Args:
        rebuild: read all of the metrics again, and not only what came since the last report.

    Raises:
        ValueError: ``run_dir`` has no `metrics.jsonl`.
    """
    metrics = run_dir / METRICS_FILE
    if not metrics.is_file():
        raise ValueError(f"run folder {run_dir}: must hold metrics.jsonl; name the folder of a run")
    summary = Summary(metrics, bins=[]) if rebuild else load_summary(run_dir)
    summary.update()
    summary.save()
    config_path = run_dir / "config.yaml"
    config = config_path.read_text("utf-8") if config_path.is_file() else ""
    name, facts = run_dir.resolve().name, read_facts(run_dir)
    recent = [record["loss"] for record in last_records(metrics, RECENT) if record.get("loss") is not None]
    sections = [
        make_header(name, summary.bins, facts, recent=recent),
        *_forced(summary.bins),
        *_curves(summary.bins, facts),
        *_expert_load(summary),
        *_rank_load(summary),
        *_samples(summary),
        *_skipped(summary),
        *_configuration(config),
    ]
    top, bottom = PAGE.split("{body}")
    page = top.replace("{title}", html.escape(name)) + "\n".join(sections) + bottom
    path = run_dir / REPORT_FILE
    staged = run_dir / f".{REPORT_FILE}.tmp"
    staged.write_text(page, "utf-8")
    staged.replace(path)
    return path


def _forced(bins: Sequence[Bin]) -> list[str]:
    """The banner of a run whose experts a rule chose."""
    rules = sorted({rule for item in bins for rule in item.forced})
    if not rules:
        return []
    return [
        f'<p class="card banner"><b>Forced routing: {html.escape(", ".join(rules))}.</b> A rule chose the experts, not '
        "the routers, to measure a load. Losses and weights of this run are worth nothing.</p>"
    ]


def _curves(bins: Sequence[Bin], facts: dict[str, Any]) -> list[str]:
    charts = _loss(bins, facts)
    small = [(plot, series) for plot in _SMALL_PLOTS if (series := Series.of(bins, plot.name)).x]
    for index, (plot, series) in enumerate(small):
        alone = index == len(small) - 1 and index % 2 == 0

        def draw(width: float, plot: Plot = plot, series: Series = series) -> str:
            return line_chart(
                [series.line(plot.title)],
                y_label=plot.y_label,
                log=plot.log,
                percent=plot.percent,
                from_zero=plot.from_zero,
                size=(width, 2.5),
            )

        charts.append(_card(plot.title, _both(draw) if alone else draw(NARROW), wide=alone))
    return [f'<section class="grid">{"".join(charts)}</section>'] if charts else []


def _loss(bins: Sequence[Bin], facts: dict[str, Any]) -> list[str]:
    """The chart of losses: each step pale, the same smoothed, validation, what token counts reach."""
    training, validation = Series.of(bins, "loss"), Series.of(bins, "validation_loss")
    lines, note = [], ""
    if training.x:
        half = max(LEAST_REACH, len(training.x) // 40) if len(training.x) > 4 * LEAST_REACH else 0
        lines.append(training.line("training", faint=half > 0))
        if half:
            lines.append(Line(label="smoothed", x=training.x, y=smooth(training.y, half=half)))
            steps = round((2 * half + 1) * (bins[-1].last - bins[0].first + 1) / len(bins))
            note = f"Smoothed over {steps:,} neighbouring steps."
    if validation.x:
        lines.append(validation.line("validation", colour=SERIES_2, marked=len(validation.x) <= 60))
    entropy = facts.get("unigram_entropy")
    if lines and entropy is not None:
        span = [bins[0].first, bins[-1].last]
        lines.append(Line(label="unigram entropy", x=span, y=[entropy] * 2, colour=MUTED, dashed=True))
    if not lines:
        return []
    clock = [(item.last, item.tokens) for item in bins if item.tokens is not None]
    tokens = ([step for step, _ in clock], [count for _, count in clock])
    svg = _both(lambda width: line_chart(lines, y_label="loss (nats/token)", tokens=tokens, size=(width, 3.6)))
    return [_card("Loss", svg, wide=True, note=note)]


def smooth(values: Sequence[float], *, half: int) -> list[float]:
    """At each place the straight line that fits its ``half`` neighbours to each side best: a slope stays where it is,
    at the ends too, where a mean would lag behind."""
    found = []
    for place in range(len(values)):
        near = np.asarray(values[max(0, place - half) : place + half + 1])
        at = np.arange(len(near)) - min(place, half)
        centred = at - at.mean()
        slope = (centred @ near) / max(centred @ centred, 1.0)
        found.append(float(near.mean() - slope * at.mean()))
    return found


def _both(draw: Callable[[float], str]) -> str:
    """A chart that fills the page, drawn for wide windows and for narrow ones, where its letters would be too small."""
    return f'<div class="broad">{draw(WIDE)}</div><div class="slim">{draw(NARROW)}</div>'


def _card(title: str, content: str, *, wide: bool = False, note: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f'<figure class="card{" wide" if wide else ""}"><h2>{title}</h2>{note}{content}</figure>'


def _last_with(summary: Summary, name: str) -> Record | None:
    """The last step that has this large field."""
    starts = [item.lines[name] for item in summary.bins if name in item.lines]
    return summary.record(starts[-1]) if starts else None


def _expert_load(summary: Summary) -> list[str]:
    cards = []
    if (record := _last_with(summary, "expert_load")) is not None:
        load: dict[str, list[float]] = record["expert_load"]
        layers = _in_order(load)
        values = np.full((len(layers), max(len(load[layer]) for layer in layers)), np.nan)
        for row, layer in enumerate(layers):
            counts = np.asarray(load[layer], dtype=float)
            values[row, : len(counts)] = counts / max(counts.mean(), 1e-9)

        def draw(width: float) -> str:
            return heat_map(
                layers, values, x_label="expert", y_label="layer", colour_label="load / mean load", width=width
            )

        note = f"Tokens routed to each expert at step {record['step']:,}, over the mean of its layer; 1 is balanced."
        cards.append(_card("Expert load", _both(draw), wide=True, note=note))
    series = Series.of(summary.bins, "max_over_mean_load")
    if series.x:
        span = [series.x[0], series.x[-1]]
        lines = [
            series.line("busiest expert", colour=SERIES_3),
            Line(label="all experts equal", x=span, y=[1.0, 1.0], colour=MUTED, dashed=True),
        ]
        svg = _both(lambda width: line_chart(lines, y_label="largest load / mean load", size=(width, 2.5)))
        cards.append(_card("Balance over time", svg, wide=True, note="Worst layer of each step; 1 is balanced."))
    return [f'<section class="grid">{"".join(cards)}</section>'] if cards else []


def _rank_load(summary: Summary) -> list[str]:
    """What balancing did for the ranks, of the last record with numbers of layers."""
    record = _last_with(summary, "expert_balance")
    if record is None or not any("before" in layer for layer in record["expert_balance"].values()):
        return []
    balance: dict[str, dict[str, float]] = record["expert_balance"]
    layers = _in_order(balance)
    before, after = ([balance[layer][name] for layer in layers] for name in ("before", "after"))
    bars = [
        Bars(label="every expert at its home", heights=before, colour=SERIES_2),
        Bars(label="as computed", heights=after, colour=SERIES_1),
    ]

    def draw(width: float) -> str:
        level, size = (1.0, "all ranks equal"), (width, 2.8)
        return bar_chart(layers, bars, y_label="busiest rank / mean", x_label="layer", level=level, size=size)

    borrowed, lent, dropped = (sum(x[name] for x in balance.values()) for name in ("borrowed", "lent_bytes", "dropped"))
    note = (
        f"Rows of the busiest rank over the mean at step {record['step']:,}. Lent: {borrowed:,} copies of experts, "
        f"{count_text(lent)} bytes. Rows dropped: {dropped:,}."
    )
    card = _card("Ranks before and after balancing", _both(draw), wide=True, note=note)
    return [f'<section class="grid">{card}</section>']


def _in_order(layers: Iterable[str]) -> list[str]:
    """Layers by number."""
    return sorted(layers, key=lambda layer: (len(layer), layer))


def _samples(summary: Summary) -> list[str]:
    """The newest sample open, and earlier ones, evenly spread over the run."""
    starts = [item.lines["sample"] for item in summary.bins if "sample" in item.lines]
    if not starts:
        return []
    chosen = sorted({round(place) for place in np.linspace(0, len(starts) - 1, min(MOST_SAMPLES, len(starts)))})
    items = []
    for index in reversed(chosen):
        record = summary.record(starts[index])
        loss = record.get("validation_loss")
        head = f"step {record['step']:,}" + (f" · validation loss {loss:.4f}" if loss is not None else "")
        opened = " open" if index == chosen[-1] else ""
        items.append(f"<details{opened}><summary>{head}</summary><pre>{html.escape(record['sample'])}</pre></details>")
    return [f'<section class="card"><h2>Text samples</h2>{"".join(items)}</section>']


def _skipped(summary: Summary) -> list[str]:
    count = sum(item.skipped for item in summary.bins)
    if not count:
        return []
    starts = [start for item in summary.bins for start in item.skipped_lines][:MOST_SKIPPED_ROWS]
    rows = "".join(
        f"<tr><td>{record['step']:,}</td><td>{_number(record.get('loss'))}</td>"
        f"<td>{_number(record.get('grad_norm'))}</td><td><code>{html.escape(_ids(record))}</code></td></tr>"
        for record in map(summary.record, starts)
    )
    more = f'<p class="note">and {count - len(starts):,} more</p>' if count > len(starts) else ""
    return [
        f'<section class="card"><h2>Skipped steps ({count:,})</h2><p class="note">The loss or a gradient was '
        f"not finite, so nothing was updated.</p><table><tr><th>step</th><th>loss</th><th>gradient norm</th>"
        f"<th>samples</th></tr>{rows}</table>{more}</section>"
    ]


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _ids(record: Record) -> str:
    ids = record.get("sample_ids")
    return ", ".join(map(str, ids)) if ids else str(record.get("samples_hash", ""))


def _configuration(config: str) -> list[str]:
    if not config:
        return []
    return [
        f'<section class="card"><h2>Configuration</h2><details><summary>config.yaml</summary>'
        f"<pre>{html.escape(config)}</pre></details></section>"
    ]
