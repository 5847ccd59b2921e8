"""The report's charts: inline SVG by matplotlib, coloured by the page's CSS so that light and dark agree.

matplotlib draws with placeholder colours; `_to_svg` swaps each for a CSS variable of `train/report/style.py`,
and leaves text as text, set in the page's font. No pyplot, so no global state.

An SVG scales with its column, letters and all: a chart that fills the page has a second drawing for narrow windows.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

PLACEHOLDERS = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--grid)",
    "#040404": "var(--series-1)",
    "#050505": "var(--series-2)",
    "#060606": "var(--series-3)",
}
INK, MUTED, GRID, SERIES_1, SERIES_2, SERIES_3 = PLACEHOLDERS

WIDE, NARROW = 10.6, 5.2
"""Widths in inches: of a chart that fills the page, and of one in half of it or in a narrow window."""

LOAD_COLOURS = LinearSegmentedColormap.from_list("load", ["#184f95", "#6da7ec", "#f0efec", "#ec835a", "#a32a13"])
"""Diverging, neutral at the mean: blue is idle, red overloaded."""

MOST_LOAD = 4.0
"""Top of the heat map's scale."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One series of bars, one for each place on the x axis."""

    label: str
    heights: Sequence[float]
    colour: str = SERIES_1


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series.

    low, high: a band around it, as long as ``y``.
    marked: draws each point (few, apart).
    dashed: a level to compare with.
    faint: drawn thin and pale, beneath its smoothed self.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = SERIES_1
    marked: bool = False
    dashed: bool = False
    faint: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str,
    x_label: str = "step",
    log: bool = False,
    percent: bool = False,
    from_zero: bool = False,
    tokens: tuple[Sequence[float], Sequence[float]] | None = None,
    size: tuple[float, float] = (NARROW, 2.5),
) -> str:
    """Lines over steps as an ``<svg>``; with a legend if there are several.

    Args:
        lines: at least one, each with at least one point.
        y_label: quantity and unit.
        x_label: the same for x.
        log: logarithmic y, where there is a positive value.
        percent: y is a fraction, shown in percent.
        from_zero: y starts at 0.
        tokens: (steps, tokens consumed until then), both rising, for a second axis above the plot.
        size: inches at 96 pixels; scales with the page.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_axes(size)
        for line in lines:
            _draw(axes, line)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        if len({x for line in lines for x in line.x}) == 1:
            axes.set_xlim(lines[0].x[0] - 1, lines[0].x[0] + 1)
        if log and any(y > 0 for line in lines for y in line.y):
            _scale_log(axes)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(FuncFormatter(_percent if percent else _short))
        largest = max(max((*line.y, *line.high)) for line in lines)
        if from_zero and largest > 0:
            axes.set_ylim(0, 1.08 * largest)
        if tokens is not None and len(tokens[0]) > 1:
            _add_tokens(axes, *tokens)
        if len(lines) > 1 and tokens is not None:
            # Room for the legend, since the axis above is full.
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.14 * (high - low))
        if len(lines) > 1:
            place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0)} if tokens is None else {"loc": "upper right"}
            axes.legend(**place, ncols=len(lines), frameon=False, handlelength=1.4, columnspacing=1.2)
        return _to_svg(figure, y_label)


def _scale_log(axes: Axes) -> None:
    """A logarithmic y axis with its marks: labelled ones, and small ones for the numbers between."""
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_minor_locator(LogLocator(subs=(3, 4, 6, 7, 8, 9)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines["left"].set_visible(True)
    axes.tick_params(axis="y", which="major", length=5, width=0.8)
    axes.tick_params(axis="y", which="minor", length=2.5, width=0.6)


def _add_tokens(axes: Axes, steps: Sequence[float], tokens: Sequence[float]) -> None:
    """A second x axis above the plot, in tokens; the last rate goes on beyond the last step."""
    x = np.array([0.0, *steps, 2 * steps[-1]])
    y = np.array([0.0, *tokens, 2 * tokens[-1]])

    def to_tokens(at: Any) -> Any:
        return np.interp(at, x, y)

    def to_steps(at: Any) -> Any:
        return np.interp(at, y, x)

    top = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
    top.set_xlabel("tokens")
    top.xaxis.set_major_locator(MaxNLocator(6))
    top.xaxis.set_major_formatter(FuncFormatter(_short))


def heat_map(
    rows: Sequence[str], values: np.ndarray, *, x_label: str, y_label: str, colour_label: str, width: float = WIDE
) -> str:
    """``values`` [rows, columns], 1 where balanced, as coloured cells in an ``<svg>``; NaN is left empty.

    What is above `MOST_LOAD` has its colour: one hot cell must not turn all others pale.
    """
    height = 0.9 + min(5.0, max(0.9, 0.24 * len(rows)))
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_axes((width, height))
        largest = float(np.nanmax(values))
        top = min(max(2.0, largest), MOST_LOAD)
        norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top)
        image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=LOAD_COLOURS, norm=norm)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.xaxis.set_major_locator(MaxNLocator(12 if width == WIDE else 6, integer=True))
        every = max(1, len(rows) // 16)
        axes.set_yticks(range(0, len(rows), every), labels=list(rows)[::every])
        bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=max(8, 9 * height), ticks=[0, 0.5, 1, top])
        bar.ax.set_yticklabels(["0", "½", "1", f"≥ {top:g}" if largest > top else f"{top:.3g}"])
        bar.outline.set_visible(False)
        bar.set_label(colour_label)
        return _to_svg(figure, colour_label)


def bar_chart(
    names: Sequence[str],
    bars: Sequence[Bars],
    *,
    y_label: str,
    x_label: str,
    level: tuple[float, str],
    size: tuple[float, float] = (WIDE, 2.5),
) -> str:
    """Bars from 0, side by side at each place, as an ``<svg>``; their numbers on top while there is room for them.

    Args:
        names: of the places on the x axis.
        bars: at least one series, as many heights as names.
        y_label: quantity and unit.
        x_label: what the places are.
        level: (height, label) of a dashed line to compare with.
        size: inches at 96 pixels; scales with the page.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new_axes(size)
        place, width = np.arange(len(names)), min(0.8 / len(bars), 0.06 * len(names))
        for index, series in enumerate(bars):
            left = place + (index - (len(bars) - 1) / 2) * width
            drawn = axes.bar(left, series.heights, 0.92 * width, color=series.colour, label=series.label)
            if len(names) * len(bars) <= 2.3 * size[0]:
                axes.bar_label(drawn, fmt="%.2f", fontsize=8, color=MUTED, padding=3)
        height, label = level
        axes.axhline(height, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, label=label)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylim(0, 1.12 * max(height, *(max(series.heights) for series in bars)))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        every = max(1, int(len(names) / (2.3 * size[0])))
        axes.set_xticks(place[::every], labels=list(names)[::every])
        handles, labels = axes.get_legend_handles_labels()
        # The level is drawn last and told last.
        order = [*range(1, len(handles)), 0]
        axes.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(handles),
            frameon=False,
            handlelength=1.4,
        )
        return _to_svg(figure, y_label)


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.linewidth": 1.0,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def _new_axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    return figure, axes


def _draw(axes: Axes, line: Line) -> None:
    if len(line.low):
        axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.16, linewidth=0)
    axes.plot(
        line.x,
        line.y,
        color=line.colour,
        label=line.label,
        linestyle=(0, (4, 3)) if line.dashed else "-",
        linewidth=0.8 if line.faint else 1.2 if line.dashed else 1.7,
        alpha=0.6 if line.faint else 1.0,
        marker="o" if line.marked or len(line.x) == 1 else None,
        markersize=4.5,
    )


def _short(value: float, position: int | None = None) -> str:
    for scale, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"


def _percent(value: float, position: int | None = None) -> str:
    return f"{100 * value:g}%"


def _to_svg(figure: Figure, title: str) -> str:
    """The figure as one ``<svg>`` that takes its colours from the page and scales with its column."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{title}" ', svg, count=1)
    svg = re.sub(r"'?(DejaVu Sans|sans-serif)'?[^;\"]*", "inherit", svg)
    for placeholder, variable in PLACEHOLDERS.items():
        svg = svg.replace(placeholder, variable)
    return svg
