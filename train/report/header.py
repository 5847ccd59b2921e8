"""The top of the report: what was run, and the numbers that one looks for first, in units that need no legend."""

import html
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from train.report.summary import Bin, Range

Tile = tuple[str, str | None, str]
"""Label, value (None: not known, left out), and what the value is counted in."""

TOLD = ("parameters", "active_parameters", "unigram_entropy", "training_tokens", "bytes_per_token", "begun")
"""Facts that the tiles tell."""

PRIVATE = ("command", "folder", "pid", "started", "user")
"""Facts of one start and whoever made it: in the run folder, and not on a page that is mailed."""

FIRST = ("ranks", "device", "precision", "matmul_flops_per_second", "versions")
"""Facts that the line above the tiles begins with."""


def make_header(name: str, bins: Sequence[Bin], facts: dict[str, Any], *, recent: Sequence[float]) -> str:
    """Title, facts and tiles.

    Args:
        name: of the run.
        bins: of its metrics.
        facts: of `facts.json`.
        recent: training losses of the last steps.
    """
    shown = "".join(
        f'<div class="tile"><dt>{label}</dt><dd>{value}</dd><small>{html.escape(note)}</small></div>'
        for label, value, note in [*_losses(bins, facts, recent), *_sizes(bins, facts)]
        if value is not None
    )
    listed = sorted(facts.items(), key=lambda fact: FIRST.index(fact[0]) if fact[0] in FIRST else len(FIRST))
    others = " · ".join(_fact(key, value) for key, value in listed if key not in TOLD + PRIVATE and value is not None)
    return f'<header><h1>{html.escape(name)}</h1><p class="facts">{others}</p></header><dl class="tiles">{shown}</dl>'


def _losses(bins: Sequence[Bin], facts: dict[str, Any], recent: Sequence[float]) -> list[Tile]:
    validation = total(bins, "validation_loss")
    training = sum(recent) / len(recent) if recent else None
    loss, text = (training, "training") if validation is None else (validation.least, "held-out text")
    entropy, size = facts.get("unigram_entropy"), facts.get("bytes_per_token")
    last = f"nats/token, mean of {len(recent)} steps" if len(recent) > 1 else "nats/token, last step"
    return [
        ("training loss", None if training is None else f"{training:.4f}", last),
        ("validation loss", None if validation is None else f"{validation.least:.4f}", "nats/token, best"),
        ("perplexity", None if loss is None else _perplexity(loss), f"per token, {text}"),
        ("bits per byte", None if loss is None or not size else f"{loss / math.log(2) / size:.3f}", text),
        ("unigram entropy", None if entropy is None else f"{entropy:.4f}", "nats/token, by token counts alone"),
    ]


def _sizes(bins: Sequence[Bin], facts: dict[str, Any]) -> list[Tile]:
    tokens = bins[-1].tokens if bins else None
    corpus, active, size = (facts.get(name) for name in ("training_tokens", "active_parameters", "bytes_per_token"))
    seen = "tokens" if tokens is None or not corpus else f"tokens, {tokens / corpus:.2g} x the corpus"
    length = "tokens" if not size else f"tokens of {size:.2f} bytes"
    rates = [item.numbers["tokens_per_second"].mean for item in bins if "tokens_per_second" in item.numbers]
    spent = total(bins, "step_seconds")
    return [
        ("steps", f"{bins[-1].last:,}" if bins else "0", ""),
        ("trained on", None if tokens is None else count_text(tokens), seen),
        ("corpus", None if corpus is None else count_text(corpus), length),
        (
            "model",
            count_text(facts["parameters"]) if "parameters" in facts else None,
            "parameters" if active is None else f"parameters, {count_text(active)} active",
        ),
        ("speed", count_text(float(np.median(rates))) if rates else None, "tokens/s, median"),
        ("training took", None if spent is None else duration_text(spent.total), _since(facts.get("begun"))),
    ]


def _since(begun: Any) -> str:
    """When the run began, to the minute."""
    try:
        return f"begun {datetime.fromisoformat(begun).astimezone(UTC):%d %b %Y, %H:%M} UTC"
    except (TypeError, ValueError):
        return ""


def total(bins: Sequence[Bin], name: str) -> Range | None:
    """A number over the whole run."""
    found: Range | None = None
    for item in bins:
        if name in item.numbers:
            found = item.numbers[name] if found is None else found.joined(item.numbers[name])
    return found


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 15 else f"{math.exp(min(loss, 700)):.1e}"


def _fact(key: str, value: Any) -> str:
    if key == "matmul_flops_per_second":
        return f"matrix products <b>{_rate_text(value)}</b>"
    if isinstance(value, dict):
        value = ", ".join(f"{name} {part}" for name, part in value.items() if part is not None)
    if key in ("device", "precision", "versions"):
        return f"<b>{html.escape(str(value))}</b>"
    if key == "ranks":
        return f"<b>{value:,}</b> rank{'' if value == 1 else 's'}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{html.escape(key.replace('_', ' '))} <b>{html.escape(count_text(value) if number else str(value))}</b>"


def _rate_text(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if value >= s), (1e6, "M"))
    return f"{value / scale:.3g} {unit}FLOP/s"


def count_text(value: float) -> str:
    """A number to four digits, with k, M, B or T."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * scale or (scale > 1e3 and abs(value) >= scale):
            return f"{value / scale:.4g}{suffix}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """The largest of days, hours, minutes and seconds, and the next one where there are fewer than ten of it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next((index for index, (value, _) in enumerate(parts) if value), 3)
    shown = 2 if parts[first][0] < 10 else 1
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + shown])
