"""``expose(app)``: a collector in a registry, and the two threads that feed it."""

from __future__ import annotations

from celery import Celery
from prometheus_client import REGISTRY, CollectorRegistry

from ..app.installation import installed
from .collector import DelayCollector
from .listening import Counts, Listener
from .polling import Poll

POLL_SECONDS = 5.0


class Exposed:
    """Metrics that :func:`expose` has put into a registry; :meth:`close` takes them out."""

    def __init__(
        self, app: Celery, registry: CollectorRegistry, *, poll_seconds: float, listens: bool
    ) -> None:
        rated = installed(app).settings().rate_by_task
        self.counts = Counts(app.amqp.queues, rated)
        self._registry = registry
        poll = Poll(app, every_seconds=poll_seconds)
        listener = Listener(app, self.counts) if listens else None
        self._threads = [thread for thread in (poll, listener) if thread is not None]
        self._collector = DelayCollector(poll, self.counts, listener, rated)
        registry.register(self._collector)
        for thread in self._threads:
            thread.start()

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        """Take the metrics out of the registry and end the threads."""
        self._registry.unregister(self._collector)
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(timeout_seconds)


def expose(
    app: Celery,
    registry: CollectorRegistry = REGISTRY,
    *,
    poll_seconds: float = POLL_SECONDS,
    listens: bool = True,
) -> Exposed:
    """Put into *registry* what waits for *app*, and what workers with events on say came of it.

    Broker and records are read by a thread, so that collecting does no I/O; while they are away it
    says so, and goes on when they are back.

    Args:
        app: an installed app.
        poll_seconds: how often broker and records are read.
        listens: False where the caller receives events anyway, and hands those of the type
            ``delay-tally`` to ``.counts.hear(event)``.

    Raises:
        SettingsError: the app is not installed, or its settings are wrong.
        ValueError: it is exposed in this registry already.
    """
    return Exposed(app, registry, poll_seconds=poll_seconds, listens=listens)
