"""Replaces an app's broker by a broker in memory for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import celery._state
from celery.app import backends
from celery.backends.base import DisabledBackend
from celery.backends.cache import CacheBackend
from celery.states import PENDING
from celery.worker import state
from kombu import pools
from kombu.transport import memory, virtual

from ..app.install import drop_pools
from ..app.installation import Installation
from ..store.opened import forget_store
from ..worker.leases import forget_leases

#: Settings of Celery during the test. Eager tasks would not wait.
_CELERY: dict[str, Any] = {
    "broker_transport": None,
    "broker_transport_options": {},
    "broker_use_ssl": False,
    "task_always_eager": False,
}

#: Attributes of tasks that a starting worker changes.
_CHANGED = ("__trace__", "run", "_orig_run")


@contextmanager
def in_memory(app: Any, installation: Installation) -> Iterator[None]:
    """Let *app* use a new in-memory broker and SQLite file within the ``with`` block."""
    with ExitStack() as undo:
        folder = undo.enter_context(TemporaryDirectory(prefix="native-delay-clock-"))
        store = f"sqlite:///{Path(folder).absolute() / 'store.db'}"
        undo.enter_context(_settings(app, installation, store))
        # kombu's in-memory transport begins with empty queues.
        undo.enter_context(_replaced(memory.Channel, "queues", {}))
        undo.enter_context(_replaced(memory.Transport, "global_state", virtual.BrokerState()))
        undo.enter_context(_results(app))
        undo.enter_context(_tasks(app))
        undo.enter_context(_replaced(celery._state._tls, "current_app", app))
        undo.enter_context(_worker_state())
        undo.callback(forget_leases, app)
        forget_leases(app)
        yield


@contextmanager
def _settings(app: Any, installation: Installation, store: str) -> Iterator[None]:
    app.conf.get("broker_url")  # loads a pending configuration
    conf, overlay, keywords = app.conf, dict(_CELERY), installation.keywords
    changes = dict(conf.changes)
    namespace = installation.settings().namespace
    conf.maps.insert(0, overlay)
    installation.test_broker = "memory://localhost"
    installation.keywords = keywords | {
        "enabled": True,
        "store": store,
        "store_tasks": ("*",),
        "telemetry": None,
    }
    drop_pools(app)
    try:
        yield
    finally:
        _close_pools(app)
        forget_store(store, namespace)
        installation.keywords, installation.keys = keywords, None
        installation.test_broker = None
        conf.changes.clear()  # the test may have called install()
        conf.changes.update(changes)
        conf.maps[:] = [mapping for mapping in conf.maps if mapping is not overlay]
        drop_pools(app)


def _close_pools(app: Any) -> None:
    connection = app.connection_for_write()
    for group in (pools.producers, pools.connections):
        pool = group.pop(connection, None)
        if pool is not None:
            pool.force_close_all()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    earlier = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, earlier)


class _Results(CacheBackend):  # type: ignore[misc]
    """A result backend in memory, which gives a chord's body its header's results.

    A header task with ``ignore_result`` counts, too, as with Celery's Redis backend.
    """

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        if self.get_state(request.id) == PENDING:
            self.store_result(request.id, result, state)
        super().on_chord_part_return(request, state, result, **kwargs)

    # Groups are kept as they are: after each part of a chord, Celery would decode all parts.

    @cached_property
    def _groups(self) -> dict[str, Any]:
        return {}

    def _save_group(self, group_id: str, result: Any) -> Any:
        self._groups[group_id] = result
        return result

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        result = self._groups.get(group_id)
        return None if result is None else {"result": result}

    def _delete_group(self, group_id: str) -> None:
        self._groups.pop(group_id, None)


@contextmanager
def _results(app: Any) -> Iterator[None]:
    """Replace the app's result backend, if any, by an in-memory backend within the block."""
    earlier = app._backend_cache
    # Not app.backend: a new backend in a database connects to it.
    own, _ = backends.by_url(app.backend_cls or app.conf.result_backend, app.loader)
    if not issubclass(own, DisabledBackend):
        app._backend_cache = _Results(app=app, url="memory://")
    try:
        yield
    finally:
        app._backend_cache = earlier


@contextmanager
def _tasks(app: Any) -> Iterator[None]:
    app.loader.import_default_modules()
    app.finalize()
    changed = [vars(task) for task in app.tasks.values()]
    before = [{name: own[name] for name in _CHANGED if name in own} for own in changed]
    queues = app.amqp.queues
    consumed, known = queues._consume_from, set(queues)
    try:
        yield
    finally:
        queues._consume_from = consumed
        for name in queues.keys() - known:
            del queues[name]
        for own, earlier in zip(changed, before, strict=True):
            for name in _CHANGED:
                own.pop(name, None)
            own.update(earlier)


@contextmanager
def _worker_state() -> Iterator[None]:
    """Restore Celery's sets of revoked and started tasks after the ``with`` block."""
    known: Any = (state.revoked, state.reserved_requests, state.active_requests)
    before = [set(each) for each in known]
    try:
        yield
    finally:
        for each, earlier in zip(known, before, strict=True):
            for new in set(each) - earlier:
                each.discard(new)
