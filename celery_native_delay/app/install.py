"""``install(app)`` makes the delayed tasks of a Celery app wait in the broker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, Unpack
from weakref import WeakSet

import celery.app.base
from amqp.exceptions import AMQPError
from celery import Celery, signals
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from kombu import pools
from kombu.exceptions import KombuError
from kombu.utils.functional import maybe_list

from ..errors import NativeDelayError, NoStore, UnsupportedBroker
from ..per_process import in_forked_children
from ..settings import DelaySettings, InstallKeywords
from ..transports.aliases import OPTION, register_transports
from .delay import Delay
from .installation import PREFIX, Installation, checked_app, installation_of, keep_celerys_own_off
from .keyed import send_declared
from .retrying import register_task, task_from_fun, teach_tasks

logger = get_logger(__name__)

App = TypeVar("App", bound=Celery)

#: The import path of the consumer bootstep. Celery imports the path only in a worker.
BOOTSTEP = "celery_native_delay.worker.bootsteps:NativeDelay"


def install(app: App, **settings: Unpack[InstallKeywords]) -> App:
    """Make the delayed tasks of *app* wait in the broker instead of in the workers.

    Call ``install`` before or after the app is configured. A second call adds or changes settings.
    It also puts back what a second ``Celery.__init__`` of the same app object removes, such as the
    worker's bootstep. Each worker does so, too, when it starts. Other apps are not changed.

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
    DelaySettings.from_mapping(settings)
    register_transports()
    keep_celerys_own_off(celery.app.base)
    installation = installation_of(real)
    if installation is None:
        installation = Installation(real, dict(settings))
        installation.send_declared = send_declared
        if real.configured:
            installation.settings()  # checks rules that involve several settings
        real._native_delay = installation
        _apps.add(real)
        real._connection = installation.connection
        real.send_task = installation.send_task
        real._task_from_fun = partial(task_from_fun, installation)
        real.register_task = partial(register_task, installation)
        drop_pools(real)
        from . import beat  # noqa: F401  connects its signal
    elif installation.keywords | settings != installation.keywords:
        drop_pools(real)  # whose connections have the earlier settings
    installation.keywords |= settings
    installation.keys = None
    _hook(installation)
    return app


def _hook(installation: Installation) -> None:
    """Add each part of this package that the app lacks, such as the bootstep of its workers."""
    app: Any = installation.app
    if installation.keywords:
        _keep_keywords(installation)
    teach_tasks(installation)
    if app.on_after_finalize is not None:  # None while an app is unpickled
        for signal, step in (
            (app.on_after_configure, _keep_keywords),
            (app.on_after_finalize, teach_tasks),
        ):
            signal.connect(partial(step, installation), weak=False, dispatch_uid=__name__)
    if not isinstance(app.control_cls, ControlOf):
        app.control_cls = ControlOf(app.control_cls)
        vars(app).pop("control", None)
    app.steps["consumer"].add(BOOTSTEP)
    app.fixups = {*app.fixups, f"{__name__}:reinstall"}


def _keep_keywords(installation: Installation, **_: Any) -> None:
    """Write the keywords of ``install`` into the app's configuration, with which it is pickled."""
    keywords = installation.keywords.items()
    installation.app.conf.update({PREFIX + name: value for name, value in keywords})


@signals.worker_init.connect(weak=False)  # type: ignore[untyped-decorator]
def hook_again(sender: Any = None, **_: Any) -> None:
    """Complete the app of a starting worker, if ``Celery.__init__`` was called after ``install``.

    Flask's pattern ``init_app`` does so. Without the bootstep no due task would reach its queue.
    """
    installation = installation_of(sender.app)
    if installation is not None:
        _hook(installation)


class RevokesWaiting:
    """A mixin for the app's ``Control`` class: ``revoke`` also cancels waiting tasks.

    ``app.control.revoke``, ``AsyncResult.revoke``, ``celery control revoke`` and Flower's button
    all call ``broadcast``.
    """

    app: Any

    def broadcast(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Cancel each revoked task that is waiting, then broadcast the command to the workers.

        The only exception: a ``revoke`` with *destination* or *pattern* cancels no waiting task.
        """
        # The arguments are handed on as they came: the user's class may take less by position.
        given = dict(zip(("arguments", "destination"), args, strict=False)) | kwargs
        everywhere = given.get("destination") is None and given.get("pattern") is None
        if command in ("revoke", "terminate") and everywhere:
            self._cancel_waiting((given.get("arguments") or {}).get("task_id"))
        return super().broadcast(command, *args, **kwargs)  # type: ignore[misc]

    def _cancel_waiting(self, task_ids: Any) -> None:
        ids = [str(each) for each in maybe_list(task_ids) or () if each]
        installation = installation_of(self.app)
        if not ids or installation is None or not installation.enabled:
            return
        try:
            Delay(self.app).cancel_all(ids)
        except (NoStore, UnsupportedBroker):
            return  # as Celery without this package
        except (NativeDelayError, KombuError, AMQPError, OSError) as exc:
            logger.warning(
                "native delay: revoked in workers only, waiting tasks are not cancelled: %s", exc
            )


@dataclass(frozen=True)
class ControlOf:
    """Makes the app's ``Control``, with a ``revoke`` that also cancels waiting tasks. Picklable."""

    original: Any

    def __call__(self, app: Any) -> Any:
        control = symbol_by_name(self.original)
        return type(control.__name__, (RevokesWaiting, control), {})(app=app)


def reinstall(app: Celery) -> None:
    """Install this package in an unpickled app. Celery calls this function as a fixup."""
    install(app)


def drop_pools(app: Celery) -> None:
    """Drop the app's pools: the app makes new ones for its next message."""
    app._pool = None
    if "amqp" in vars(app):
        app.amqp._producer_pool = None
    if "control" in vars(app):
        vars(app.control.mailbox).pop("producer_pool", None)


#: The apps with ``install(app)`` of this process.
_apps: WeakSet[Celery] = WeakSet()

#: Pools of the parent process. The child keeps them, because freeing a connection may close it.
_inherited: list[Any] = []


def _leave_pools_to_parent() -> None:
    """Let a forked child make its own pools for the brokers where messages can wait."""
    for group in (pools.producers, pools.connections):
        for key, pool in list(group.items()):
            connection = getattr(pool, "connections", pool).connection
            if OPTION in (connection.transport_options or {}):
                _inherited.append(dict.pop(group, key))
    for app in list(_apps):
        drop_pools(app)


in_forked_children(_leave_pools_to_parent)
