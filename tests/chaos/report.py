"""The report of a chaos run: JSON, Markdown, and a chart of lateness over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from matplotlib.figure import Figure

from benchmarks.charts import GREY, OTHERS, OURS, figure, short
from celery_native_delay.durations import duration
from tests.chaos import entries
from tests.chaos.oracle import FORBIDDEN, Verdict
from tests.chaos.run import Outcome

AFTERMATH_SECONDS = 10.0
"""A task that is due within these seconds after the end of a fault counts as hit by the fault.

A Celery worker that cannot connect tries again after 2, 4, 6, 8 and 10 s.
"""

SHOWN_FINDINGS = 20

COUNTED = [*(verdict.value for verdict in FORBIDDEN), Verdict.DOUBLED.value]

Result = dict[str, Any]
"""A run as JSON: see result_of()."""


def result_of(outcome: Outcome) -> Result:
    """Return a run as JSON data; times are in seconds since the start of the run."""
    judgement, plan, began = outcome.judgement, outcome.plan, outcome.began_at
    return {
        "broker": outcome.what,
        "seed": plan.seed,
        "minutes": plan.minutes,
        "rate": plan.rate,
        "longest_delay_seconds": plan.longest_seconds,
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
        "entries": entries.as_json(outcome.entries, began),
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


def update(folder: Path, broker: str, outcome: Outcome) -> None:
    """Write the run into *folder*, replacing an earlier run on *broker*; redraw the chart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{broker}.json").write_text(json.dumps(result_of(outcome)) + "\n")
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    (folder / "chaos.md").write_text(as_markdown(results))
    draw(results).savefig(folder / "chaos.png")


def as_markdown(results: Sequence[Result]) -> str:
    """Return Markdown tables: one of all runs, and one of faults per run."""
    head = ["broker", "run", "faults", "sent tasks", "unconfirmed", "cancelled", "ran", *COUNTED]
    head += ["lateness in calm: p50, p99", "greatest lateness"]
    parts = [_table(head, map(_row, results))]
    for result in results:
        parts += [f"\n{result['broker']}:\n", _fault_table(result)]
        if notes := _notes(result):
            parts.append(f"\n{notes}")
    return "\n".join(parts) + "\n"


def findings_as_text(outcome: Outcome) -> str:
    """Return the tasks and due times that broke a promise, each with its history."""
    found = outcome.judgement.forbidden
    lines = []
    of_entries = outcome.entries.forbidden
    for each in of_entries[:SHOWN_FINDINGS]:
        at = each.due_at - outcome.began_at
        lines.append(f"{each.verdict.value}: entry {each.number}, due at {at:.3f} s")
        lines += [f"    {event}" for event in each.story]
    for finding in found[:SHOWN_FINDINGS]:
        lines.append(f"{finding.verdict.value}: {finding.task_id}")
        lines += [f"    {event}" for event in finding.history]
    more = max(len(found), len(of_entries)) - SHOWN_FINDINGS
    return "\n".join(lines + ([f"and {more} more"] if more > 0 else []))


def draw(results: Sequence[Result]) -> Figure:
    """Draw the lateness of each task over its due time; faults are shaded."""
    title = "Lateness of tasks during faults"
    picture, panels = figure(title, height=1 + 2.4 * len(results), rows=len(results))
    for axes, result in zip(panels, results, strict=True):
        axes.set_title(f"{result['broker']}; seed {result['seed']}", fontsize=10, loc="left")
        for fault in result["faults"]:
            end = max(fault["mended"], fault["began"] + 0.2)
            axes.axvspan(fault["began"], end, color=OTHERS[0], alpha=0.16, linewidth=0)
            axes.axvline(fault["began"], color=OTHERS[0], alpha=0.5, linewidth=0.5)
        if result["lateness"]:
            due, late = zip(*result["lateness"], strict=True)
            heights = [max(seconds, 0.001) for seconds in late]
            axes.scatter(due, heights, s=3, color=OURS, alpha=0.4, linewidths=0)
        axes.set_yscale("log")
        axes.set_ylim(0.001, 100)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("seconds late")
        axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
        axes.set_xlim(0, result["minutes"] * 60 + result["longest_delay_seconds"])
    panels[-1].set_xlabel("due time of the task, in seconds since the run began; faults are shaded")
    return picture


def _row(result: Result) -> list[str]:
    tasks = result["tasks"]
    counts = [len(result["faults"]), tasks["sent"], tasks["unknown"], tasks["cancelled"]]
    counts += [tasks["ran"], *(result["verdicts"][name] for name in COUNTED)]
    calm = [late for due, late in result["lateness"] if not _is_hit(result["faults"], due)]
    return [
        result["broker"],
        f"{duration(result['minutes'] * 60)}, {result['rate']:g}/s, seed {result['seed']}",
        *(f"{count:,}" for count in counts),
        _p50_p99(calm),
        f"{max((late for _, late in result['lateness']), default=0):.1f} s",
    ]


def _fault_table(result: Result) -> str:
    rows = []
    for kind in sorted({fault["kind"] for fault in result["faults"]}):
        faults = [fault for fault in result["faults"] if fault["kind"] == kind]
        hit = [late for due, late in result["lateness"] if _is_hit(faults, due)]
        lasted = max(fault["mended"] - fault["began"] for fault in faults)
        latest = f"{max(hit, default=0):.1f} s"
        rows.append([f"`{kind}`", f"{len(faults)}", f"{lasted:.1f} s", latest])
    return _table(
        ["fault", "count", "longest duration", "greatest lateness of tasks due meanwhile"], rows
    )


def _notes(result: Result) -> str:
    """Return notes on tasks that ran twice, schedule entries, and workers that exited."""
    faults = result["faults"]
    notes = [f"doubled {count} times: {why}" for why, count in result["doubled_because"].items()]
    if found := result["entries"]:
        counts = [f"{name} {count}" for name, count in found["verdicts"].items() if count]
        late = _p50_p99([late for due, late in found["lateness"] if not _is_hit(faults, due)])
        told = f"{found['ran']:,} due times ran; {', '.join(counts) or 'nothing to report'}"
        notes.append(f"schedule entries: {told}; lateness in calm: p50, p99 {late}")
    if gave_up := result["workers_ended_by_themselves"]:
        notes.append(f"workers that ended by themselves, and were started again: {gave_up}")
    return "\n".join(f"- {note}" for note in notes)


def _is_hit(faults: Iterable[dict[str, Any]], due: float) -> bool:
    """Return True if a task was due during a fault or within AFTERMATH_SECONDS after it."""
    return any(fault["began"] <= due <= fault["mended"] + AFTERMATH_SECONDS for fault in faults)


def _p50_p99(seconds: Sequence[float]) -> str:
    if len(seconds) < 2:
        return "-"
    cuts = quantiles(seconds, n=100, method="inclusive")
    return f"{short(cuts[49] * 1000)} ms, {short(cuts[98] * 1000)} ms"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
