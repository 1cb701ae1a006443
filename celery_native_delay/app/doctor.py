"""The checks of ``delay doctor``: broker, stored state of tasks, rate limits and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from difflib import get_close_matches
from typing import Any

from kombu.exceptions import OperationalError

from ..durations import duration
from ..errors import (
    NativeDelayError,
    NoStore,
    NotPermitted,
    SettingsError,
    UnsupportedBroker,
    described,
)
from ..finding import ADVICE, UNCHECKED, WRONG, Finding
from ..now import time_ns
from ..schedules.state import EXPIRED, MISSED
from ..settings import DRAIN, DelaySettings
from ..transports.interface import lines_of
from .broker import bounded_connection, unconnected
from .delay import Delay
from .installation import admin_part, installed
from .schedules import Scheduled, Schedules

#: Seconds by which a schedule entry may be overdue. Workers check the entries every 30 s.
_OVERDUE_SECONDS = 60

#: Seconds since the last check of the schedule entries, if no worker runs.
_UNSEEN_SECONDS = 120

#: A hold or drop that is older has perhaps been forgotten.
_FORGOTTEN_SECONDS = 86_400

_WAYS_OUT: tuple[tuple[type[Exception], str], ...] = (
    (SettingsError, "correct the setting, in workers and producers alike"),
    (NotPermitted, "grant this user the named permission, or run the command as a user who has it"),
    (UnsupportedBroker, "use a supported broker, or set native_delay_enabled = False"),
)

_START_IT = (
    "start it, or correct host, user and password of its URL (broker_url, celery -b), in workers "
    "and producers"
)

_WHY_LEFT_OUT = {
    EXPIRED: "start more workers for its queue, or let it expire later",
    MISSED: "start more workers for its queue, or change these settings",
}

_START_SCHEDULES = "start a worker with native_delay_schedules"

_TELL_APART = (
    "end the old workers; or give each app its own name, as in Celery('shop'), or its own "
    "native_delay_namespace"
)

_WHOSE = "rates are a matter of workers alone"

_START_THEM = (
    "start the server of the rates (the broker's Redis or native_delay_store), or "
    f"correct its URL and the rights of its user; {_WHOSE}"
)


def examine(app: Any) -> list[Finding]:
    """Run the checks of ``delay doctor``. Returns problems, and checks that could not run."""
    installation = installed(app)
    try:
        settings = installation.settings()
    except SettingsError as exc:
        return [_failed("settings", exc)]
    found = [
        *_of_rollback(settings),
        *_of_broker(app, settings),
        *_of_rated_names(app, settings),
        *_of_schedules(app, settings),
    ]
    return list(dict.fromkeys(found))


def _of_rollback(settings: DelaySettings) -> Iterator[Finding]:
    if settings.drains:
        problem = f'native_delay_enabled is "{DRAIN}": workers hold new delayed tasks in memory'
        way_out = "run `celery -A PROJ delay uninstall` and remove install(app), or set it to True"
        yield Finding("rollback", ADVICE, problem, way_out)


def _of_broker(app: Any, settings: DelaySettings) -> Iterator[Finding]:
    try:
        with bounded_connection(app) as connection:
            yield from _found_on(connection, app, settings)
    except NativeDelayError as exc:
        yield _failed("broker", exc)


def _found_on(
    connection: Any, app: Any, settings: DelaySettings, *, is_alone: bool = False
) -> Iterator[Finding]:
    away = OperationalError, OSError, *connection.connection_errors, *connection.channel_errors
    try:
        connection.ensure_connection(max_retries=1, interval_start=0)
        part = admin_part(app, connection)
        has_store = True
        try:
            for each in part.examine():
                has_store &= (each.check, each.level) != ("store", WRONG)
                yield each
        except NativeDelayError as exc:
            yield _failed("broker", exc)
        if has_store:
            yield from _of_lines(connection, settings)
            yield from _of_holds(app)
    except away as exc:
        problem = f"cannot use the broker {connection.as_uri()}: {type(exc).__name__}: {exc}"
        if is_alone:  # it needs the broker
            return
        yield Finding("broker", WRONG, problem, _START_IT)
        if (alone := unconnected(app)) is not None:
            yield from _found_on(alone, app, settings, is_alone=True)


def _failed(check: str, exc: NativeDelayError) -> Finding:
    if isinstance(exc, SettingsError) and str(exc).startswith("native_delay_rates"):
        return Finding(check, WRONG, str(exc), f"correct the rate; {_WHOSE}")
    fitting = (way_out for kind, way_out in _WAYS_OUT if isinstance(exc, kind))
    return Finding(check, WRONG, str(exc), next(fitting, "do what it says, and check again"))


def _of_lines(connection: Any, settings: DelaySettings) -> Iterator[Finding]:
    """Yield a problem if the server that stores rate limits is unreachable."""
    if not settings.rates:
        return
    try:
        with closing(lines_of(connection.default_channel, settings)) as lines:
            lines.look(1)
    except NoStore as exc:
        yield Finding.of_sentence("rates", WRONG, f"no worker starts with these rates: {exc}")
    except NativeDelayError as exc:
        yield Finding("rates", WRONG, f"no rate-limited task starts: {exc}", _START_THEM)


def _of_holds(app: Any) -> Iterator[Finding]:
    with suppress(NativeDelayError):  # the other checks say so
        for hold in Delay(app).holds():
            seconds = time_ns() / 1e9 - (hold.since_us or 0) / 1e6
            if hold.stops and seconds > _FORGOTTEN_SECONDS:
                kept = f"{hold.mode} of {hold.name} by {hold.by} is {duration(seconds)} old"
            elif hold.mode in ("release", "ended"):
                kept = f"a release of {hold.name} has not ended"
            else:
                continue
            way_out = "end it: `celery -A PROJ delay release` (see `delay holds`)"
            yield Finding("holds", ADVICE, f"{kept}, {hold.held} task(s) wait", way_out)


def _of_rated_names(app: Any, settings: DelaySettings) -> Iterator[Finding]:
    if not settings.rates:
        return
    try:
        app.loader.import_default_modules()
        app.finalize()
    except Exception as exc:  # an imported module may raise anything
        problem = f"cannot import the app's tasks: {type(exc).__name__}: {exc}"
        yield Finding("rates", WRONG, problem, f"correct it; {_WHOSE}")
        return
    own = [name for name in app.tasks if not name.startswith("celery.")]
    for name, rates in settings.rates_by_task.items():
        if name in app.tasks:
            try:
                for rate in rates:
                    rate.signature_of(name, app.tasks[name].run)
            except SettingsError as exc:
                yield _failed("rates", exc)
            continue
        like = get_close_matches(name, own, 1)
        meant = f", such as {like[0]}" if like else ""
        yield Finding(
            "rates",
            WRONG,
            f"native_delay_rates has {name}, but this app has no such task",
            f"write the name of a task{meant}; {_WHOSE}",
        )


def _of_schedules(app: Any, settings: DelaySettings) -> Iterator[Finding]:
    if not settings.schedules or settings.drains:
        return
    schedules = Schedules(app)
    try:
        missing = schedules.missing()
        for name in missing:
            problem = f"no worker has published the schedule entry {name}"
            yield Finding("schedules", WRONG, problem, _START_SCHEDULES)
        if not missing and (unseen_seconds := schedules.seconds_since_look()) > _UNSEEN_SECONDS:
            problem = f"no worker has checked the schedule entries for {duration(unseen_seconds)}"
            yield Finding("schedules", WRONG, problem, _START_SCHEDULES)
        if rival := schedules.rival():
            problem = (
                f"workers of two configurations of the app {app.main!r} run: one has the schedule "
                f"entries {', '.join(rival)}, and has no say"
            )
            yield Finding("schedules", WRONG, problem, _TELL_APART)
        for entry in schedules:
            if entry.problem:
                problem = f"the schedule entry {entry.name} does not run: {entry.problem}"
                yield Finding("schedules", WRONG, problem, "correct it, and deploy all workers")
            yield from _of_left_out(entry)
            if entry.late_seconds > _OVERDUE_SECONDS:
                problem = f"{entry.name} is overdue by {duration(entry.late_seconds)}"
                yield Finding("schedules", WRONG, problem, "start workers that consume its queue")
        if (sent := schedules.beat()) is not None:
            problem = f"a celery beat without native_delay_schedules also sends {sent}"
            yield Finding("schedules", WRONG, problem, "stop that beat, or each run happens twice")
    except SettingsError as exc:
        yield Finding("schedules", WRONG, str(exc), "correct it: no worker can start")
    except (NativeDelayError, OperationalError) as exc:
        problem = f"cannot read the schedule entries: {exc}"
        yield Finding("schedules", UNCHECKED, problem, "mend the problem above, and check again")
    except Exception as exc:  # the user's modules, scheduler and database may raise anything
        problem = f"cannot read the schedule entries: {described(exc)}"
        yield Finding("schedules", WRONG, problem, "correct it: no worker can read them either")


def _of_left_out(entry: Scheduled) -> Iterator[Finding]:
    """Yield a problem if the last runs of an entry did not happen."""
    # A late or refused run now and then is as the user chose; an expired one is lost work.
    if entry.left_out is None or (entry.left_outs == 1 and entry.left_out != EXPIRED):
        return
    runs = "the last run" if entry.left_outs == 1 else f"the last {entry.left_outs} runs"
    problem = f"{runs} of {entry.name} did not happen: {entry.left_out}"
    remedy = _WHY_LEFT_OUT.get(entry.left_out, "correct it, and deploy all workers")
    yield Finding("schedules", WRONG, problem, remedy)
