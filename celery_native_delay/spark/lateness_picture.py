"""Two panels over the due time: how many tasks met which end, and how late they started.

What was sent after it was due is hatched above, and left out below: no broker was late there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ..durations import duration

try:
    from matplotlib.axes import Axes
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator
except ImportError as exc:
    raise ImportError("picture() draws with matplotlib: pip install matplotlib") from exc

INK = "#22262a"

#: Colours: green and grey for tasks that went as planned; the rest is to be seen.
COLOURS = {
    "ok": "#0b6e4f",
    "pending": "#c9ced3",
    "running": "#9aa1a9",
    "missing": "#c8553d",
    "duplicate": "#b08900",
    "early": "#3d5a80",
    "failed": "#6c2e3f",
}

LINES = {"late_p50": "#0b6e4f", "late_p99": "#b08900", "late_max": "#c8553d"}

#: Least lateness on the logarithmic scale; tasks that started sooner are drawn there.
_FLOOR_SECONDS = 0.001

#: Marks of that scale, of which some are left out when there would be more steps than these.
_MOST_STEPS = 6
_TICKS = {
    "1 ms": 0.001,
    "10 ms": 0.01,
    "100 ms": 0.1,
    "1 s": 1,
    "10 s": 10,
    "1 min": 60,
    "10 min": 600,
    "1 h": 3600,
    "6 h": 21_600,
    "1 day": 86_400,
    "7 days": 604_800,
    "30 days": 2_592_000,
    "1 year": 31_536_000,
}


def draw(rows: Sequence[dict[str, Any]], due_seconds: float) -> Figure:
    """The picture of a ``summary("due")``, whose steps are *due_seconds* wide.

    ``due`` is in microseconds since the epoch.
    """
    figure = Figure(figsize=(8, 5.2), layout="constrained", facecolor="white", dpi=150)
    figure.suptitle("Planned tasks", fontsize=12, fontweight="bold", x=0.01, ha="left", color=INK)
    counts, late = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_counts(counts, rows, due_seconds)
    _draw_lateness(late, rows, due_seconds)
    for axes in (counts, late):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    late.xaxis.set_major_locator(locator)
    late.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    late.set_xlabel(f"due (UTC), in steps of {duration(due_seconds)}")
    return figure


def _moment(row: dict[str, Any]) -> datetime:
    return datetime.fromtimestamp(row["due"] / 1e6, UTC)


def _draw_counts(axes: Axes, rows: Sequence[dict[str, Any]], due_seconds: float) -> None:
    across = [_moment(row) for row in rows]
    below = [0] * len(rows)
    for verdict, colour in COLOURS.items():
        heights = [row[verdict] for row in rows]
        if any(heights):
            axes.bar(
                across,  # type: ignore[arg-type]
                heights,
                width=timedelta(seconds=due_seconds),  # type: ignore[arg-type]
                bottom=below,
                align="edge",
                color=colour,
                label=f"{verdict} {sum(heights):,}",
            )
        below = [low + height for low, height in zip(below, heights, strict=True)]
    after = [row["sent_after_due"] for row in rows]
    if any(after):
        axes.bar(
            across,  # type: ignore[arg-type]
            after,
            width=timedelta(seconds=due_seconds),  # type: ignore[arg-type]
            align="edge",
            fill=False,
            hatch="////",
            edgecolor=INK,
            linewidth=0,
            label=f"of them sent after they were due {sum(after):,}",
        )
    axes.set_ylabel("tasks")
    if rows:
        axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_lateness(axes: Axes, rows: Sequence[dict[str, Any]], due_seconds: float) -> None:
    ran = [row for row in rows if row["late_max"] is not None]
    middle = timedelta(seconds=due_seconds / 2)
    across: list[datetime] = [_moment(row) + middle for row in ran]
    lines = {name: [max(_FLOOR_SECONDS, row[name]) for row in ran] for name in LINES}
    for name, colour in LINES.items():
        axes.plot(
            across,  # type: ignore[arg-type]
            lines[name],
            color=colour,
            linewidth=2,
            marker=".",
            markersize=3,
            label=name.removeprefix("late_"),
        )
    axes.set_yscale("log")
    _label(axes, [late for line in lines.values() for late in line] or [_FLOOR_SECONDS])
    axes.set_ylabel("late by, if sent in time")
    axes.grid(axis="y", color="#e3e6e8", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))


def _label(axes: Axes, seconds: Sequence[float]) -> None:
    """Durations as people say them, from the mark below the smallest to that above the largest."""
    marks = list(_TICKS.values())
    first = max((n for n, mark in enumerate(marks) if mark <= min(seconds)), default=0)
    last = next((n for n, mark in enumerate(marks) if mark >= max(seconds)), len(marks) - 1)
    last = max(last, first + 1)
    step = -(-(last - first) // _MOST_STEPS)
    shown = list(_TICKS.items())[first : last + step : step]
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks([mark for _, mark in shown], [text for text, _ in shown])
    axes.set_ylim(shown[0][1] * 0.8, max(shown[-1][1], max(seconds)) * 1.25)
