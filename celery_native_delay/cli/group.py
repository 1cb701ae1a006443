"""The command group ``delay``, and functions that several of its commands use.

Every celery command imports this module. To keep other commands fast, only functions import the
rest of the package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import LOG_LEVEL, CeleryCommand, handle_preload_options

if TYPE_CHECKING:
    from ..app.delay import Delay
    from ..app.holds import Progress
    from ..settings import DelaySettings
    from ..transports.interface import AdminPart, Told

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
yes_option = click.option(
    "-f", "--force", "--yes", is_flag=True, help="Do not ask for confirmation."
)
limit_option = click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Show at most this many.",
)
loglevel_option = click.option(
    "-l",
    "--loglevel",
    type=LOG_LEVEL,
    default="WARNING",
    show_default=True,
    help="How much to log on standard error.",
)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A click type for a duration such as 90 or 1h30m, converted to seconds."""

    name = "duration"

    def __init__(self, *, at_least: float | None = None) -> None:
        self._at_least = at_least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from ..durations import duration, seconds_of
        from ..errors import InvalidDueTime

        try:
            seconds = seconds_of(str(value))
        except InvalidDueTime as exc:
            self.fail(str(exc), param, ctx)
        if self._at_least is not None and seconds < self._at_least:
            self.fail(f"expected at least {duration(self._at_least)}, got {value}", param, ctx)
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg]
    """A click type for a time: 1h30m (from now), tomorrow 09:00, or ISO 8601."""

    name = "duration|time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        from ..durations import moment_of
        from ..errors import InvalidDueTime

        zone = UTC if ctx is None else ctx.obj.app.timezone
        try:
            return moment_of(value, datetime.now(zone))
        except InvalidDueTime as exc:
            self.fail(str(exc), param, ctx)


class Json(click.ParamType):  # type: ignore[type-arg]
    """A click type for a JSON text of one Python type, such as a list."""

    name = "json"

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = json.loads(value)
        except ValueError as exc:
            self.fail(f"expected JSON, {exc}: {value!r}", param, ctx)
        if not isinstance(found, self._kind):
            expected = "object" if self._kind is dict else "list"
            self.fail(f"expected a JSON {expected}, got {value!r}", param, ctx)
        return found


@click.group(name="delay")
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]
def delay(ctx: click.Context) -> None:
    """List, cancel, check and move delayed tasks."""


def command(**options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """Make a subcommand of ``delay`` that shows expected errors without a traceback."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def explained(ctx: click.Context, *args: Any, **kwargs: Any) -> None:
            with _errors_explained(ctx):
                function(ctx, *args, **kwargs)

        group = options.pop("group", delay)
        command: click.Command = group.command(**{"cls": CeleryCommand, **options})(
            click.pass_context(explained)
        )
        return command

    return decorate


@contextmanager
def _errors_explained(ctx: click.Context) -> Iterator[None]:
    from amqp.exceptions import AMQPError
    from kombu.exceptions import OperationalError

    from ..app.broker import shown_broker
    from ..errors import NativeDelayError

    try:
        yield
    except NativeDelayError as exc:
        raise click.ClickException(str(exc)) from exc
    except BrokenPipeError:
        raise  # as with `| head`: click exits quietly
    except (OperationalError, AMQPError, OSError) as exc:
        said = str(exc).rstrip(".")
        raise click.ClickException(
            f"cannot use the broker {shown_broker(ctx.obj.app)}: {said}; check that it runs, and "
            f"its URL (celery -b)"
        ) from exc


@contextmanager
def broker(ctx: click.Context) -> Iterator[AdminPart]:
    """Yield an ``AdminPart``, through which ``delay`` commands use the app's broker."""
    from ..app.installation import admin_part

    with reachable(ctx) as connection:
        yield admin_part(ctx.obj.app, connection)


@contextmanager
def reachable(ctx: click.Context) -> Iterator[Any]:
    """Yield a new connection to the app's broker. Raises if ``install(app)`` was not called."""
    from kombu.exceptions import OperationalError

    from ..app.broker import opened

    installed_settings(ctx)
    with ctx.obj.app.connection_for_write() as connection:
        try:
            yield opened(ctx.obj.app, connection)
        except (*connection.connection_errors, *connection.channel_errors) as exc:
            raise OperationalError(str(exc)) from exc


def installed_settings(ctx: click.Context, *, raises_if_unsupported: bool = True) -> DelaySettings:
    """Return the app's settings, without connecting. Raises if ``install(app)`` was not called.

    *raises_if_unsupported* sets what happens when the app later connects to a broker that cannot
    delay: True raises an error, False logs a warning.
    """
    from celery import _state

    from ..app.installation import installation_of, installed
    from ..transports.aliases import answer_limits

    app = ctx.obj.app
    if app is _state.default_app and installation_of(app) is None:
        words = ctx.command_path.removeprefix(f"{ctx.find_root().command_path} ")
        raise click.ClickException(
            f"expected an app: name its module with -A, as in `celery -A shop {words}`"
        )
    installation = installed(app)
    installation.raises_if_unsupported = raises_if_unsupported
    chosen = installation.settings()
    if not chosen.enabled:
        raise click.ClickException(
            "native_delay_enabled is off in this app: to list, cancel and deliver waiting tasks, "
            'set native_delay_enabled = "drain"'
        )
    connection = app.connection_for_write()
    if connection.transport.driver_type != "amqp":  # RabbitMQ may need minutes to purge a queue
        limits = answer_limits(connection) | (app.conf.broker_transport_options or {})
        app.conf.broker_transport_options = limits
    return chosen


def delay_of(ctx: click.Context) -> Delay:
    """Return the app's ``Delay``. Raises if ``install(app)`` was not called."""
    from ..app.delay import Delay

    installed_settings(ctx)
    return Delay(ctx.obj.app)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def say(as_json: bool, value: Any, text: str) -> None:
    """Print *text*, or with ``--json`` print *value* as JSON."""
    print_json(value) if as_json else click.echo(text)


def confirm(question: str) -> None:
    """Ask for confirmation on standard error, and abort unless the answer is yes.

    click.confirm() would add a space to standard output, which scripts may parse as JSON.
    """
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        click.echo(err=True)
    if answer.strip().lower() not in ("y", "yes"):
        raise click.Abort


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """Yield a function that moves a progress bar on standard error."""
    bar = click.progressbar(length=0, label=label, show_pos=True, file=sys.stderr)

    def progress(done: int, in_all: int) -> None:
        bar.length = max(bar.pos + done, in_all)
        bar.update(done)

    with bar:
        yield progress


def show(told: Told, as_json: bool) -> None:
    say(as_json, told.facts, "\n".join(told.sentences))


def local(ctx: click.Context, moment: datetime, timespec: str = "seconds") -> str:
    """Format a time as ISO 8601 in the app's time zone, with the offset from UTC."""
    return moment.astimezone(ctx.obj.app.timezone).isoformat(timespec=timespec)
