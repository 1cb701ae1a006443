"""Two panels over the due time: how many tasks met which end, and how late they started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure
except ImportError as exc:
    raise ImportError("picture() draws with matplotlib: pip install matplotlib") from exc

INK = "#22262a"

#: What went as planned is green and grey; the rest is to be seen.
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

#: What started sooner after its due time is drawn here; the scale is logarithmic.
_FLOOR_MS = 1.0


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
    late.set_xlabel(f"due (UTC), in steps of {due_seconds:,.0f} s")
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
    axes.set_ylabel("tasks")
    if rows:
        axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_lateness(axes: Axes, rows: Sequence[dict[str, Any]], due_seconds: float) -> None:
    ran = [row for row in rows if row["late_max"] is not None]
    middle = timedelta(seconds=due_seconds / 2)
    across: list[datetime] = [_moment(row) + middle for row in ran]
    for name, colour in LINES.items():
        heights = [max(_FLOOR_MS, row[name] * 1000) for row in ran]
        axes.plot(
            across,  # type: ignore[arg-type]
            heights,
            color=colour,
            linewidth=2,
            marker=".",
            markersize=3,
            label=name.removeprefix("late_"),
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_ylabel("milliseconds late")
    axes.grid(axis="y", color="#e3e6e8", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
