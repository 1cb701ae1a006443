"""``delay ls | show | cancel | reschedule | run-now``: the tasks that wait, one by one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .group import (
    as_json_option,
    command,
    installed_settings,
    print_json,
    printable,
    table,
    yes_option,
)

if TYPE_CHECKING:
    from ..celery_app.delay import Delay
    from ..core.ledger import Outcome, Query, Waiting

Command = TypeVar("Command", bound=Callable[..., Any])

_BAR_WIDTH = 40
_LONGEST_TEXT = 40


def moment(value: str) -> datetime:
    """Seconds from now, or ISO 8601; without a zone, UTC."""
    try:
        return datetime.now(UTC) + timedelta(seconds=float(value))
    except OverflowError as exc:
        raise click.BadParameter(f"{value} s is beyond every calendar") from exc
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(value)
    except ValueError as exc:
        raise click.BadParameter(f"expected seconds from now or ISO 8601, got {value!r}") from exc
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def task_id(value: str) -> str:
    """Any text but none."""
    if not value:
        raise click.BadParameter("expected the id of a task, got an empty text")
    return value


def _all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda function: reduce(lambda made, option: option(made), reversed(options), function)


_filters = _all(
    click.option(
        "-s",
        "--search",
        default="",
        help="Words as in Flower: name:… queue:… args:… kwargs:key=value, or any text; OR, (…).",
    ),
    click.option("--from", "from_", type=moment, metavar="SECONDS|TIME", help="Due then or later."),
    click.option("--until", type=moment, metavar="SECONDS|TIME", help="Due before then."),
)

_chosen = _all(
    click.argument("ids", nargs=-1, type=task_id, metavar="[ID]..."),
    _filters,
    click.option("--dry-run", is_flag=True, help="Only say which they are."),
    yes_option,
    as_json_option,
)


@command(name="ls")
@_filters
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--offset", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--histogram", is_flag=True, help="Show how the due times are spread instead.")
@as_json_option
def ls(
    ctx: click.Context,
    search: str,
    from_: datetime | None,
    until: datetime | None,
    limit: int,
    offset: int,
    histogram: bool,
    as_json: bool,
) -> None:
    """List what waits, earliest first."""
    delay = _delay(ctx)
    if histogram:
        _show_histogram(delay, as_json)
        return
    query = _query(search, from_, until)
    page = delay.ls(query, limit=limit, offset=offset)
    total = page.total
    if total is None and offset + len(page.tasks) < offset + limit:
        total = offset + len(page.tasks)
    if as_json:
        tasks = [task.as_json() for task in page.tasks]
        print_json({"total": total, "offset": offset, "tasks": tasks})
        return
    if page.tasks:
        now = datetime.now(UTC)
        headings = ("due", "in", "task", "id", "queue", "args", "kwargs")
        click.echo(table(headings, [_row(task, now) for task in page.tasks]))
    many = "many" if total is None else f"{total:,}"
    click.echo(f"{len(page.tasks)} of {many} waiting")


@command(name="show")
@click.argument("task_id", type=task_id, metavar="ID")
@as_json_option
def show_task(ctx: click.Context, task_id: str, as_json: bool) -> None:
    """Show a task that waits; exit 1 if none does under this id."""
    tasks = _delay(ctx).show(task_id)
    if as_json:
        print_json([task.as_json() for task in tasks])
    elif not tasks:
        click.echo(f"{task_id}: nothing waits under this id")
    for task in () if as_json else tasks:
        for name, value in task.as_json().items():
            click.echo(f"{name:<12} {printable(value)}".rstrip())
    ctx.exit(0 if tasks else 1)


@command(name="cancel")
@_chosen
def cancel(ctx: click.Context, **chosen: Any) -> None:
    """Have tasks never run: those of the IDs, or all that a search finds.

    They are REVOKED at once; a worker tells monitors and chords.
    """
    _change(ctx, "cancel", "cancelled", lambda delay, ids: delay.cancel_all(ids), **chosen)


@command(name="reschedule")
@_chosen
@click.option("--countdown", type=float, help="Seconds from now.")
@click.option("--eta", help="ISO 8601; without a zone, UTC.")
def reschedule(ctx: click.Context, countdown: float | None, eta: str | None, **chosen: Any) -> None:
    """Have tasks due at another time: those of the IDs, or all that a search finds."""
    if (countdown is None) == (eta is None):
        raise click.UsageError("give --countdown or --eta")
    _change(
        ctx,
        "reschedule",
        "rescheduled",
        lambda delay, ids: delay.reschedule_all(ids, countdown=countdown, eta=eta),
        **chosen,
    )


@command(name="run-now")
@_chosen
def run_now(ctx: click.Context, **chosen: Any) -> None:
    """Have tasks due now: those of the IDs, or all that a search finds."""
    _change(ctx, "run now", "due now", lambda delay, ids: delay.run_all_now(ids), **chosen)


# ---- private ---------------------------------------------------------------------------------


def _delay(ctx: click.Context) -> Delay:
    from ..celery_app.delay import Delay

    installed_settings(ctx)
    return Delay(ctx.obj.app)


def _query(search: str, from_: datetime | None, until: datetime | None) -> Query:
    from ..core.due_time import due_us
    from ..core.ledger import Query

    edges = [None if at is None else due_us(at) for at in (from_, until)]
    return Query.parse(search).due_within(*edges)


def _change(
    ctx: click.Context,
    verb: str,
    done: str,
    change: Callable[[Delay, list[str]], list[Outcome]],
    *,
    ids: tuple[str, ...],
    search: str,
    from_: datetime | None,
    until: datetime | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    by_search = bool(search or from_ or until)
    if bool(ids) == by_search:
        raise click.UsageError("give IDs, or a search (--search, --from, --until)")
    delay = _delay(ctx)
    chosen = list(dict.fromkeys(ids)) or delay.ids(_query(search, from_, until))
    if dry_run:
        _say_dry(delay, chosen, verb, as_json, found=by_search)
        return
    if by_search and chosen and not force:
        click.confirm(f"{verb.capitalize()} {len(chosen):,} task(s)?", abort=True, err=as_json)
    outcomes = change(delay, chosen)
    failed = [outcome for outcome in outcomes if not outcome]
    if as_json:
        told = [{"id": each.id, "verdict": each.verdict.value} for each in outcomes]
        print_json({"done": len(outcomes) - len(failed), "outcomes": told})
    else:
        for outcome in failed if by_search else outcomes:
            click.echo(str(outcome))
        if by_search:
            click.echo(f"{len(outcomes) - len(failed):,} task(s) {done}")
    ctx.exit(1 if failed and not by_search else 0)


def _say_dry(delay: Delay, chosen: list[str], verb: str, as_json: bool, *, found: bool) -> None:
    ids = chosen if found else [each for each in chosen if delay.show(each)]
    if as_json:
        print_json({"would": verb, "ids": ids})
        return
    for task_id in ids:
        click.echo(task_id)
    click.echo(f"would {verb} {len(ids):,} task(s)")


def _row(task: Waiting, now: datetime) -> tuple[str, ...]:
    return (
        task.due.isoformat(timespec="seconds"),
        _span((task.due - now).total_seconds()),
        task.name,
        task.id,
        task.queue or f"exchange {task.exchange}",
        _short(task.args),
        _short(task.kwargs),
    )


def _span(seconds: float) -> str:
    if seconds < 0:
        return "overdue"
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _show_histogram(delay: Delay, as_json: bool) -> None:
    bars = delay.histogram()
    if as_json:
        print_json(
            [{"from": _iso(b.from_us), "until": _iso(b.until_us), "count": b.count} for b in bars]
        )
        return
    most = max((bar.count for bar in bars), default=0)
    for bar in bars:
        drawn = "█" * -(-bar.count * _BAR_WIDTH // most) if most else ""
        click.echo(f"{_iso(bar.from_us)}  {bar.count:>9,}  {drawn}".rstrip())
    click.echo(f"{sum(bar.count for bar in bars):,} waiting")


def _iso(us: int) -> str:
    return datetime.fromtimestamp(us / 1_000_000, UTC).isoformat(timespec="seconds")
