"""The picture of a report, for ``savefig()``."""

from __future__ import annotations

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as exc:
    raise ImportError("--picture draws with matplotlib: pip install matplotlib") from exc

from .report import PROCESSORS, Capacity

_WELL, _FULL, _INK = "#0b6e4f", "#c8553d", "#22262a"
_SHOWN = 20


def picture(report: Capacity) -> Figure:
    """Bars of how full each level queue is, and a line of how late the tasks are."""
    rows = [(PROCESSORS, report.processors)]
    rows += [(one.queue, one.utilisation) for one in report.queues[:_SHOWN]]
    figure = Figure(figsize=(9, 3.4 + 0.28 * len(rows)), layout="constrained")
    figure.suptitle(f"{report.load}", x=0.01, ha="left", fontweight="bold")
    full, late = figure.subplots(2, 1, height_ratios=(len(rows) + 1, 9))
    for place, (_, part) in enumerate(rows):
        full.barh(place, part * 100, color=_FULL if part >= 1 else _WELL, height=0.7)
        full.annotate(
            f"{part * 100:.0f} %",
            (part * 100, place),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
    full.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    full.invert_yaxis()
    full.axvline(100, color=_INK, linewidth=1, linestyle="--")
    full.set_xlabel("per cent of what it carries")
    lateness = report.outcome.late_ms
    late.plot(
        [100 * number / len(lateness) for number in range(len(lateness))], lateness, color=_WELL
    )
    late.set_yscale("log")
    late.set_xlabel("per cent of the tasks" + ("" if report.keeps_up else "; it does not keep up"))
    late.set_ylabel("ms late at most")
    for axes in (full, late):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
