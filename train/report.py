"""`report.html`: one self-contained page about a run, from the files in its folder.

    metrics.jsonl   one object per step (`train/metrics.py`)     -> curves, expert load, samples
    facts.json      what the run knew at its start                -> header
    config.yaml     the composed configuration                    -> folded at the end

No script and nothing remote: the page can be mailed. Whatever is missing is left out, so a run of one
step, or one that was killed, has a report too. ``python -m train.report RUN_DIR`` writes it again.
"""

import html
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.output import run_command
from train.charts import MUTED, SERIES_1, SERIES_2, SERIES_3, Bars, Line, bar_chart, heat_map, line_chart

REPORT_FILE = "report.html"
FACTS_FILE = "facts.json"

Record = dict[str, Any]


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


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the metrics, facts and configuration found there; its path.

    Raises:
        ValueError: ``run_dir`` has no `metrics.jsonl`.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"run folder {run_dir}: must hold metrics.jsonl; name the folder of a run")
    records = _read_records(metrics)
    facts_path, config_path = run_dir / FACTS_FILE, run_dir / "config.yaml"
    facts: dict[str, Any] = json.loads(facts_path.read_text("utf-8")) if facts_path.is_file() else {}
    config = config_path.read_text("utf-8") if config_path.is_file() else ""
    sections = [
        _header(run_dir.resolve().name, records, facts),
        *_forced(records),
        *_curves(records, facts),
        *_expert_load(records),
        *_rank_load(records),
        *_samples(records),
        *_skipped(records),
        *_configuration(config),
    ]
    top, bottom = _PAGE.split("{body}")
    page = top.replace("{title}", html.escape(run_dir.resolve().name)) + "\n".join(sections) + bottom
    path = run_dir / REPORT_FILE
    staged = run_dir / f".{REPORT_FILE}.tmp"
    staged.write_text(page, "utf-8")
    staged.replace(path)
    return path


def _read_records(path: Path) -> list[Record]:
    """The steps' objects; a last line torn by a kill is left out."""
    records = []
    for line in path.read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of the records that have the number ``name``."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _header(name: str, records: Sequence[Record], facts: dict[str, Any]) -> str:
    _, losses = _series(records, "loss")
    _, validation = _series(records, "validation_loss")
    tokens = records[-1].get("tokens") if records else None
    _, rates = _series(records, "tokens_per_second")
    tiles: list[tuple[str, str | None, str]] = [
        ("steps", f"{records[-1]['step']:,}" if records else "0", ""),
        ("tokens", None if tokens is None else _count(tokens), ""),
        ("parameters", _count(facts["parameters"]) if "parameters" in facts else None, _active(facts)),
        ("training loss", f"{losses[-1]:.4f}" if losses else None, "last, nats/token"),
        ("validation loss", f"{min(validation):.4f}" if validation else None, "best, nats/token"),
        (
            "unigram entropy",
            f"{facts['unigram_entropy']:.4f}" if facts.get("unigram_entropy") is not None else None,
            "nats/token",
        ),
        ("speed", _count(float(np.median(rates))) if rates else None, "median tokens/s"),
    ]
    shown = "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{value}</dd><small>{note}</small></div>'
        for label, value, note in tiles
        if value is not None
    )
    told = {"parameters", "active_parameters", "unigram_entropy"}
    others = " · ".join(
        f"{html.escape(key.replace('_', ' '))} <b>{html.escape(_fact(value))}</b>"
        for key, value in facts.items()
        if key not in told and value is not None
    )
    return f'<header><h1>{html.escape(name)}</h1><p class="facts">{others}</p></header><dl class="tiles">{shown}</dl>'


