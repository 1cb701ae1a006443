"""The worker's part: prepare the broker on boot and reconnect, adopt, rescue, promote."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial
from threading import Thread
from typing import Any

import celery.worker.consumer.delayed_delivery
from celery import bootsteps, signals
from celery.platforms import EX_FAILURE
from celery.worker import state
from celery.worker.consumer.tasks import Tasks

from ..app import remote  # noqa: F401  registers its command
from ..app.install import Installation, installation_of, keep_celerys_own_off
from ..errors import NativeDelayError, SettingsError
from ..transports.aliases import flush_delayed
from ..transports.interface import (
    GivesUp,
    KeepsLedger,
    Outage,
    Promoter,
    Promotes,
    Receipts,
    ServesQueues,
    WorkerPart,
)
from .adoption import AdoptingStrategies, EarlyTask, Waker, forget_eta
from .attendant import Attendant
from .fencing import Fence, Guard, NoFence
from .outage import react
from .tallying import Tallying
from .telemetry import Telemetry

logger = logging.getLogger(__name__)

#: Seconds that the end of a pool process is put off for what is not confirmed; Celery waits longer.
CHILD_FLUSH_SECONDS = 5.0

# The other place where Celery asks; ``worker.consumer.tasks`` asks the same function for the QoS
# mode and keeps it.
keep_celerys_own_off(celery.worker.consumer.delayed_delivery)


class NativeDelay(bootsteps.StartStopStep):  # type: ignore[misc]
    """Prepares the worker's broker, takes in what comes too early, promotes where it must."""

    label = "NativeDelay"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self._attendant: Attendant | None = None
        self._promoter: Promoter | None = None
        self._promoting: Thread | None = None
        self._waker: Waker | None = None
        self._telemetry: Telemetry | None = None
        self._receipts: Receipts | None = None
        self._fence: Guard = NoFence()
        self._tallying: Tallying | None = None
        installation = installation_of(c.app)
        if installation is not None and installation.enabled:
            self._fence = self._fence_of(c, installation)
            self._tallying = Tallying(c)
            c.strategies = AdoptingStrategies(
                c,
                self._adopt,
                self._fence.admits,
                receipts=lambda: self._receipts,
                waits=_nobody if _runs_unasked(installation) else self._put_back,
                watching=self._tallying.watching,
                expired=self._tallying.expired,
            )
            self._write_telemetry(c, installation)
            # What a transport imports, the processes of the pool need not import once more.
            _ = c.app.connection_for_write().transport

    def include_if(self, c: Any) -> bool:
        installation = installation_of(c.app)
        return installation is not None and installation.enabled

    def start(self, c: Any) -> None:
        """Prepare the consumer's broker; a failure is named and leaves immediate tasks alone."""
        if self._tallying is not None:
            self._tallying.start()
        channel = c.connection.default_channel
        installation = installation_of(c.app)
        if installation is None or not hasattr(channel, "worker_part"):
            return
        where = c.connection.as_uri()
        try:
            settings = installation.settings()
            part: WorkerPart = channel.worker_part(settings)
            if isinstance(part, ServesQueues):
                part.serve([queue.name for queue in c.task_consumer.queues])
            prepared = part.prepare(where)
            if self._receipts is None and isinstance(part, KeepsLedger):
                self._receipts = part.receipts()
        except (NativeDelayError, *c.connection.channel_errors) as exc:
            logger.critical(
                "native delay is OFF in this worker, immediate tasks run as ever: %s (%s)",
                exc,
                where,
            )
            return
        logger.info("native delay: %s", prepared)
        if self._attendant is None:
            self._attendant = Attendant(c.app, settings)
            self._attendant.start()
        self._attendant.look_for_parked()
        if self._promoter is None and isinstance(part, Promotes):
            self._promoter = part.promoter(c.app.connection_for_write)
            if isinstance(self._promoter, GivesUp):
                self._promoter.on_outage = partial(self._stop_worker, c)
            self._promoting = Thread(
                target=self._promoter.run, name="native-delay-promoter", daemon=True
            )
            self._promoting.start()

    @staticmethod
    def _stop_worker(c: Any, outage: Outage) -> None:
        def stop_warmly() -> None:
            state.should_stop = EX_FAILURE
            c.strategies.wake()

        react(c.app, outage, stop_warmly)

    def _fence_of(self, c: Any, installation: Installation) -> Guard:
        try:
            settings = installation.settings()
        except SettingsError:
            return NoFence()  # start() reports it
        return NoFence() if settings.fence is None else Fence(c, settings, self._put_back)

    def _write_telemetry(self, c: Any, installation: Installation) -> None:
        try:
            folder = installation.settings().telemetry
        except SettingsError:
            return  # start() reports it
        if folder is not None:
            self._telemetry = Telemetry(installation, c, folder)
            self._telemetry.connect()
            logger.info("native delay: telemetry goes to %s", self._telemetry.folder)

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

    def _put_back(self, task: EarlyTask) -> bool:
        """Have a task wait in the broker again, whoever asks; False if nobody can see to it."""
        return self._attendant is not None and self._attendant.adopt(task)

    def stop(self, c: Any) -> None:
        """The connection goes."""
        if self._tallying is not None:
            self._tallying.stop()

    def shutdown(self, c: Any) -> None:
        """The worker ends; what was not put back yet is redelivered by the broker."""
        self._fence.stop()
        if self._tallying is not None:
            self._tallying.shutdown()
            self._tallying = None
        if self._telemetry is not None:
            self._telemetry.disconnect()
            self._telemetry = None
        if self._receipts is not None:
            self._receipts.close()
            self._receipts = None
        if self._attendant is not None:
            self._attendant.stop()
            self._attendant = None
        if self._promoter is not None and self._promoting is not None:
            self._promoter.stop()
            self._promoting.join(5.0)
            self._promoter = self._promoting = None


def _nobody(task: EarlyTask) -> bool:
    return False


def _runs_unasked(installation: Installation) -> bool:
    try:
        return installation.settings().ledger_away == "run"
    except SettingsError:
        return True  # start() reports it


@signals.task_received.connect(weak=False)  # type: ignore[untyped-decorator]
def forget_eta_when_due(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Keep a due task out of the worker's ETA timer, which costs prefetch and throughput."""
    if installation_of(sender.app) is not None:
        forget_eta(request, datetime.now(UTC))


@signals.worker_process_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def flush_at_the_end_of_a_child(**_: Any) -> None:
    """Pool processes end without what Python does at exit."""
    try:
        flush_delayed(timeout_seconds=CHILD_FLUSH_SECONDS)
    except (NativeDelayError, TimeoutError) as exc:
        logger.critical("native delay: a pool process ends with delayed messages lost: %s", exc)
