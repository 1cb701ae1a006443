"""Write results as Markdown for people and as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.charts import short
from benchmarks.measuring import Result, Target

Results = Mapping[str, Result]


def write(folder: Path, about: Mapping[str, str], results: Results) -> None:
    """Write ``results.md`` and ``results.json``, with rounded numbers, into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    scenarios = {}
    for name, result in results.items():
        targets = [asdict(target) | {"met": target.met} for target in result.targets]
        scenarios[name] = asdict(result) | {"targets": targets}
    exact = json.dumps({"about": about, "scenarios": scenarios})
    rounded = json.loads(exact, parse_float=lambda text: round(float(text), 4))
    (folder / "results.json").write_text(json.dumps(rounded, indent=1) + "\n")
    (folder / "results.md").write_text(as_markdown(about, results))


def read(folder: Path) -> dict[str, Result]:
    """Return the results of the last run in *folder*; empty if the folder has no results."""
    results = {}
    if (folder / "results.json").exists():
        written = json.loads((folder / "results.json").read_text())
        for name, one in written["scenarios"].items():
            targets = one.pop("targets")
            for target in targets:
                del target["met"]  # follows from the rest
            results[name] = Result(**one, targets=[Target(**target) for target in targets])
    return results


def as_markdown(about: Mapping[str, str], results: Results) -> str:
    lines = ["# Benchmarks", "", f"`{about['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in about.items() if name != "command"]
    lines += ["", "## Targets", "", *markdown_table(target_rows(results)), ""]
    for name, result in results.items():
        lines += [f"## {result.title}", "", result.setup, ""]
        lines += [*markdown_table(result.rows), ""]
        lines += [f"{note}\n" for note in result.notes]
        lines += [f"![{result.title}]({name}.png)", ""]
        took = f"Measured {result.date}, in {result.seconds:.0f} s"
        lines += [f"{took}; load average before it: {result.load_before:.2f}.", ""]
    return "\n".join(lines)


def target_rows(results: Results) -> list[dict[str, Any]]:
    return [
        {
            "scenario": name,
            "what": target.what,
            "measured": _with_unit(target.measured, target),
            "target": f"{target.sign} {_with_unit(target.limit, target)}",
            "": "met" if target.met else "**not met**",
        }
        for name, result in results.items()
        for target in result.targets
    ]


def _with_unit(value: float, target: Target) -> str:
    # The text has three decimals, so that a ratio that misses its target by little does not look
    # met.
    text = short(value) if target.unit else f"{value:.3f}"
    return f"{text} {target.unit}".strip()


def markdown_table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    right = [not isinstance(value, str) for value in rows[0].values()]
    return [
        f"| {' | '.join(rows[0])} |",
        f"|{'|'.join('---:' if one else '---' for one in right)}|",
        *(f"| {' | '.join(map(_cell, row.values()))} |" for row in rows),
    ]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return short(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
