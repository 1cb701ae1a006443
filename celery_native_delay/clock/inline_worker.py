"""A Celery worker without threads, for the test clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from os import getpid
from time import monotonic
from types import SimpleNamespace
from typing import Any, ClassVar

from celery.concurrency.base import BasePool
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.consumer import Consumer

from ..app import holds
from ..now import time_ns
from ..transports.interface import Promoter, Wait
from ..worker.attendant import Attendant, Task
from ..worker.bootsteps import NativeDelay
from ..worker.holding import Holding
from ..worker.scheduling import Scheduling

#: The largest number of unacknowledged messages: Celery's default for one process.
PREFETCH_COUNT = 4


class InlineWorker:
    """A Celery worker without threads: the test clock calls :meth:`step` for each message."""

    def __init__(self, app: Any) -> None:
        self.timer = InlineTimer()
        self.pool = InlinePool(app=app)
        self._consumer = InlineConsumer(
            self._start_task,
            app=app,
            hostname="test-clock",
            pool=self.pool,
            timer=self.timer,
            controller=SimpleNamespace(state=state, semaphore=None),
            initial_prefetch_count=PREFETCH_COUNT,
            # Celery's rate_limit counts by a clock that no test can move.
            disable_rate_limits=True,
            task_events=False,
            without_mingle=True,
            without_gossip=True,
            without_heartbeat=True,
        )
        self._consumer.blueprint.start(self._consumer)
        steps = [step for step in self._consumer.steps if isinstance(step, InlineNativeDelay)]
        self.promoter: Any = steps[0].promoter
        self.holding: Any = steps[0]._holding
        self._tasks = self._consumer.task_consumer
        self._tasks.on_message = self._consumer.create_task_handler()
        self._tasks.consume()

    @property
    def started(self) -> int:
        """The number of tasks that have started."""
        return self.pool.started

    def step(self) -> bool:
        """Run pending callbacks and handle one message; return False if nothing happened."""
        consumer = self._consumer
        if consumer.qos.prev != consumer.qos.value:
            consumer.qos.update()
        has_work = bool(consumer._pending_operations)
        consumer.perform_pending_operations()
        if consumer.strategies.keys() != consumer.app.tasks.keys():
            consumer.update_strategies()  # the test has defined a task
        for name in list(consumer.app.amqp.queues):
            if not self._tasks.consuming_from(name):
                consumer.add_task_queue(name)
        try:
            consumer.connection.drain_events(timeout=0)
        except TimeoutError:
            return has_work
        return True

    def has_messages(self) -> bool:
        """Return True if any queue of the app contains a message."""
        channel = self._consumer.connection.default_channel
        return any(channel._size(name) for name in self._consumer.app.amqp.queues)

    def deliver_due(self) -> None:
        """Run the due timer calls, and move due messages to their queues."""
        self.holding.look()  # a task may have held others
        self.timer.run_due()
        self.promoter.publish_due()

    def stop(self) -> None:
        """Close the worker's connection, and requeue the unacknowledged messages."""
        self._consumer.blueprint.stop(self._consumer)
        self._consumer.shutdown()

    def _start_task(self, request: Any) -> None:
        with suppress(TaskRevokedError):  # Celery has announced it
            request.execute_using_pool(self.pool)


class InlinePool(BasePool):  # type: ignore[misc]
    """A worker pool that runs each task at once, in the test's thread."""

    def __init__(self, app: Any) -> None:
        super().__init__(limit=1, app=app)
        self.started = 0

    @property
    def num_processes(self) -> int:
        """The number of reserved requests plus one, so that one process is always free."""
        return 1 + len(state.reserved_requests)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        callback: Any = None,
        accept_callback: Any = None,
        **_: Any,
    ) -> None:
        self.started += 1
        accept_callback(getpid(), monotonic())
        callback(target(*args, app=self.app, **(kwargs or {})))


class InlineTimer:
    """The worker's timer, controlled by the test clock."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Callable[[], Any]]] = []
        self._number = count()

    def next_us(self) -> int | None:
        """Return the epoch microseconds of the next timer call; None if no call is planned."""
        return self._entries[0][0] if self._entries else None

    def run_due(self) -> None:
        while self._entries and self._entries[0][0] <= time_ns() // 1000:
            heappop(self._entries)[2]()

    def call_after(self, secs: float, fun: Any, args: Any = (), *_: Any, **__: Any) -> None:
        at_us = time_ns() // 1000 + round(secs * 1_000_000)
        heappush(self._entries, (at_us, next(self._number), lambda: fun(*args)))

    def call_at(self, at: float, fun: Any, args: Any = (), *_: Any, **__: Any) -> None:
        """Call *fun* at the monotonic time *at*; Celery computes this time from an ETA."""
        self.call_after(at - monotonic(), fun, args)

    def call_repeatedly(self, *_: Any, **__: Any) -> Any:
        """Do nothing: a test needs no repeated calls."""
        return SimpleNamespace(cancel=lambda: None)

    def cancel(self, entry: Any) -> None:
        """Do nothing: Celery calls this only after a lost connection, which a test never has."""

    def clear(self) -> None:
        """Remove all timer calls; Celery 5.5 does this when a worker stops."""
        self._entries.clear()


class InlineAttendant(Attendant):
    """Requeues tasks that arrive before their due time, in the test's thread."""

    def start(self) -> None: ...

    def look_for_parked(self) -> None: ...

    def put_back(self, wait: Wait, done: Callable[[], Any], instead: Callable[[], Any]) -> bool:
        return not self._put_back([Task(wait, done, instead)])

    def stop(self) -> None:
        self._disconnect()

    def join(self, timeout: float | None = None) -> None: ...


class InlineScheduling(Scheduling):
    """Publishes the tasks of schedule entries in the test's thread."""

    def in_thread(self, job: Callable[[], object]) -> None:
        job()


class InlineHolding(Holding):
    """Reads the holds after each change by the test or by one of its tasks."""

    _changes = 0

    def look(self) -> None:
        if self._state is not None and self._changes != holds.changes:
            self._changes = holds.changes
            self._read(lambda look: look())


class InlineNativeDelay(NativeDelay):
    """The worker bootstep of this package, without threads."""

    attendant_class = InlineAttendant
    scheduling_class = InlineScheduling
    holding_class = InlineHolding
    promoter: Promoter | None = None

    def begin_promoting(self, promoter: Promoter) -> None:
        self.promoter = promoter


class InlineConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer without the app's custom bootsteps."""

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        default_steps: ClassVar = [InlineNativeDelay]

        def __init__(self, steps: Any = None, **options: Any) -> None:
            super().__init__(None, **options)
