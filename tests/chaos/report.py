"""What a run tells: JSON for programs, Markdown for people, a picture of lateness over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from matplotlib.figure import Figure

from benchmarks.charts import GREY, OTHERS, OURS, figure, short
from celery_native_delay.durations import duration
from tests.chaos.oracle import FORBIDDEN, Struck, Verdict
from tests.chaos.run import Outcome

AFTERMATH_SECONDS = 10.0
"""A task due so soon after a fault was mended still counts as one of it.

A Celery worker that cannot connect tries again after 2, 4, 6, 8 and 10 s.
"""

SHOWN_FINDINGS = 20


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All that is known of a run; times are seconds since it began."""
    judgement, plan, began = outcome.judgement, outcome.plan, outcome.began_at
    return {
        "broker": outcome.what,
        "seed": plan.seed,
        "minutes": plan.minutes,
        "rate": plan.rate,
        "tasks": {
            "sent": judgement.sent,
            "confirmed": judgement.confirmed,
            "unknown": judgement.unknown,
            "ran": judgement.ran,
            "cancelled": judgement.cancelled,
            "cancels_unknown": judgement.cancels_unknown,
        },
        "verdicts": {verdict.value: judgement.count(verdict) for verdict in Verdict},
        "doubled_because": dict(judgement.reasons),
        "late_seconds": _percentiles(late for _, late in _calm(outcome)),
        "latest_seconds": round(max((late for _, late in judgement.lateness), default=0), 3),
        "workers_ended_by_themselves": outcome.ended_by_themselves,
        "faults": [
            {
                "kind": fault.kind,
                "target": fault.target,
                "began": round(fault.began_at - began, 3),
                "mended": round(fault.ended_at - began, 3),
            }
            for fault in outcome.struck
        ],
        "findings": [
            {
                "verdict": finding.verdict.value,
                "task": finding.task_id,
                "explanation": finding.explanation,
                "history": finding.history,
            }
            for finding in judgement.findings
        ],
        "lateness": [[round(due - began, 3), round(late, 4)] for due, late in judgement.lateness],
    }


def as_markdown(outcomes: Sequence[Outcome]) -> str:
    """One table of the runs, one of what each kind of fault did to lateness."""
    verdicts = [*FORBIDDEN, Verdict.DOUBLED]
    head = ["broker", "run", "faults", "sent", "no answer", "cancelled", "ran"]
    head += [verdict.value for verdict in verdicts] + ["late, calm: p50, p99", "latest"]
    rows = [[_figure(cell) for cell in _row(outcome, verdicts)] for outcome in outcomes]
    parts = [_table(head, rows)]
    for outcome in outcomes:
        parts += [f"\n{outcome.what}:\n", _fault_table(outcome)]
    return "\n".join(parts) + "\n"


def findings_as_text(outcome: Outcome) -> str:
    """The tasks that should not have fared as they did, each with its history."""
    lines = []
    for finding in outcome.judgement.forbidden[:SHOWN_FINDINGS]:
        lines.append(f"{finding.verdict.value}: {finding.task_id}")
        lines += [f"    {event}" for event in finding.history]
    more = len(outcome.judgement.forbidden) - SHOWN_FINDINGS
    return "\n".join(lines + ([f"and {more} more"] if more > 0 else []))


def draw(outcomes: Sequence[Outcome]) -> Figure:
    """Lateness of every task over the time at which it was due, faults as bands behind it."""
    picture, panels = figure(
        "How late tasks were while the broker failed",
        height=2.9 * len(outcomes),
        rows=len(outcomes),
    )
    for axes, outcome in zip(panels, outcomes, strict=True):
        began = outcome.began_at
        plan = outcome.plan
        axes.set_title(f"{outcome.what}; seed {plan.seed}", fontsize=10, loc="left")
        for number, fault in enumerate(outcome.struck):
            begin, end = fault.began_at - began, fault.ended_at - began
            axes.axvspan(begin, max(end, begin + 0.2), color=OTHERS[0], alpha=0.16, linewidth=0)
            if plan.minutes <= 3:
                axes.annotate(
                    fault.kind,
                    (begin, 1),
                    (1, -2 - 8 * (number % 3)),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    va="top",
                    fontsize=6,
                    color=OTHERS[0],
                )
        points = [(due - began, max(late, 0.001)) for due, late in outcome.judgement.lateness]
        if points:
            axes.scatter(*zip(*points, strict=True), s=3, color=OURS, alpha=0.5, linewidths=0)
        axes.set_yscale("log")
        axes.set_ylim(0.001, 100)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("seconds late")
        axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
        axes.set_xlim(0, plan.minutes * 60 + plan.longest_seconds)
    panels[-1].set_xlabel("seconds since the run began, at which the task was due; faults shaded")
    return picture


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write chaos.json, chaos.md and chaos.png into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([as_json(outcome) for outcome in outcomes])
    (folder / "chaos.json").write_text(text + "\n")
    (folder / "chaos.md").write_text(as_markdown(outcomes))
    draw(outcomes).savefig(folder / "chaos.png")


def _row(outcome: Outcome, verdicts: Iterable[Verdict]) -> list[object]:
    judgement, plan = outcome.judgement, outcome.plan
    late = _percentiles(late for _, late in _calm(outcome))
    return [
        outcome.what,
        f"{duration(plan.minutes * 60)}, seed {plan.seed}",
        len(outcome.struck),
        judgement.sent,
        judgement.unknown,
        judgement.cancelled,
        judgement.ran,
        *(judgement.count(verdict) for verdict in verdicts),
        f"{short(late['p50'] * 1000)} ms, {short(late['p99'] * 1000)} ms",
        f"{max((late for _, late in judgement.lateness), default=0):.1f} s",
    ]


def _fault_table(outcome: Outcome) -> str:
    kinds: dict[str, list[Struck]] = {}
    for fault in outcome.struck:
        kinds.setdefault(fault.kind, []).append(fault)
    rows = []
    for kind, faults in sorted(kinds.items()):
        lasted = [fault.ended_at - fault.began_at for fault in faults]
        hit = [
            late
            for due, late in outcome.judgement.lateness
            if any(_in_its_time(fault, due) for fault in faults)
        ]
        longest = f"{max(lasted):.1f} s"
        rows.append([f"`{kind}`", str(len(faults)), longest, f"{max(hit, default=0):.1f} s"])
    return _table(["fault", "times", "mended after, at most", "tasks due in it late by"], rows)


def _calm(outcome: Outcome) -> list[tuple[float, float]]:
    """The tasks that were due while nothing was broken."""
    return [
        (due, late)
        for due, late in outcome.judgement.lateness
        if not any(_in_its_time(fault, due) for fault in outcome.struck)
    ]


def _in_its_time(fault: Struck, due: float) -> bool:
    return fault.began_at <= due <= fault.ended_at + AFTERMATH_SECONDS


def _percentiles(late: Iterable[float]) -> dict[str, float]:
    values = sorted(late)
    if len(values) < 2:
        return {"p50": float("nan"), "p99": float("nan")}
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}


def _figure(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