def _fact(value: Any) -> str:
    return _count(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _active(facts: dict[str, Any]) -> str:
    active = facts.get("active_parameters")
    return "" if active is None else f"{_count(active)} active"


def _count(value: float) -> str:
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * scale or (scale > 1e3 and abs(value) >= scale):
            return f"{value / scale:.4g}{suffix}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.4g}"


def _forced(records: Sequence[Record]) -> list[str]:
    """The banner of a run whose experts a rule chose."""
    rules = sorted({record["forced_routing"] for record in records if record.get("forced_routing")})
    if not rules:
        return []
    return [
        f'<p class="card banner"><b>Forced routing: {html.escape(", ".join(rules))}.</b> A rule chose the experts, not '
        "the routers, to measure a load. Losses and weights of this run are worth nothing.</p>"
    ]


def _curves(records: Sequence[Record], facts: dict[str, Any]) -> list[str]:
    charts = []
    lines = _lines(records, "loss", label="training")
    x, y = _series(records, "validation_loss")
    if x:
        lines.append(Line(label="validation", x=x, y=y, colour=SERIES_2, marked=True))
    entropy = facts.get("unigram_entropy")
    if lines and entropy is not None:
        span = [records[0]["step"], records[-1]["step"]]
        lines.append(Line(label="unigram entropy", x=span, y=[entropy] * 2, colour=MUTED, dashed=True))
    if lines:
        svg = line_chart(lines, y_label="loss (nats/token)", size=(10.6, 3.6))
        charts.append(_card("Loss", svg, wide=True))
    small = [plot for plot in _SMALL_PLOTS if _series(records, plot.name)[0]]
    for index, plot in enumerate(small):
        alone = index == len(small) - 1 and index % 2 == 0
        svg = line_chart(
            _lines(records, plot.name, label=plot.title),
            y_label=plot.y_label,
            log=plot.log,
            percent=plot.percent,
            from_zero=plot.from_zero,
            size=(10.6, 2.5) if alone else (5.2, 2.5),
        )
        charts.append(_card(plot.title, svg, wide=alone))
    return [f'<section class="grid">{"".join(charts)}</section>'] if charts else []


def _lines(records: Sequence[Record], name: str, *, label: str) -> list[Line]:
    """The line of ``name``, if any record has it."""
    x, y = _series(records, name)
    return [Line(label=label, x=x, y=y, colour=SERIES_1)] if x else []


def _card(title: str, content: str, *, wide: bool = False, note: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f'<figure class="card{" wide" if wide else ""}"><h2>{title}</h2>{note}{content}</figure>'


def _expert_load(records: Sequence[Record]) -> list[str]:
    loaded = [record for record in records if record.get("expert_load")]
    cards = []
    if loaded:
        load: dict[str, list[float]] = loaded[-1]["expert_load"]
        layers = _in_order(load)
        values = np.full((len(layers), max(len(load[layer]) for layer in layers)), np.nan)
        for row, layer in enumerate(layers):
            counts = np.asarray(load[layer], dtype=float)
            values[row, : len(counts)] = counts / max(counts.mean(), 1e-9)
        svg = heat_map(layers, values, x_label="expert", y_label="layer", colour_label="load / mean load")
        note = (
            f"Tokens routed to each expert at step {loaded[-1]['step']:,}, over the mean of its layer; 1 is balanced."
        )
        cards.append(_card("Expert load", svg, wide=True, note=note))
    x, y = _series(records, "max_over_mean_load")
    if x:
        line = Line(label="largest / mean", x=x, y=y, colour=SERIES_3)
        svg = line_chart([line], y_label="largest load / mean load", size=(10.6, 2.5))
        cards.append(_card("Balance over time", svg, wide=True, note="Worst layer of each step; 1 is balanced."))
    return [f'<section class="grid">{"".join(cards)}</section>'] if cards else []


def _rank_load(records: Sequence[Record]) -> list[str]:
    """What balancing did for the ranks, of the last record with numbers of ranks."""
    shared = [record for record in records if any("before" in x for x in (record.get("expert_balance") or {}).values())]
    if not shared:
        return []
    balance: dict[str, dict[str, float]] = shared[-1]["expert_balance"]
    layers = _in_order(balance)
    before, after = ([balance[layer][name] for layer in layers] for name in ("before", "after"))
    bars = [
        Bars(label="every expert at its home", heights=before, colour=SERIES_2),
        Bars(label="as computed", heights=after, colour=SERIES_1),
    ]
    svg = bar_chart(
        layers, bars, y_label="busiest rank / mean", x_label="layer", level=(1.0, "all ranks equal"), size=(10.6, 2.8)
    )
    borrowed, lent, dropped = (sum(x[name] for x in balance.values()) for name in ("borrowed", "lent_bytes", "dropped"))
    note = (
        f"Rows of the busiest rank over the mean at step {shared[-1]['step']:,}. Lent: {borrowed:,} copies of experts, "
        f"{_count(lent)} bytes. Rows dropped: {dropped:,}."
    )
    return [f'<section class="grid">{_card("Ranks before and after balancing", svg, wide=True, note=note)}</section>']


def _in_order(layers: Iterable[str]) -> list[str]:
    """Layers by number."""
    return sorted(layers, key=lambda layer: (len(layer), layer))


def _samples(records: Sequence[Record]) -> list[str]:
    samples = [record for record in records if record.get("sample")]
    if not samples:
        return []
    items = []
    for record in reversed(samples):
        loss = record.get("validation_loss")
        head = f"step {record['step']:,}" + (f" · validation loss {loss:.4f}" if loss is not None else "")
        opened = " open" if record is samples[-1] else ""
        items.append(f"<details{opened}><summary>{head}</summary><pre>{html.escape(record['sample'])}</pre></details>")
    return [f'<section class="card"><h2>Text samples</h2>{"".join(items)}</section>']


def _skipped(records: Sequence[Record]) -> list[str]:
    skipped = [record for record in records if record.get("skipped")]
    if not skipped:
        return []
    rows = "".join(
        f"<tr><td>{record['step']:,}</td><td>{_number(record.get('loss'))}</td>"
        f"<td>{_number(record.get('grad_norm'))}</td><td><code>{html.escape(_ids(record))}</code></td></tr>"
        for record in skipped[:100]
    )
    more = f'<p class="note">and {len(skipped) - 100} more</p>' if len(skipped) > 100 else ""
    return [
        f'<section class="card"><h2>Skipped steps ({len(skipped):,})</h2><p class="note">The loss or a gradient was '
        f"not finite, so nothing was updated.</p><table><tr><th>step</th><th>loss</th><th>gradient norm</th>"
        f"<th>samples</th></tr>{rows}</table>{more}</section>"
    ]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark;
  --page: #f6f6f4; --card: #fff; --ink: #16161a; --muted: #6a6a70; --grid: #e4e4e0;
  --series-1: #2a78d6; --series-2: #d9622b; --series-3: #1b8f6a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131316; --card: #1c1c20; --ink: #ececf0; --muted: #9b9ba3; --grid: #34343a;
  --series-1: #5b9ef0; --series-2: #f08a55; --series-3: #45bd95; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; display: grid; gap: 16px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -0.01em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 14px; font-weight: 600; margin: 0 0 6px; }
.facts { color: var(--muted); margin: 6px 0 0; } .facts b { color: var(--ink); font-weight: 500; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 12px; margin: 0; }
.tile, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile dt, .tile small { color: var(--muted); font-size: 12px; display: block; }
.tile dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { margin: 0; padding: 14px 16px; min-width: 0; } .wide { grid-column: 1 / -1; }
.card svg { display: block; width: 100%; height: auto; }
.banner { border-color: var(--series-2); border-left: 6px solid var(--series-2); }
.note { color: var(--muted); font-size: 13px; margin: -4px 0 8px; }
details + details { margin-top: 4px; } summary { cursor: pointer; color: var(--muted); font-size: 13px; }
pre { margin: 8px 0; padding: 12px; background: var(--page); border-radius: 8px; max-height: 420px;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-top: 1px solid var(--grid); vertical-align: top; }
@media (max-width: 720px) { .grid { grid-template-columns: minmax(0, 1fr); } }
</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def main(arguments: Sequence[str]) -> int:
    """``python -m train.report RUN_DIR``: write the report of a run and print its path."""
    if len(arguments) != 1:
        print("usage: python -m train.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(arguments[0])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
