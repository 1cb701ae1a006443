"""Findings as ``delay verify`` and ``delay doctor`` show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .group import print_json, printable

if TYPE_CHECKING:
    from ..finding import Finding


def show_findings(
    ctx: click.Context, found: Sequence[Finding], as_json: bool, *, well: str
) -> None:
    """Show each, and a last line: *well* if nothing is wrong; else exit status 1."""
    from ..finding import ADVICE, UNCHECKED, WRONG

    levels = (WRONG, UNCHECKED, ADVICE)
    ordered = sorted(found, key=lambda finding: levels.index(finding.level))
    numbers = Counter(finding.level for finding in ordered)
    if as_json:
        print_json({"healthy": not numbers[WRONG], "findings": [asdict(each) for each in ordered]})
    else:
        for each in ordered:
            click.echo(printable(f"{each.level}: {each.check}: {each.problem}"))
            click.echo(printable(f"    {each.remedy}"))
        if numbers[WRONG]:
            last = f"{numbers[WRONG]} thing(s) to mend"
        elif numbers[UNCHECKED]:
            last = f"{well}, as far as could be asked: {numbers[UNCHECKED]} not checked"
        else:
            last = well
        click.echo(last)
    ctx.exit(1 if numbers[WRONG] else 0)
