"""The worker's part: declare and bind on boot and reconnect, adopt, rescue."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import celery.worker.consumer.delayed_delivery
from amqp.exceptions import ChannelError
from celery import bootsteps, signals
from celery.worker.consumer.tasks import Tasks

from ..core.errors import NativeDelayError
from ..kombu_hook import flush_delayed
from .adoption import AdoptingStrategies, EarlyTask, Waker, is_due
from .attendant import Attendant
from .install import installation_of, keep_celerys_own_off

logger = logging.getLogger(__name__)

#: Seconds that the end of a pool process is put off for what is not confirmed; Celery waits longer.
CHILD_FLUSH_SECONDS = 5.0

# The other place where Celery asks; ``worker.consumer.tasks`` asks the same function for the QoS
# mode and keeps it.
keep_celerys_own_off(celery.worker.consumer.delayed_delivery)


class NativeDelay(bootsteps.StartStopStep):  # type: ignore[misc]
    """Declares the delay levels, binds the worker's queues, takes in what comes too early."""

    label = "NativeDelay"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self._attendant: Attendant | None = None
        self._waker: Waker | None = None
        if self.include_if(c):
            c.strategies = AdoptingStrategies(c, self._adopt)

    def include_if(self, c: Any) -> bool:
        installation = installation_of(c.app)
        return installation is not None and installation.enabled

    def start(self, c: Any) -> None:
        """Prepare the consumer's broker; a failure is named and leaves immediate tasks alone."""
        delays = getattr(c.connection.default_channel, "delays", None)
        if delays is None:
            return
        where = c.connection.as_uri()
        try:
            prepared = delays.prepare(consuming=True)
        except (NativeDelayError, ChannelError) as exc:
            logger.critical(
                "native delay is OFF in this worker, immediate tasks run as ever: %s (%s)",
                exc,
                where,
            )
            return
        settings = delays.settings
        logger.info(
            "native delay: %d %s levels of %g s on %s, %s in %.0f ms; %d bindings; "
            "longest delay %.0f days; adopting %s%s",
            settings.levels,
            settings.queue_type,
            settings.resolution,
            where,
            "declared" if prepared.declared else "found declared",
            prepared.seconds * 1000,
            delays.mirror.known_count,
            settings.longest_delay_seconds / 86400,
            "on" if settings.adopt else "off",
            "; classic levels may lose what hops while the broker crashes"
            if settings.queue_type == "classic"
            else "",
        )
        if self._attendant is None:
            installation = installation_of(c.app)
            assert installation is not None
            self._attendant = Attendant(c.app, installation.settings())
            self._attendant.start()
        self._attendant.look_for_parked()

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Called for every new connection, after the hub forgot the readers of the last."""
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        if not hasattr(hub, "_waker"):
            self._waker = Waker(hub)
            c.strategies.wake = self._waker.wake

    def _adopt(self, task: EarlyTask) -> bool:
        """Hand a task that came too early to the attendant; False if nobody can take it."""
        attendant = self._attendant
        return attendant is not None and attendant.settings.adopt and attendant.adopt(task)

    def shutdown(self, c: Any) -> None:
        """The worker ends; what was not put back yet is redelivered by the broker."""
        if self._attendant is not None:
            self._attendant.stop()
            self._attendant = None


@signals.task_received.connect(weak=False)  # type: ignore[untyped-decorator]
def forget_eta_when_due(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Keep a due task out of the worker's ETA timer, which costs prefetch and throughput.

    ``task.request.eta`` still tells the user's code the original.
    """
    eta = request.eta
    if eta is None or installation_of(sender.app) is None:
        return
    if is_due(request.message, eta, datetime.now(UTC)):
        request._eta = None


@signals.worker_process_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def flush_at_the_end_of_a_child(**_: Any) -> None:
    """Pool processes end without what Python does at exit."""
    try:
        flush_delayed(timeout_seconds=CHILD_FLUSH_SECONDS)
    except (NativeDelayError, TimeoutError) as exc:
        logger.critical("native delay: a pool process ends with delayed messages lost: %s", exc)
