"""The worker's bootstep: prepares the broker and starts this package's threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

import celery.worker.consumer.delayed_delivery
import click
from celery import bootsteps
from celery.worker.consumer.tasks import Tasks

from ..app.beat import scheduler_class
from ..app.delay import adopt_rates
from ..app.installation import installation_of, keep_celerys_own_off
from ..app.retrying import teach_tasks
from ..app.schedules import schedule_records
from ..app.transactions import claims
from ..errors import NativeDelayError, NoStore, SettingsError, StoreUnavailable, described
from ..message import Delayed
from ..settings import DelaySettings
from ..transports.interface import Promoter, Wait, WorkerPart, lines_of
from .attendant import Attendant
from .gates import Revoked, gates
from .holding import Holding
from .in_time import in_time
from .once import Once, check_claims, let_claim
from .rating import Rated
from .scheduling import LeftToBeat, Scheduling
from .strategies import GatedStrategies, Waker
from .tally import Tallying
from .telemetry import Telemetry
from .unique import Unique

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds in which all threads of a worker that stops can end what they do.
_LAST_SECONDS = 5.0

# Workers decide here about Celery's own delayed delivery. ``worker.consumer.tasks`` calls the same
# function to choose the QoS mode, and must go on doing so.
keep_celerys_own_off(celery.worker.consumer.delayed_delivery)


def _move_tasks_of_raised_rates(app: Any) -> None:
    """Let waiting tasks run earlier, in a thread, if a deployment has raised their rate limit."""

    def adopt() -> None:
        if (change := _tried(partial(adopt_rates, app))) is not None:
            move = partial(_tried, change)
            Thread(target=move, name="native-delay-rates", daemon=True).start()

    with suppress(StoreUnavailable):  # it goes on in its thread
        in_time(adopt)


def _tried(step: Callable[[], T]) -> T | None:
    try:
        return step()
    except Exception as exc:  # of the store, or of a callable in ``overrides``
        logger.warning(
            "native delay: waiting tasks of a raised rate keep their old due times: %s",
            described(exc),
        )
        return None


class NativeDelay(bootsteps.StartStopStep):  # type: ignore[misc]
    """A bootstep that prepares the broker and starts this package's threads."""

    label = "NativeDelay"
    requires = (Tasks,)

    attendant_class = Attendant
    scheduling_class = Scheduling
    holding_class = Holding

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self._attendant: Attendant | None = None
        self._promoter: Promoter | None = None
        self._promoting: Thread | None = None
        self._waker: Waker | None = None
        self._telemetry: Telemetry | None = None
        installation = installation_of(c.app)
        if installation is None or not installation.enabled:
            return
        self._installation = installation
        asks = any(map(installation.has, ("rates", "schedules", "once")))
        if asks or any(getattr(task, "once", False) for task in c.app.tasks.values()):
            try:
                _check_records(c.app, installation.settings())
            except NativeDelayError as exc:
                if click.get_current_context(silent=True) is None:
                    raise
                raise click.ClickException(f"this worker does not start: {exc}") from exc
        try:
            settings = installation.settings()
        except SettingsError:
            settings = DelaySettings()  # start() logs the error
        teach_tasks(installation)  # before the pool forks
        let_claim(c.app)
        self._revoked = Revoked()
        self._tallying = Tallying(c, settings.rates_by_task)
        self._rated = Rated(settings, c.app.tasks) if settings.rates else None
        self._scheduling: Scheduling | None = None
        if settings.drains:
            self._scheduling = LeftToBeat(c.app, c.timer)
        elif settings.schedules:
            self._scheduling = self.scheduling_class(c.app, c.timer)
        once = Once(c.app, settings)
        self._holding = self.holding_class(
            (lambda _: ()) if self._rated is None else self._rated.keys_of
        )
        passed = gates(
            settings,
            revoked=self._revoked,
            scheduling=self._scheduling,
            holding=self._holding,
            rated=self._rated,
            once=once,
            unique=Unique(c.app),
        )

        def has_gates(task: str) -> bool:
            return self._rated is not None or once.concerns(task)

        def is_asked(task: str, delayed: Delayed | None) -> bool:
            return self._holding.concerns(task) or self._revoked.concerns(delayed)

        c.strategies = GatedStrategies(
            c, passed, self._put_back, self._tallying, has_gates, is_asked
        )
        c.on_task_request = c.strategies.taking(c.on_task_request)
        if settings.telemetry is not None:
            self._telemetry = Telemetry(installation, c, settings.telemetry)
            self._telemetry.connect()
            logger.info("native delay: telemetry goes to %s", self._telemetry.folder)
        # Import the transport before the pool forks, so that no child has to.
        _ = c.app.connection_for_write().transport

    def include_if(self, c: Any) -> bool:
        return hasattr(self, "_installation")

    def start(self, c: Any) -> None:
        """Prepare the broker for delayed tasks, and start this package's threads.

        A configuration or broker error is logged, not raised. Then the threads do not start, and
        early tasks wait in the worker's memory.
        """
        self._tallying.start()
        channel = c.connection.default_channel
        if hasattr(c.connection.transport, "waker"):
            c.strategies.wake = c.connection.transport.waker()
        if self._rated is not None:
            self._rated.begin(lines_of(channel, self._installation.settings()))
        if not hasattr(channel, "worker_part"):
            return
        where = c.connection.as_uri()
        try:
            settings = self._installation.settings()
            part: WorkerPart = channel.worker_part(settings)
            part.serve([queue.name for queue in c.task_consumer.queues])
            if self._rated is not None:
                self._rated.come_back_late_us = round(part.comes_back_late_seconds * 1_000_000)
            self._revoked.state = channel.state_of_revoked()
            with suppress(NoStore):
                self._revoked.runs = channel.records(settings)
            prepared = part.prepare(where)
            with suppress(NoStore):
                self._holding.begin(
                    schedule_records(channel, settings),
                    c,
                    patience_seconds=settings.store_timeout_seconds,
                )
        except (NativeDelayError, *c.connection.channel_errors) as exc:
            logger.critical(
                "native delay is OFF in this worker, only immediate tasks run: %s (%s)",
                exc,
                where,
            )
            return
        logger.info("native delay: %s", prepared)
        if self._attendant is None:
            self._attendant = self.attendant_class(c.app, settings)
            self._attendant.start()
            if self._rated is not None:
                _move_tasks_of_raised_rates(c.app)
        self._attendant.look_for_parked()
        if self._scheduling is not None:
            self._scheduling.start()
        if self._promoter is None:
            self._promoter = part.promoter(c.app.connection_for_write)
            if self._promoter is not None:
                self.begin_promoting(self._promoter)

    def begin_promoting(self, promoter: Promoter) -> None:
        """Start the thread that moves due messages to their queues."""
        name = "native-delay-promoter"
        self._promoting = Thread(target=promoter.run, name=name, daemon=True)
        self._promoting.start()

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Let other threads wake up the worker's event loop."""
        if self._waker is not None:
            self._waker.close()
        self._waker = Waker(hub)
        c.strategies.wake = self._waker.wake

    def _put_back(self, wait: Wait, done: Callable[[], Any], instead: Callable[[], Any]) -> bool:
        """Ask the attendant thread to return a message to the broker."""
        return self._attendant is not None and self._attendant.put_back(wait, done, instead)

    def stop(self, c: Any) -> None:
        self._tallying.stop()

    def shutdown(self, c: Any) -> None:
        end = monotonic() + _LAST_SECONDS
        for loop in (self._attendant, self._promoter):
            if loop is not None:
                loop.stop()
        for part in (self._scheduling, self._holding, self._waker, self._rated):
            if part is not None:
                part.close()
        self._tallying.shutdown()
        if self._telemetry is not None:
            self._telemetry.disconnect()
        for thread in (self._attendant, self._promoting):
            if thread is not None:
                thread.join(max(0.0, end - monotonic()))


def _check_records(app: Any, settings: DelaySettings) -> None:
    """Raise NoStore if rate limits, schedules or ``once`` need ``native_delay_store`` here.

    Raises SettingsError if schedules cannot read the entries of ``beat_scheduler``.
    """
    schedules = settings.schedules and not settings.drains
    if schedules:
        scheduler_class(app)
    # If a worker failed later, Celery's start_worker would hang.
    with app.connection_for_read() as connection:
        try:
            connection.connect()
        except connection.connection_errors:
            return
        if settings.rates:
            lines_of(connection.default_channel, settings).close()
        is_once = settings.once or any(getattr(task, "once", False) for task in app.tasks.values())
        if schedules or is_once:
            schedule_records(connection.default_channel, settings)
        if any(map(claims, app.tasks.values())):
            check_claims(app, connection.default_channel.needed_store)
