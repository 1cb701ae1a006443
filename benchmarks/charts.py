"""Draw the charts: few colours, labels beside the data, and a white background in dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.measuring import PERCENTILES

OURS = "#0b6e4f"
OTHERS = ("#c8553d", "#6c757d", "#3d5a80", "#b08900")
GREY = "#9aa1a9"
INK = "#22262a"

matplotlib.rcParams.update(
    {
        "font.size": 10,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.facecolor": "white",
        "savefig.dpi": 150,
    }
)

Bar = tuple[str, float, tuple[float, float] | None, bool]
"""One bar of a chart: label, length, spread, and True if the bar is about this package."""


def short(value: float) -> str:
    """Format a number with three significant digits, never in scientific notation."""
    if value != value:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def figure(
    title: str, *, height: float = 3.6, rows: int = 1, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    picture = Figure(figsize=(8, height), layout="constrained")
    picture.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return picture, list(picture.subplots(rows, columns, squeeze=False).flat)


def bars(title: str, unit: str, rows: Sequence[Bar], *, limit: float | None = None) -> Figure:
    """Draw horizontal bars, each with its number at the end; a line marks the target *limit*."""
    picture, (axes,) = figure(title, height=1.2 + 0.38 * len(rows))
    bars_on(axes, unit, rows, limit=limit)
    return picture


def quartile_bars(
    title: str,
    unit: str,
    series: Mapping[str, Sequence[float]],
    is_ours: Callable[[str], bool] = lambda label: True,
) -> Figure:
    """Draw one bar per series: its length is the median, and a line shows p25 to p75."""
    rows = [(label, p50, (p25, p75), is_ours(label)) for label, (p25, p50, p75) in series.items()]
    return bars(f"{title} (median; the line: p25 to p75)", unit, rows)


def bars_on(axes: Axes, unit: str, rows: Sequence[Bar], *, limit: float | None = None) -> None:
    ends = [max(length, span[1] if span else length) for _, length, span, _ in rows]
    for place, ((_, length, span, is_ours), end) in enumerate(zip(rows, ends, strict=True)):
        axes.barh(place, length, color=OURS if is_ours else GREY, height=0.62)
        if span is not None:
            axes.plot(span, (place, place), color=INK, linewidth=1.4)
        axes.annotate(short(length), (end, place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max([*ends, limit or 0]) * 1.14 or 1)
    axes.set_xlabel(unit)
    if limit is not None:
        axes.axvline(limit, color=OTHERS[0], linestyle="--", linewidth=1)
        axes.annotate(
            f"target {short(limit)}",
            (limit, 1),
            (-4, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right",
            color=OTHERS[0],
        )


def curves_on(
    axes: Axes, title: str, lines: Sequence[tuple[str, Sequence[float], str]], *, floor: float = 0.5
) -> None:
    """Draw lateness over percentiles on a logarithmic scale, with a label at each line's end."""
    axes.set_title(title, fontsize=10, loc="left")
    marks = (50, 90, 99, 99.9)
    shown = [index for index, percent in enumerate(PERCENTILES) if percent <= 99.9]
    across = [_stretched(PERCENTILES[index]) for index in shown]
    for label, values, colour in lines:
        heights = [max(values[index], floor) for index in shown]
        axes.plot(across, heights, color=colour, linewidth=2)
        axes.annotate(
            label,
            (across[-1], heights[-1]),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks([_stretched(percent) for percent in marks], [f"p{m:g}" for m in marks])
    axes.set_xlim(0, across[-1] * 1.32)
    axes.set_ylabel("milliseconds late")
    axes.set_xlabel("percentile of the messages")
    axes.grid(axis="y", color="#e3e6e8", linewidth=0.8)


def _stretched(percent: float) -> float:
    """Scale percentiles for the tail: p90, p99 and p99.9 have equal distances."""
    return -log10(1 - percent / 100)
