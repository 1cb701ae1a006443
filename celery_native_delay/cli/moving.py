"""The commands ``delay migrate`` and ``uninstall``, which move waiting messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from ..texts import printable, table
from .group import as_json_option, command, confirm, print_json, reachable, say, yes_option

if TYPE_CHECKING:
    from ..app.moving import Account


@command(name="migrate")
@click.option(
    "--from",
    "names",
    multiple=True,
    required=True,
    metavar="broker|namespace:NAME|store|URL",
    help="Where the messages wait. broker: the app's own broker, to move its tasks into the store. "
    "namespace:NAME: delay queues of another native_delay_namespace. URL: another broker, or a "
    "store. store: the app's own store, with --vhost. Repeatable.",
)
@click.option("--vhost", help="Take the tasks of this virtual host out of the store.")
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Most messages to move per second."
)
@yes_option
@as_json_option
def migrate(
    ctx: click.Context,
    names: tuple[str, ...],
    vhost: str | None,
    rate: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Move waiting messages to the app's broker.

    Sources are this package's delay queues of another namespace, and other brokers. Due times stay
    the same. A message is deleted at its source after the app's broker has confirmed the message.
    Ctrl-C stops after the current message; run the command again to move the rest. If the process
    is killed, no message is lost, but the task of the current message may run twice.

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
        if total and not force:
            counts = [(each.source, each.count) for each in accounts]
            click.echo(table(("from", "messages"), counts), err=True)
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


@command(name="uninstall")
@click.option(
    "--move-to-eta",
    is_flag=True,
    help="Send waiting tasks to their queues, where workers hold them as plain ETA tasks.",
)
@yes_option
@as_json_option
def uninstall(ctx: click.Context, move_to_eta: bool, force: bool, as_json: bool) -> None:
    """Remove this package's queues, exchanges, keys and rows from the broker.

    The app must drain (native_delay_enabled = "drain"). If tasks wait, the command removes only
    the schedule entries, and exits with status 1. With --move-to-eta, it first sends each waiting
    task to its queue. Due times stay the same. Workers then hold the tasks in memory, as with plain
    Celery, so move few tasks with far due times. SQS and pgmq have no --move-to-eta.

    Everything of native_delay_namespace is removed, also if other apps use the same namespace.
    Tables of a database are emptied, and not dropped.
    """
    from ..app.installation import admin_part
    from ..app.moving import Account, leaving, move

    with reachable(ctx) as connection:
        app = ctx.obj.app
        into, sources = leaving(app, connection, moves=move_to_eta)
        part = admin_part(app, connection)
        backlog = part.backlog()
        waiting = backlog.waiting
        if backlog.parked:
            raise click.ClickException(
                f"{backlog.parked} message(s) are parked: run `delay parked requeue`, or `delay "
                f"parked purge`"
            )
        if waiting and (into is None or not move_to_eta):
            way = "" if into is None else ", cancel them, or use --move-to-eta"
            raise click.ClickException(
                f"{waiting} task(s) wait: let workers run until they are due{way}"
            )
        if not force:
            confirm(f"Remove everything of {part.name}?")
        accounts = [Account(source.name, source.count()) for source in sources]
        for source, account in zip(sources, accounts, strict=True):
            if into is not None:
                move(source, into, account, None, lambda: False, lambda: None, tell_doubt)
        _refuse(accounts)
        removed = part.uninstall()
    moved = sum(account.moved for account in accounts)
    lines = [f"removed {printable(each)}" for each in removed]
    text = "\n".join([*([f"{moved} task(s) moved to their queues"] if moved else []), *lines])
    say(as_json, {"moved": moved, "removed": removed}, text or "nothing to remove")


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


def _show(
    into: str,
    accounts: Sequence[Account],
    as_json: bool,
    *,
    interrupted: bool,
) -> None:
    moved = sum(account.moved for account in accounts)
    if as_json:
        report = {"into": into, "moved": moved, "interrupted": interrupted}
        print_json(report | {"sources": [account.as_json() for account in accounts]})
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


def _refuse(accounts: Sequence[Account]) -> None:
    left = sum(account.refused.total() + account.stays for account in accounts)
    if left:
        whys = dict.fromkeys(why for account in accounts for why in account.refused)
        why = "; ".join(whys) or "they are due within seconds: run this again"
        raise click.ClickException(printable(f"{left} message(s) could not be moved: {why}"))
