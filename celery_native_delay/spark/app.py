"""Import the Celery app on a Spark executor, and check the task for the driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from celery import Celery
from celery.local import Proxy
from kombu.utils.imports import symbol_by_name

from ..app.installation import installation_of, installed
from ..bulk.batch import check_broker
from ..errors import (
    InvalidFanOut,
    NativeDelayError,
    StoreUnavailable,
    UnsupportedBroker,
    described,
)

T = TypeVar("T")

_ENVIRONMENT_NAME = re.compile("[A-Z][A-Z0-9_]*")


@dataclass(frozen=True)
class AppFacts:
    """Facts about the Celery app that an executor sends to the driver."""

    longest_seconds: float
    """The longest delay in seconds that the app's settings allow."""
    route: str
    """The queue for rows without a queue name; "" if the app routes the task to an exchange."""


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


def describe(
    path: str, task_name: str, args_count: int, kwargs_names: Sequence[str], *, check_task: bool
) -> AppFacts:
    """Import the Celery app at *path*, check the task, and return facts about the app.

    Raises:
        InvalidFanOut: the app cannot be imported, has no task with this name and these arguments,
            or uses a broker that cannot delay tasks.
    """
    app = load_app(path)
    app.loader.import_default_modules()
    app.finalize()
    options = {}
    if check_task and task_name not in app.tasks:
        own = sorted(name for name in app.tasks if not name.startswith("celery."))
        raise InvalidFanOut(
            f"expected a task that {path!r} registers ({', '.join(own) or 'it has none'}), got "
            f"{task_name!r}; for a task that only workers know say check_task=False"
        )
    if (task := app.tasks.get(task_name)) is not None:
        _check_arguments(task, args_count, kwargs_names)
        options = {"queue": task.queue} if getattr(task, "queue", None) else {}
    connection = app.connection_for_write()
    try:
        check_broker(connection)
    except UnsupportedBroker as exc:
        raise InvalidFanOut(str(exc)) from exc
    queue = app.amqp.router.route(options, task_name).get("queue")
    route = getattr(queue, "name", queue) or ""
    return AppFacts(installed(app).settings().longest_delay_seconds, route)


def _check_arguments(task: Any, args_count: int, kwargs_names: Sequence[str]) -> None:
    if not getattr(task, "typing", False):
        return
    try:
        task.__header__(*[None] * args_count, **dict.fromkeys(kwargs_names))
    except TypeError as exc:
        raise InvalidFanOut(
            f"expected args and kwargs that task {task.name!r} takes, got {args_count} "
            f"positional ones and {list(kwargs_names)}: {exc}"
        ) from exc


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
