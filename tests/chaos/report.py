"""The report of a chaos run: JSON, Markdown, and a chart of lateness over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.charts import GREY, OTHERS, OURS, figure, short
from benchmarks.measuring import percentiles
from benchmarks.report import markdown_table
from celery_native_delay.durations import duration
from tests.chaos import entries
from tests.chaos.oracle import FORBIDDEN, Verdict
from tests.chaos.run import Outcome

AFTERMATH_SECONDS = 10.0
"""A task that is due within these seconds after the end of a fault counts as hit by the fault.

A Celery worker that cannot connect tries again after 2, 4, 6, 8 and 10 s.
"""

SHOWN_FINDINGS = 40

COUNTED = [*(verdict.value for verdict in FORBIDDEN), Verdict.DOUBLED.value]

Result = dict[str, Any]
"""A run as JSON: see result_of()."""


def result_of(outcome: Outcome) -> Result:
    """Return a run as JSON data; times are in seconds since the start of the run."""
    judgement, of_entries, plan = outcome.judgement, outcome.entries, outcome.plan
    began = outcome.began_at
    kept = ("sent", "confirmed", "unknown", "ran", "cancelled", "cancels_unknown")

    def since(pairs: Iterable[tuple[float, float]]) -> list[list[float]]:
        return [[round(due - began, 3), round(late, 4)] for due, late in pairs]

    return {
        "broker": outcome.what,
        "seed": plan.seed,
        "minutes": plan.minutes,
        "rate": plan.rate,
        "longest_delay_seconds": plan.longest_seconds,
        "tasks": {name: getattr(judgement, name) for name in kept},
        "verdicts": {verdict.value: judgement.counts[verdict] for verdict in Verdict},
        "doubled_because": dict(judgement.reasons),
        "entries": {
            "ran": of_entries.ran,
            "verdicts": {each.value: of_entries.counts[each] for each in entries.Verdict},
            "findings": [
                asdict(each)
                | {"verdict": each.verdict.value, "due_at": round(each.due_at - began, 3)}
                for each in of_entries.findings
            ],
            "lateness": since(of_entries.lateness),
        },
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
        "findings": [asdict(each) | {"verdict": each.verdict.value} for each in judgement.findings],
        "lateness": since(judgement.lateness),
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
    lines = markdown_table([_row(result) for result in results])
    for result in results:
        lines += ["", f"{result['broker']}:", "", *markdown_table(_fault_rows(result))]
        if notes := _notes(result):
            lines += ["", notes]
    return "\n".join(lines) + "\n"


def findings_as_text(outcome: Outcome) -> str:
    """Return the tasks and due times that broke a promise, each with its history."""
    began, of_tasks = outcome.began_at, outcome.judgement.forbidden
    found = [
        (
            f"{each.verdict.value}: entry {each.number}, due at {each.due_at - began:.3f} s",
            each.story,
        )
        for each in outcome.entries.forbidden
    ]
    found += [(f"{each.verdict.value}: {each.task_id}", each.history) for each in of_tasks]
    lines = []
    for told, events in found[:SHOWN_FINDINGS]:
        lines += [told, *(f"    {event}" for event in events)]
    more = len(found) - SHOWN_FINDINGS
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


def _row(result: Result) -> dict[str, Any]:
    tasks = result["tasks"]
    calm = [late for due, late in result["lateness"] if not _is_hit(result["faults"], due)]
    greatest = max((late for _, late in result["lateness"]), default=0)
    told = f"{duration(result['minutes'] * 60)}, {result['rate']:g}/s, seed {result['seed']}"
    return {
        "broker": result["broker"],
        "run": told,
        "faults": len(result["faults"]),
        "sent tasks": tasks["sent"],
        "unconfirmed": tasks["unknown"],
        "cancelled": tasks["cancelled"],
        "ran": tasks["ran"],
        **{name: result["verdicts"][name] for name in COUNTED},
        "lateness in calm: p50, p99": _p50_p99(calm),
        "greatest lateness": f"{greatest:.1f} s",
    }


def _fault_rows(result: Result) -> list[dict[str, Any]]:
    rows = []
    for kind in sorted({fault["kind"] for fault in result["faults"]}):
        faults = [fault for fault in result["faults"] if fault["kind"] == kind]
        hit = [late for due, late in result["lateness"] if _is_hit(faults, due)]
        lasted = max(fault["mended"] - fault["began"] for fault in faults)
        latest = f"{max(hit, default=0):.1f} s"
        row = {"fault": f"`{kind}`", "count": len(faults), "longest duration": f"{lasted:.1f} s"}
        rows.append(row | {"greatest lateness of tasks due meanwhile": latest})
    return rows


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
    if not seconds:
        return "-"
    return ", ".join(f"{short(each * 1000)} ms" for each in percentiles(seconds, (50, 99)))
