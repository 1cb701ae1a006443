"""Import the Celery app on a Spark executor, and tell the driver the app's tasks and queues."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from celery import Celery
from celery.app.routes import MapRoute
from celery.local import Proxy
from kombu.utils.imports import symbol_by_name

from ..app.installation import installation_of
from ..bulk.batch import check_broker
from ..errors import (
    InvalidFanOut,
    NativeDelayError,
    StoreUnavailable,
    UnsupportedBroker,
    described,
)
from ..rates.rate import Rate
from ..settings import DelaySettings
from .options import FanOutOptions
from .spreading import Spread, spread_of

T = TypeVar("T")

_ENVIRONMENT_NAME = re.compile("[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class Call:
    """The task call that an executor checks; *check_task* and *rate* are options of ``FanOut``."""

    app: str
    task: str
    args_count: int
    kwargs_names: tuple[str, ...]
    check_task: bool
    rate: Rate | bool | None = None

    @classmethod
    def of(cls, options: FanOutOptions) -> Call:
        args_count, keywords = len(options.args), tuple(options.keywords)
        rate = options.rate
        assert not isinstance(rate, str)
        return cls(options.app, options.task, args_count, keywords, options.check_task, rate)


@dataclass(frozen=True)
class AppFacts:
    """Facts about the Celery app that an executor sends to the driver."""

    longest_seconds: float
    """The longest delay in seconds that the app's settings allow."""
    queues: tuple[str, ...]
    route: str
    """The queue for rows without a queue name; "" if the app routes the task to an exchange."""
    spread: Spread | None = None
    """The rate limit that spreads the due times; None without a rate limit."""


def load_app(path: str) -> Celery:
    """Import the Celery app at *path*, such as ``"pkg.mod:app"``.

    Raises:
        InvalidFanOut: *path* is not an importable Celery app with ``install(app)``.
    """
    try:
        app = symbol_by_name(path)
    except Exception as exc:  # importing a module may raise any error
        raise InvalidFanOut(
            f"expected app {path!r} to be importable by the executors' Python, got "
            f"{type(exc).__name__}: {exc}; {_way_to_import(exc)}"
        ) from exc
    if isinstance(app, Proxy):
        app = app._get_current_object()
    if not isinstance(app, Celery):
        raise InvalidFanOut(f"expected {path!r} to be a Celery app, got {type(app).__name__}")
    installation = installation_of(app)
    if installation is None or not installation.enabled:
        raise InvalidFanOut(
            f"expected {path!r} to be an app with native delays: its module must call "
            f"celery_native_delay.install(app)"
        )
    return app


def _way_to_import(error: Exception) -> str:
    if isinstance(error, KeyError) and _ENVIRONMENT_NAME.fullmatch(name := str(error.args[0])):
        return f"if this is an environment variable, set spark.executorEnv.{name}"
    return (
        "ship it with spark.submit.pyFiles, --archives or addArtifact(), or install it there; "
        "executors have the environment variables of spark.executorEnv.NAME only"
    )


def describe(call: Call) -> AppFacts:
    """Import the Celery app, check the task, and return facts about the app.

    Raises:
        InvalidFanOut: the app cannot be imported, has no task with this name and these arguments,
            or uses a broker that cannot delay tasks.
    """
    app = load_app(call.app)
    app.loader.import_default_modules()
    app.finalize()
    options = {}
    if call.check_task and call.task not in app.tasks:
        own = sorted(name for name in app.tasks if not name.startswith("celery."))
        raise InvalidFanOut(
            f"expected a task that {call.app!r} registers ({', '.join(own) or 'it has none'}), got "
            f"{call.task!r}; for a task that only workers know say check_task=False"
        )
    if (task := app.tasks.get(call.task)) is not None:
        _check_arguments(task, call)
        options = {"queue": task.queue} if getattr(task, "queue", None) else {}
    connection = app.connection_for_write()
    try:
        check_broker(connection)
    except UnsupportedBroker as exc:
        raise InvalidFanOut(str(exc)) from exc
    queues = {*app.amqp.queues, app.conf.task_default_queue, *_routed_queues(app.amqp.routes)}
    queue = app.amqp.router.route(options, call.task).get("queue")
    route = getattr(queue, "name", queue) or ""
    chosen: DelaySettings = installation_of(app).settings()  # type: ignore[union-attr]
    names = tuple(sorted({*queues, route} - {""}))
    return AppFacts(chosen.longest_delay_seconds, names, route, _spread(call, task, chosen))


def _spread(call: Call, task: Any, settings: DelaySettings) -> Spread | None:
    rate = call.rate
    if not rate:
        return None
    if rate is True:
        rates = settings.rates_by_task
        if call.task not in rates:
            raise InvalidFanOut(
                f"expected {call.app!r} to have a rate for {call.task!r} with rate=True, "
                f"native_delay_rates has {', '.join(sorted(rates)) or 'none'}: add it there, for "
                'workers, which count, or say rate="100/m"'
            )
        rate = max(rates[call.task], key=lambda each: each.spacing_us)
    run = getattr(task, "run", None)
    return spread_of(rate, call.task, run, call.args_count, call.kwargs_names)


def _check_arguments(task: Any, call: Call) -> None:
    if not getattr(task, "typing", False):
        return
    try:
        task.__header__(*[None] * call.args_count, **dict.fromkeys(call.kwargs_names))
    except TypeError as exc:
        raise InvalidFanOut(
            f"expected args and kwargs that task {call.task!r} takes, got {call.args_count} "
            f"positional ones and {list(call.kwargs_names)}: {exc}"
        ) from exc


def _routed_queues(routes: Sequence[Any]) -> set[str]:
    """Return the names of the queues in the setting ``task_routes``."""
    found = set()
    for route in routes:
        if isinstance(route, MapRoute):
            for way in (*route.map.values(), *route.patterns.values()):
                queue = way if isinstance(way, str) else dict(way).get("queue")
                found.add(getattr(queue, "name", queue) or "")
    return found


def on_app(path: str, call: Callable[..., T], *arguments: Any) -> T:
    """Call a function that asks the store or the broker of the app at *path*.

    Raises:
        StoreUnavailable: it does not answer, or refuses the app.
    """
    app = load_app(path)
    try:
        return call(app, *arguments)
    except NativeDelayError:
        raise
    except Exception as exc:  # of any driver
        raise StoreUnavailable(described(exc)) from exc
