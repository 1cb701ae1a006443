"""The commands ``delay declare``, ``doctor``, ``status``, ``purge`` and ``parked``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ..texts import printable, table
from .group import (
    as_json_option,
    broker,
    command,
    confirm,
    delay,
    installed_settings,
    limit_option,
    local,
    print_json,
    say,
    show,
    yes_option,
)

if TYPE_CHECKING:
    from ..finding import Finding


@command(name="declare")
@as_json_option
def declare(ctx: click.Context, as_json: bool) -> None:
    """Declare the queues and exchanges for delays, and bind the app's queues."""
    with broker(ctx) as part:
        show(part.declare(list(ctx.obj.app.amqp.queues.values())), as_json)


@command(name="doctor")
@as_json_option
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check that delays work, and print a remedy for each problem.

    It checks queues and policies of the broker, native_delay_store, workers, clocks, rate limits
    and schedules, and finds overdue, parked and stuck messages: see `delay status`.

    Each finding has a level: "wrong", "not checked" or "advice". The exit status is 1 if a finding
    has the level "wrong".
    """
    from ..app.doctor import examine
    from ..errors import SettingsError
    from ..finding import ADVICE, UNCHECKED, WRONG

    with suppress(SettingsError):  # examine() reports this error as a finding
        installed_settings(ctx)
    levels = (WRONG, UNCHECKED, ADVICE)
    found = sorted(examine(ctx.obj.app), key=lambda finding: levels.index(finding.level))
    numbers = Counter(finding.level for finding in found)
    if as_json:
        print_json({"healthy": not numbers[WRONG], "findings": [asdict(each) for each in found]})
    else:
        _print_findings(found)
        if numbers[WRONG]:
            last = f"{numbers[WRONG]} problem(s) found"
        elif numbers[UNCHECKED]:
            last = f"healthy, but {numbers[UNCHECKED]} check(s) could not be made"
        else:
            last = "healthy"
        click.echo(last)
    ctx.exit(1 if numbers[WRONG] else 0)


@command(name="status")
@as_json_option
def status(ctx: click.Context, as_json: bool) -> None:
    """Count waiting, overdue, parked and stuck messages, and print a remedy for each problem.

    `delay doctor` finds the same problems, and more.

    Overdue messages are due, but still listed as waiting. Parked messages are due, but their
    exchange or queue does not exist. Stuck messages stay in a delay queue, because RabbitMQ cannot
    dead-letter them.

    Tasks in native_delay_store and in the broker are counted apart.
    The numbers of each delay queue also include messages of cancelled and rescheduled tasks, until
    their old due times.
    """
    with broker(ctx) as part:
        told = part.status()
    if as_json:
        print_json({**told.facts, "findings": [asdict(each) for each in told.found]})
        return
    show(told, as_json)
    _print_findings(told.found)


@command(name="purge")
@yes_option
@as_json_option
def purge(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Delete all waiting messages of this app. Cannot be undone.

    The only exception: on SQS, messages with short delays wait in the app's own queues, and are not
    deleted.

    Parked messages, and due messages in the app's queues, are not waiting, and are not deleted. To
    delete parked messages, run `delay parked purge`.
    """
    with broker(ctx) as part:
        if not force:
            confirm(f"Delete all waiting messages in {part.name}?")
        purged = part.purge()
        text = f"{purged} delayed message(s) deleted"
        say(as_json, {"name": part.name, "purged": purged}, text)


def _print_findings(found: Sequence[Finding]) -> None:
    for each in found:
        click.echo(printable(f"{each.level}: {each.check}: {each.problem}"))
        click.echo(printable(f"    {each.remedy}"))


# ---- parked ------------------------------------------------------------------------------------


@delay.group(name="parked")
def parked() -> None:
    """Manage parked messages (due, but the destination does not exist)."""


@command(group=parked, name="list")
@limit_option
@as_json_option
def list_parked(ctx: click.Context, limit: int, as_json: bool) -> None:
    """List parked messages (due, but the destination does not exist)."""
    with broker(ctx) as part:
        found = part.parked(limit=limit)
    if found is None:
        raise click.ClickException("a worker is delivering them right now; try again")
    total, tasks = found
    lines = [f"{total} parked message(s)"]
    if tasks:
        headings = ("task", "id", "exchange", "routing key", "due")
        rows = [(*astuple(task)[:-1], task.due and _local(ctx, task.due)) for task in tasks]
        lines.insert(0, table(headings, rows))
    value = {"parked": total, "messages": [asdict(task) for task in tasks]}
    say(as_json, value, "\n".join(lines))


def _local(ctx: click.Context, due: str) -> str:
    return local(ctx, datetime.fromisoformat(due), "milliseconds")


@command(group=parked, name="requeue")
@as_json_option
def requeue(ctx: click.Context, as_json: bool) -> None:
    """Publish parked messages to their destinations.

    Messages whose destination still does not exist stay parked. Expired messages are deleted.
    """
    with broker(ctx) as part:
        outcome = part.requeue()
    if outcome is None:
        raise click.ClickException("a worker is delivering them right now; try again")
    say(as_json, asdict(outcome), str(outcome))


@command(group=parked, name="purge")
@yes_option
@as_json_option
def purge_parked(ctx: click.Context, force: bool, as_json: bool) -> None:
    """Delete all parked messages (due, but no destination). Cannot be undone."""
    with broker(ctx) as part:
        if not force:
            confirm(f"Delete all messages in {part.parking}?")
        purged = part.purge_parked()
    say(as_json, {"purged": purged}, f"{purged} parked message(s) deleted")
