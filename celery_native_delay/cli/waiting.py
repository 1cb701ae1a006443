"""The commands ``delay ls``, ``show``, ``cancel``, ``reschedule``, ``update``, ``run-now``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial, reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..texts import printable, table
from .group import (
    Duration,
    Json,
    Moment,
    as_json_option,
    broker,
    command,
    confirm,
    delay_of,
    limit_option,
    local,
    print_json,
    progress_bar,
    say,
    yes_option,
)

if TYPE_CHECKING:
    from ..records.waiting import Outcome, Query, Waiting

Command = TypeVar("Command", bound=Callable[..., Any])

_LONGEST_TEXT = 40

#: Changes of so many tasks show no progress bar.
_WITHOUT_BAR = 1000


def task_id(value: str) -> str:
    if not value:
        raise click.BadParameter("expected the id of a task, got an empty text")
    return value


def all_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    return lambda function: reduce(lambda made, option: option(made), reversed(options), function)


_filters = all_of(
    click.option(
        "-s",
        "--search",
        default="",
        help="Words that must all match: any, or name:… queue:… run:… args:… kwargs:key=value "
        "key:…",
    ),
    click.option(
        "--from",
        "from_",
        type=Moment(),
        metavar="DURATION|TIME",
        help="Due at this time or later: 90, 1h30m or 2d from now, or ISO 8601. Without an offset, "
        "a time is in the app's time zone.",
    ),
    click.option("--until", type=Moment(), metavar="DURATION|TIME", help="Due before this time."),
)

_chosen = all_of(
    click.argument("ids", nargs=-1, type=task_id, metavar="[ID]..."),
    _filters,
    yes_option,
    as_json_option,
)


@command(name="ls")
@_filters
@limit_option
@click.option(
    "--offset",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Skip this many.",
)
@as_json_option
def ls(
    ctx: click.Context,
    search: str,
    from_: datetime | None,
    until: datetime | None,
    limit: int,
    offset: int,
    as_json: bool,
) -> None:
    """List waiting tasks, earliest due time first. Times are in the app's time zone.

    --json prints an object with `tasks`, `offset` and `total`, and times in UTC. `total` is the
    number of all matching tasks, or null if a search has 1,000 or more matches beyond the printed
    tasks.
    """
    from ..app.delay import listed
    from ..records.waiting import ALL

    delay = delay_of(ctx)
    query = _query(search, from_, until)
    page, counted = listed(delay, query, offset, limit)
    if as_json:
        tasks = [task.as_json() for task in page]
        total = page.total if counted else None
        print_json({"total": total, "offset": offset, "tasks": tasks})
        return
    if page:
        click.echo(_table(ctx, page))
    many = f"{'' if counted else 'at least '}{page.total:,}"
    click.echo(f"{len(page):,} of {many} {'waiting' if query == ALL else 'that match'}")
    if query == ALL and (others := _in_broker(ctx)):
        click.echo(f"{others:,} more wait in the broker, which cannot list them")


def _in_broker(ctx: click.Context) -> int:
    """Return the number of tasks that wait in the broker beside a store."""
    with broker(ctx) as part:
        count = getattr(part, "in_broker", int)
        return count() or 0


@command(name="show")
@click.argument("ids", type=task_id, nargs=-1, required=True, metavar="ID...")
@as_json_option
def show_tasks(ctx: click.Context, ids: tuple[str, ...], as_json: bool) -> None:
    """Show tasks by ID: where each one waits and why, or how it ended.

    If one of the tasks is not waiting, the exit status is 1. For one ID, --json prints an object;
    for several IDs a list of objects, in the order of the IDs. If several messages with one ID
    wait, the object is the message with the earliest due time, and `others` lists the other
    messages. `story` has the sentences, and `waits` is false if the task is not waiting.
    """
    delay = delay_of(ctx)
    found = {task_id: sorted(delay.show(task_id), key=attrgetter("due_us")) for task_id in ids}
    stories = {task_id: delay.story(task_id) for task_id in found}
    if as_json:
        objects = [_as_object(each, found[each]) | {"story": stories[each]} for each in ids]
        print_json(objects[0] if len(ids) == 1 else objects)
    else:
        now = datetime.now(UTC)
        texts = []
        for each, tasks in found.items():
            known = "\n".join(f"- {printable(said)}" for said in stories[each])
            texts.append(f"{_text_of(ctx, each, tasks, now)}\n{known}")
        click.echo("\n\n".join(texts))
    ctx.exit(0 if all(found.values()) else 1)


@command(name="cancel")
@_chosen
def cancel(ctx: click.Context, **chosen: Any) -> None:
    """Cancel waiting tasks, by IDs or by a search.

    The results of cancelled tasks become REVOKED at once. Later, a worker tells monitors and chords
    that the tasks were revoked.
    """
    from ..app.delay import Delay

    _change(ctx, "cancel", "cancelled", Delay.cancel_all, **chosen)


@command(name="reschedule")
@_chosen
@click.option("--countdown", type=Duration(), help="From now: seconds, or such as 1h30m, 2d.")
@click.option("--eta", type=Moment(), metavar="TIME", help="ISO 8601, or 'tomorrow 09:00'.")
@click.option("--by", type=Duration(), help="Move due times: +2h is later, -2h earlier.")
@click.option(
    "--spread", type=Duration(at_least=0), help="Due one after the other over this time, evenly."
)
def reschedule(
    ctx: click.Context,
    countdown: float | None,
    eta: datetime | None,
    by: float | None,
    spread: float | None,
    **chosen: Any,
) -> None:
    """Give waiting tasks another due time, by IDs or by a search.

    --by keeps the spacing of several tasks. --spread begins now, or at --countdown or --eta. A due
    time in the past needs the option --yes.
    """
    from ..app.delay import Delay

    given = [each is not None for each in (countdown, eta, by)]
    if sum(given) > 1 or not (any(given) or spread is not None):
        one = "give --countdown, --eta or --by"
        raise click.UsageError(f"{one}, not several" if any(given) else f"{one}, or --spread")
    if by is not None and spread is not None:
        raise click.UsageError("give --by or --spread, not both")
    if not chosen["force"]:
        _refuse_past(countdown, eta)
    _change(
        ctx,
        "reschedule",
        "rescheduled",
        partial(Delay.reschedule_all, countdown=countdown, eta=eta, by=by, spread=spread),
        **chosen,
    )


@command(name="update")
@click.argument("id_", type=task_id, metavar="ID")
@click.option("--args", type=Json(list), help="All positional arguments, such as '[7]'.")
@click.option("--kwargs", type=Json(dict), help="""All keyword arguments, such as '{"user": 7}'.""")
@click.option("--priority", type=click.IntRange(0, 255))
@click.option("--queue", help="The queue that gets the task.")
@click.option("--expires", type=Moment(), metavar="DURATION|TIME", help="No start after then.")
@as_json_option
def update(ctx: click.Context, id_: str, as_json: bool, **parts: Any) -> None:
    """Change arguments, priority, queue or expiry of the waiting task ID; the rest stays.

    If the task is not waiting any more, nothing changes, and the exit status is 1.
    """
    if all(part is None for part in parts.values()):
        raise click.UsageError("give --args, --kwargs, --priority, --queue or --expires")
    outcome = delay_of(ctx).update(id_, **parts)
    text = f"{id_} updated" if outcome else str(outcome)
    say(as_json, {"id": id_, "verdict": outcome.verdict.value}, printable(text))
    ctx.exit(0 if outcome else 1)


@command(name="run-now")
@_chosen
def run_now(ctx: click.Context, **chosen: Any) -> None:
    """Make waiting tasks due now, by IDs or by a search."""
    from ..app.delay import Delay

    _change(ctx, "run now", "due now", Delay.run_all_now, **chosen)


def _query(search: str, from_: datetime | None, until: datetime | None) -> Query:
    from ..due_time import due_us
    from ..records.waiting import Query

    edges = [None if at is None else due_us(at) for at in (from_, until)]
    return Query.parse(search).due_within(*edges)


def _change(
    ctx: click.Context,
    verb: str,
    done: str,
    change: Callable[..., list[Outcome]],
    *,
    ids: tuple[str, ...],
    search: str,
    from_: datetime | None,
    until: datetime | None,
    force: bool,
    as_json: bool,
) -> None:
    by_search = bool(search or from_ or until)
    if not ids and not by_search:
        raise click.UsageError("give IDs, or a search (--search, --from, --until)")
    if ids and by_search:
        raise click.UsageError("give IDs or a search (--search, --from, --until), not both")
    delay = delay_of(ctx)
    chosen = list(dict.fromkeys(ids)) or delay.ids(_query(search, from_, until))
    if by_search and chosen and not force:
        confirm(f"{verb.capitalize()} {len(chosen):,} task(s)?")
    if len(chosen) > _WITHOUT_BAR:
        with progress_bar(verb) as progress:
            outcomes = change(delay, chosen, progress=progress)
    else:
        outcomes = change(delay, chosen)
    failed = [outcome for outcome in outcomes if not outcome]
    if as_json:
        verdicts = [{"id": each.id, "verdict": each.verdict.value} for each in outcomes]
        print_json({"done": len(outcomes) - len(failed), "outcomes": verdicts})
    else:
        for outcome in failed if by_search else outcomes:
            click.echo(printable(_said(ctx, outcome)))
        if by_search:
            click.echo(f"{len(outcomes) - len(failed):,} task(s) {done}")
    ctx.exit(1 if failed and not by_search else 0)


def _refuse_past(countdown: float | None, eta: datetime | None) -> None:
    from ..durations import duration

    if eta is None:
        ago_seconds, option = -(countdown or 0.0), "--countdown"
    else:
        ago_seconds, option = (datetime.now(UTC) - eta).total_seconds(), "--eta"
    if ago_seconds > 0:
        raise click.UsageError(
            f"{option} is {duration(ago_seconds)} ago: to run the task now, use `run-now` or --yes"
        )


def _as_object(task_id: str, tasks: list[Waiting]) -> dict[str, Any]:
    if not tasks:
        return {"id": task_id, "waits": False}
    first, *others = (task.as_json() for task in tasks)
    return first | {"waits": True} | ({"others": others} if others else {})


def _said(ctx: click.Context, outcome: Outcome) -> str:
    if not outcome or outcome.due_us is None:
        return str(outcome)
    due = datetime.fromtimestamp(outcome.due_us / 1_000_000, UTC)
    return f"{outcome.id} is due {local(ctx, due, 'milliseconds')}"


def _text_of(ctx: click.Context, task_id: str, tasks: list[Waiting], now: datetime) -> str:
    if not tasks:
        return f"{printable(task_id)}: nothing waits under this id"
    return "\n\n".join("\n".join(_fields(ctx, task, now)) for task in tasks)


def _fields(ctx: click.Context, task: Waiting, now: datetime) -> Iterator[str]:
    due = local(ctx, task.due, "milliseconds")
    for name, value in (task.as_json() | {"due": due}).items():
        more = f" ({_until(task, now)})" if name == "due" else ""
        yield f"{name:<12} {printable(value)}{more}".rstrip()


def _table(ctx: click.Context, tasks: Sequence[Waiting]) -> str:
    now = datetime.now(UTC)
    headings = ("due", "in", "task", "id", "queue", "args", "kwargs", "key")
    rows = [
        (
            local(ctx, task.due),
            f"held by {task.held.by}" if task.held else _until(task, now),
            task.name,
            task.id,
            task.queue or f"exchange {task.exchange}",
            *map(_short, (task.args, task.kwargs, task.key)),
        )
        for task in tasks
    ]
    columns = len(headings) if any(task.key for task in tasks) else -1
    return table(headings[:columns], [row[:columns] for row in rows])


def _until(task: Waiting, now: datetime) -> str:
    from ..durations import duration

    seconds = (task.due - now).total_seconds()
    return f"overdue {duration(-seconds)}" if seconds < 0 else duration(seconds)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
