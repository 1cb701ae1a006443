"""``install(app)`` makes the delayed tasks of a Celery app wait in the broker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import celery.app.base
from celery import Celery
from celery.utils.imports import symbol_by_name

from ..settings import check_settings
from ..transports.aliases import register_transports
from .installation import PREFIX, Installation, checked_app, installation_of, keep_celerys_own_off
from .retrying import task_from_fun, teach_tasks

App = TypeVar("App", bound=Celery)

#: The import path of the consumer bootstep. Celery imports the path only in a worker.
BOOTSTEP = "celery_native_delay.worker.bootsteps:NativeDelay"


def install(app: App, **settings: Any) -> App:
    """Make the delayed tasks of *app* wait in the broker instead of in the workers.

    Call ``install`` once, before or after the app is configured. A second call only adds or changes
    settings. Other apps in the process are not changed.

    Args:
        app: the Celery app.
        **settings: any of :class:`~celery_native_delay.DelaySettings`, without the prefix
            ``native_delay_``. These settings override the app's configuration.

    Returns:
        the same *app*.

    Raises:
        TypeError: *app* is not a Celery app.
        SettingsError: a setting is unknown or has an invalid value.
        UnsupportedBroker: this release of Celery is not supported.
    """
    real = checked_app(app)
    check_settings(settings)
    register_transports()
    keep_celerys_own_off(celery.app.base)
    if settings:
        real.conf.update({PREFIX + name: value for name, value in settings.items()})
    present = installation_of(real)
    if present is not None:
        present.keywords |= settings
        return app
    installation = Installation(real, dict(settings))
    if real.configured:
        installation.settings()  # checks rules that involve several settings
    real._native_delay = installation
    real._connection = installation.connection
    real.send_task = installation.send_task
    real._task_from_fun = partial(task_from_fun, installation)
    teach_tasks(installation)
    if real.on_after_finalize is not None:  # None while an app is unpickled
        real.on_after_finalize.connect(partial(teach_tasks, installation), weak=False)
    if not isinstance(real.control_cls, ControlOf):
        real.control_cls = ControlOf(real.control_cls)
        vars(real).pop("control", None)
    from . import idle_beat  # noqa: F401  connects its signal

    real.steps["consumer"].add(BOOTSTEP)
    real.fixups = {*real.fixups, f"{__name__}:reinstall"}
    drop_pools(real)
    return app


@dataclass(frozen=True)
class ControlOf:
    """Makes the app's ``Control``, with a ``revoke`` that also cancels waiting tasks. Picklable."""

    original: Any

    def __call__(self, app: Any) -> Any:
        from .control import RevokesWaiting

        control = symbol_by_name(self.original)
        return type(control.__name__, (RevokesWaiting, control), {})(app=app)


def reinstall(app: Celery) -> None:
    """Install this package in an unpickled app. Celery calls this function as a fixup."""
    install(app)


def drop_pools(app: Celery) -> None:
    """Drop the app's pools: connections from before ``install`` cannot delay messages."""
    app._pool = None
    if "amqp" in vars(app):
        app.amqp._producer_pool = None
