"""``delay declare | verify | doctor | status | purge``: what waits on the broker."""

from __future__ import annotations

from contextlib import suppress

import click

from .findings import show_findings
from .group import (
    as_json_option,
    broker,
    command,
    confirm,
    installed_settings,
    say,
    show,
    yes_option,
)


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
    show_findings(ctx, found, as_json, well=f"{name}: as planned")


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
    show_findings(ctx, examine(ctx.obj.app), as_json, well="healthy")


@command(name="status")
@as_json_option
def status(ctx: click.Context, as_json: bool) -> None:
    """Show what waits, when the next is due, what is overdue, parked and stuck.

    On RabbitMQ with records tasks are counted as `ls` lists them; levels hold more: what was
    cancelled or moved stays there until it was due.
    """
    from ..transports.interface import CountsByRecords

    with broker(ctx) as part:
        found = part.status_with_records() if isinstance(part, CountsByRecords) else part.status()
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
