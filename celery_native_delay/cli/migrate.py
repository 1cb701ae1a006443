"""The command ``delay migrate``, which moves waiting messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from ..texts import printable, table
from .group import (
    as_json_option,
    command,
    confirm,
    print_json,
    reachable,
    yes_option,
)

if TYPE_CHECKING:
    from ..app.moving import Account


@command(name="migrate")
@click.option(
    "--from",
    "names",
    multiple=True,
    required=True,
    metavar="broker|celery|namespace:NAME|store|URL",
    help="Where the messages wait. broker: the app's own broker, to move its tasks into the store. "
    "celery, celery:PREFIX: Celery's own delayed delivery. namespace:NAME: delay queues of another "
    "native_delay_namespace. URL: another broker, or a store. store: the app's own store, with "
    "--vhost. Repeatable.",
)
@click.option("--vhost", help="Take the tasks of this virtual host out of the store.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Most messages to move per second."
)
@click.option("--dry-run", is_flag=True, help="Only count the messages of each source.")
@yes_option
@as_json_option
def migrate(
    ctx: click.Context,
    names: tuple[str, ...],
    vhost: str | None,
    rate: float | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Move waiting messages to the app's broker.

    Sources are plain Celery's delayed delivery, this package's delay queues of another namespace,
    and other brokers. Due times stay the same. A message is deleted at its source after the app's
    broker has confirmed the message. Ctrl-C stops after the current message; run the command again
    to move the rest. If the process is killed, no message is lost, but the task of the current
    message may run twice.

    The exit status is 1 if a message could not be moved.
    """
    from kombu.utils.limits import TokenBucket

    from ..app.moving import Account, MovingKeys, move, moving

    with ExitStack() as stack:
        connection = stack.enter_context(reachable(ctx))
        opened = moving(ctx.obj.app, connection, names, vhost)
        part, sources = stack.enter_context(opened)
        accounts = [Account(source.name, source.count()) for source in sources]
        total = sum(account.count for account in accounts)
        for source, account in zip(sources, accounts, strict=True):
            if account.count and (warning := MovingKeys(source, part).warning):
                click.echo(printable(f"{source.name}: {warning}"), err=True)
        if dry_run:
            _show(part.name, accounts, as_json, dry_run=True)
            return
        if total and not force:
            click.echo(_counts(accounts), err=True)
            confirm(f"Move them into {part.name}?")
        part.prepare(list(ctx.obj.app.amqp.queues.values()))
        pace = None if rate is None else TokenBucket(rate)
        bar = click.progressbar(length=total, label="moving", show_pos=True, file=sys.stderr)
        with _stopped() as stopped, bar:
            for source, account in zip(sources, accounts, strict=True):
                if not stopped:
                    move(
                        source,
                        part,
                        account,
                        pace,
                        stopped.__len__,
                        partial(bar.update, 1),
                        tell_doubt,
                    )
        _show(part.name, accounts, as_json, interrupted=bool(stopped))
        ctx.exit(1 if stopped or any(account.refused for account in accounts) else 0)


# ---- private ---------------------------------------------------------------------------------


@contextmanager
def _stopped() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list; a second signal raises KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, receive) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def tell_doubt(task_id: str | None) -> None:
    click.echo(printable(f"may run twice, as a run was interrupted: {task_id}"), err=True)


def _counts(accounts: Sequence[Account]) -> str:
    return table(("from", "messages"), [(each.source, each.count) for each in accounts])


def _show(
    into: str,
    accounts: Sequence[Account],
    as_json: bool,
    *,
    dry_run: bool = False,
    interrupted: bool = False,
) -> None:
    moved = sum(account.moved for account in accounts)
    if as_json:
        report = {"into": into, "dry_run": dry_run, "moved": moved, "interrupted": interrupted}
        print_json(report | {"sources": [account.as_json() for account in accounts]})
        return
    if dry_run:
        total = sum(account.count for account in accounts)
        click.echo(f"{_counts(accounts)}\nwould move up to {total:,} message(s)")
        return
    rows = [(each.source, each.moved, each.stays, each.refused.total()) for each in accounts]
    click.echo(table(("from", "moved", "stay", "refused"), rows))
    for account in accounts:
        for why, number in account.refused.items():
            click.echo(printable(f"{account.source}: {number} refused: {why}"))
        if account.doubtful:
            click.echo(f"{account.source}: {len(account.doubtful)} may run twice (listed above)")
    again = "; interrupted: run it again for the rest" if interrupted else ""
    click.echo(f"{moved:,} message(s) moved into {into}{again}")
