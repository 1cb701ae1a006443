"""``delay declare | verify | doctor | status | purge | parked``: the broker as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING

import click

from .group import (
    as_json_option,
    broker,
    command,
    confirm,
    delay,
    installed_settings,
    print_json,
    printable,
    say,
    show,
    table,
    yes_option,
)

if TYPE_CHECKING:
    from ..finding import Finding


@command(name="declare")
@as_json_option
def declare(ctx: click.Context, as_json: bool) -> None:
    """Declare what delays need, and bind the app's queues."""
    with broker(ctx) as part:
        show(part.declare(list(ctx.obj.app.amqp.queues.values())), as_json)


@command(name="verify")
@as_json_option
def verify(ctx: click.Context, as_json: bool) -> None:
    """Compare the broker with the plan; exit 1 on any difference.

    No worker need run for it: whether delays work, `delay doctor` says.
    """
    with broker(ctx) as part:
        name, found = part.name, part.verify()
    _show_findings(ctx, found, as_json, well=f"{name}: as planned")


@command(name="doctor")
@as_json_option
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say that delays work or, finding by finding, what to do; exit 1 unless they do.

    Asks for all that `delay verify` compares, and for what moves: who hands over, what is overdue,
    parked or held up, records, rates, telemetry and clocks.
    """
    from ..app.doctor import examine
    from ..errors import SettingsError

    with suppress(SettingsError):  # a finding, like others
        installed_settings(ctx)
    _show_findings(ctx, examine(ctx.obj.app), as_json, well="healthy")


@command(name="status")
@as_json_option
def status(ctx: click.Context, as_json: bool) -> None:
    """Show what waits, when the next is due, what is overdue, parked and stuck.

    On RabbitMQ with records tasks are counted as `ls` lists them; levels hold more: what was
    cancelled or moved stays there until it was due.
    """
    with broker(ctx) as part:
        found = part.status()
    show(found, as_json)


@command(name="purge")
@yes_option
@as_json_option
def purge(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Throw away what waits for this app. Cannot be undone.

    What is parked, or held by a landing queue, stays.
    """
    with broker(ctx) as part:
        if not force:
            confirm(f"Throw away all that waits in {part.name}?")
        purged = part.purge()
        text = f"{purged} delayed message(s) thrown away"
        say(as_json, {"name": part.name, "purged": purged}, text)


def _show_findings(
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


# ---- parked ------------------------------------------------------------------------------------


@delay.group(name="parked")
def parked() -> None:
    """Messages that were due, and whose destination was not there."""


@command(group=parked, name="list")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many.",
)
@as_json_option
def list_parked(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Show parked messages; they stay where they are."""
    with broker(ctx) as part:
        found = part.parked(limit=limit)
    if found is None:
        raise click.ClickException("a worker is rescuing right now; try again")
    total, tasks = found
    lines = [f"{total} parked message(s)"]
    if tasks:
        headings = ("task", "id", "exchange", "routing key", "due")
        lines.insert(0, table(headings, [astuple(task) for task in tasks]))
    value = {"parked": total, "messages": [asdict(task) for task in tasks]}
    say(as_json, value, "\n".join(lines))


@command(group=parked, name="requeue")
@as_json_option
def requeue(ctx: click.Context, as_json: bool) -> None:
    """Send parked messages to where they belong; what no queue takes yet stays parked."""
    with broker(ctx) as part:
        outcome = part.requeue()
    if outcome is None:
        raise click.ClickException("a worker is rescuing right now; try again")
    say(as_json, asdict(outcome), str(outcome))


@command(group=parked, name="purge")
@yes_option
@as_json_option
def purge_parked(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Throw away all parked messages of this namespace. Cannot be undone."""
    with broker(ctx) as part:
        if not force:
            confirm(f"Throw away all messages in {part.parking}?")
        purged = part.purge_parked()
    say(as_json, {"purged": purged}, f"{purged} parked message(s) thrown away")
