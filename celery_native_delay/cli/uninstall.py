"""The command ``delay uninstall``, which removes this package from the broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..texts import printable
from .group import (
    as_json_option,
    command,
    confirm,
    reachable,
    say,
    yes_option,
)
from .migrate import tell_doubt

if TYPE_CHECKING:
    from ..app.moving import Account


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
    from ..app.moving import Account, move
    from ..app.uninstalling import leaving

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


def _refuse(accounts: Sequence[Account]) -> None:
    left = sum(account.refused.total() + account.stays for account in accounts)
    if left:
        whys = dict.fromkeys(why for account in accounts for why in account.refused)
        why = "; ".join(whys) or "they are due within seconds: run this again"
        raise click.ClickException(printable(f"{left} message(s) could not be moved: {why}"))
