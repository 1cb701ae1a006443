"""Wrappers of Celery's task strategies, which check each received task before the task runs.

Only this module acknowledges messages, returns messages to the broker, and gives messages to
Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from socket import socketpair
from threading import Thread, Timer
from typing import Any

from celery import signals, states
from celery.app.task import Context
from celery.exceptions import InvalidTaskError, TaskRevokedError
from celery.utils.log import get_logger
from celery.worker import state
from kombu.exceptions import ContentDisallowed, DecodeError

from ..due_time import due_us_or_none
from ..keyed.record import HEADER as KEY
from ..message import ONCE, Delayed
from ..now import time_ns
from ..records.waiting import HELD, RUN
from ..schedules.state import BEAT_TASK
from ..schedules.state import HEADER as OCCURRENCE
from ..transports.interface import Wait
from .arrival import (
    CLOCK_SKEW_US,
    Announce,
    Arrival,
    AskAgain,
    Drop,
    Gate,
    Ruling,
    WaitUntil,
)
from .once import free_taken
from .tally import Tallying
from .unique import never_runs, rejected

#: Ids of cancelled tasks until they are announced; True if we added them to Celery's revoked list.
_cancelled: dict[str, bool] = {}


def list_as_revoked(request: Any) -> None:
    """Add a cancelled task to Celery's revoked list, so that the task does not run."""
    # https://github.com/celery/celery/blob/v5.5.0/celery/worker/request.py#L711
    if request.id in _cancelled and request.id not in state.revoked:
        _cancelled[request.id] = True
        state.revoked.add(request.id)


@signals.task_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
def unlist_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Remove a cancelled task from Celery's revoked list, and revoke the task's chained tasks."""
    # Celery would leave the chained tasks, and a chord of the chain, pending for ever.
    listed_by_us = None if request is None else _cancelled.pop(request.id, None)
    if listed_by_us is None:
        return
    if listed_by_us:
        state.revoked.discard(request.id)
    if request.chain:
        alone = Context(vars(request))
        alone.chord = None  # the chord knows already
        sender.backend.mark_as_failure(
            request.id,
            TaskRevokedError("revoked"),
            request=alone,
            store_result=not request.ignore_result,
            call_errbacks=False,
            state=states.REVOKED,
        )


logger = get_logger(__name__)

#: Seconds for which a task waits in the broker after a gate (a check of the task) raised an error.
FAULT_SECONDS = 5.0


@dataclass(eq=False)
class _Task:
    """A received task before it runs. *run* gives the task to Celery."""

    arrival: Arrival
    payload: Any
    run: Callable[[], Any]
    ack: Callable[..., Any]


class GatedStrategies(dict[str, Any]):
    """A dict of Celery's task strategies, which check each task before the task runs."""

    def __init__(
        self,
        consumer: Any,
        gates: tuple[Gate, ...],
        put_back: Callable[[Wait, Callable[[], Any], Callable[[], Any]], bool],
        tallying: Tallying,
        has_gates: Callable[[str], bool] = lambda _: True,
        is_asked: Callable[[str, Delayed | None], bool] = lambda *_: False,
    ) -> None:
        """*has_gates* tells if some gate asks about each task of a name; *is_asked*, if now."""
        super().__init__()
        self._consumer = consumer
        self._gates = gates
        self._put_back = put_back
        self.tallying = tallying
        self._has_gates = has_gates
        self._is_asked = is_asked
        self.wake: Callable[[], Any] = lambda: None

    def __setitem__(self, name: str, strategy: Callable[..., Any]) -> None:
        has_gates = self._has_gates(name)

        def on_task(
            message: Any, payload: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any
        ) -> None:
            fields = payload if isinstance(payload, dict) else message.headers
            delayed: Delayed | None = getattr(message, "native_delay", None)
            unasked = not has_gates and fields.keys().isdisjoint(_READ)
            if unasked and not self._is_asked(name, delayed):
                if delayed is None and not fields.get("eta"):
                    strategy(message, payload, ack, reject, callbacks, **kwargs)
                    return
                if delayed is not None and _is_due(delayed, message, fields):
                    with _without_eta(message, fields):
                        strategy(message, payload, ack, reject, callbacks, **kwargs)
                    return
            arrival = Arrival(message, fields, self._consumer, time_ns() // 1000)
            freeing = partial(self._reject, arrival, reject)
            run = partial(strategy, message, payload, ack, freeing, callbacks, **kwargs)
            self._pass(_Task(arrival, payload, run, ack))

        super().__setitem__(name, on_task)

    def taking(self, on_task_request: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return Celery's function that gives a request to the pool, with what this package adds.

        A receiver of the signal ``task_received`` would cost each task of the app 2 µs.
        """

        def take(request: Any) -> Any:
            message = request.message
            if getattr(message, "kept_eta", None) is not None:
                request.request_dict["eta"] = message.kept_eta
            if _cancelled:
                list_as_revoked(request)
            self.tallying.received(request)
            return on_task_request(request)

        return take

    def _pass(self, task: _Task, first: int = 0) -> None:
        """Apply a task's checks from index *first*; run the task if all checks pass."""
        for number, gate in enumerate(self._gates[first:], first):
            try:
                ruling = gate(task.arrival)
            except (InvalidTaskError, ContentDisallowed, DecodeError):
                raise
            except Exception:  # it would end this worker, and the next one that gets the message
                name, task_id = task.arrival.name, task.arrival.id
                logger.exception("native delay: a bug in a gate, task %s[%s] waits", name, task_id)
                delayed, fault_us = task.arrival.delayed, round(FAULT_SECONDS * 1e6)
                ruling = WaitUntil(
                    task.arrival.now_us + fault_us,
                    None if delayed is None else delayed.delivery_id,
                    AskAgain(FAULT_SECONDS),
                )
            if ruling is not None:
                if isinstance(ruling, Drop | WaitUntil) and task.arrival.has_headers:
                    free_taken(task.arrival)
                self._carry_out(ruling, task, number)
                return
        self._run(task)

    def _carry_out(self, ruling: Ruling, task: _Task, number: int) -> None:
        arrival = task.arrival
        match ruling:
            case Drop():
                self._drop(task, ruling)
            case Announce():
                _cancelled.setdefault(arrival.id, False)
                self._run(task)
            case AskAgain():
                qos = self._consumer.qos if ruling.beside_prefetch else None
                if qos is not None:
                    qos.increment_eventually()
                first = number if ruling.from_here else 0
                again = partial(self._soon, self._ask_again, task, first, qos)
                ask = partial(self._after, ruling.after_seconds, again)
                if ruling.begin_when is not None and not ruling.after_seconds:
                    ask = again  # which any thread may call
                _ = ask() if ruling.begin_when is None else ruling.begin_when(ask)
            case WaitUntil():
                wait = Wait(
                    arrival.message,
                    arrival.queue,
                    ruling.due_us,
                    ruling.delivery_id,
                    ruling.headers,
                    ruling.in_broker,
                )
                done = partial(self._ack_soon, arrival)
                instead = partial(self._instead_of_waiting, ruling, task, number)
                if not wait.queue or not self._put_back(wait, done, partial(self._soon, instead)):
                    instead()

    # --- in the consumer's thread ------------------------------------------------------------

    def _run(self, task: _Task) -> None:
        arrival = task.arrival
        message, fields = arrival.message, arrival.fields
        if arrival.delayed is None:
            eta_us = due_us_or_none(fields.get("eta"))
            is_due = eta_us is not None and eta_us <= arrival.now_us
        else:
            is_due = bool(fields.get("eta")) and not arrival.is_early
            self.tallying.passing = message
        try:
            with _without_eta(message, fields) if is_due else nullcontext():
                task.run()
        finally:
            self.tallying.passing = None

    def _drop(self, task: _Task, ruling: Drop) -> None:
        arrival, consumer = task.arrival, self._consumer
        logger.info(
            "native delay: task %s[%s] is dropped: %s", arrival.name, arrival.id, ruling.why
        )
        if ruling.expired:
            self.tallying.expired(arrival.message)
            never_runs(consumer, arrival.fields, arrival.id)
        dispatcher = consumer.event_dispatcher if ruling.event else None
        if dispatcher is not None and dispatcher.enabled:
            dispatcher.send(ruling.event, uuid=arrival.id, name=arrival.name, **ruling.fields)
        ack = arrival.message.ack_log_error if self._is_green else task.ack
        ack(logger, consumer.connection_errors)
        self.wake()

    def _reject(
        self, arrival: Arrival, reject: Callable[..., Any], log: Any, errors: Any, requeue: bool
    ) -> None:
        """Free the locks of a message that Celery rejects, then reject the message."""
        rejected(self._consumer.app, arrival.id, requeue=requeue)
        reject(log, errors, requeue)

    def _ask_again(self, task: _Task, first: int, qos: Any) -> None:
        if qos is not None:
            qos.decrement_eventually()
        self._resume(replace(task, arrival=replace(task.arrival, now_us=time_ns() // 1000)), first)

    def _instead_of_waiting(self, ruling: WaitUntil, task: _Task, number: int) -> None:
        if ruling.otherwise is None:
            self._resume(task, number + 1)
        else:
            self._carry_out(ruling.otherwise, task, number)

    def _resume(self, task: _Task, first: int) -> None:
        """Check a task again; pass invalid and undecodable messages to Celery's error handlers."""
        if not task.arrival.is_connected:
            return
        consumer, message = self._consumer, task.arrival.message
        try:
            self._pass(task, first)
        except (InvalidTaskError, ContentDisallowed) as exc:
            consumer.on_invalid_task(task.payload, message, exc)
        except DecodeError as exc:
            consumer.on_decode_error(message, exc)

    # --- from any thread ---------------------------------------------------------------------

    def _ack_soon(self, arrival: Arrival) -> None:
        """Acknowledge a message in the consumer's thread."""
        consumer = self._consumer

        def acknowledge() -> None:
            if arrival.is_connected:
                arrival.message.ack_log_error(logger, consumer.connection_errors)

        # Celery's own callback runs one loop later, and does not wake up the event loop.
        self._call(getattr(consumer, "call_soon_ack", consumer.call_soon), acknowledge)

    def _after(self, seconds: float, call: Callable[[], Any]) -> None:
        # Celery's timer, if it is a thread, may be up to a second late.
        if not isinstance(self._consumer.timer, Thread):
            self._consumer.timer.call_after(seconds, call)
            return
        timer = Timer(seconds, call)
        timer.daemon = True
        timer.start()

    def _soon(self, call: Callable[..., Any], *args: Any) -> None:
        self._call(self._consumer.call_soon, call, *args)

    def _call(self, call_soon: Callable[..., Any], call: Callable[..., Any], *args: Any) -> None:
        """Call a function in the consumer's thread; with greenlets, call the function at once."""
        # With greenlets call_soon() may be 2 s late.
        if self._is_green:
            call(*args)
        else:
            call_soon(call, *args)
        self.wake()

    @property
    def _is_green(self) -> bool:
        consumer = self._consumer
        return consumer.hub is None and getattr(consumer.pool, "is_green", False)


#: The headers that gates read, apart from ``eta`` and ``expires``.
_READ = frozenset((KEY, ONCE, OCCURRENCE, BEAT_TASK, RUN, HELD))


def _is_due(delayed: Delayed, message: Any, fields: Mapping[str, Any]) -> bool:
    """Return True if a message that waited passes all gates that do not ask by its headers."""
    if delayed.cancelled or delayed.expires_ms is not None or fields is not message.headers:
        return False
    eta_us = None if fields.get("expires") else due_us_or_none(fields.get("eta"))
    return eta_us is not None and eta_us <= time_ns() // 1000 + CLOCK_SKEW_US


@contextmanager
def _without_eta(message: Any, fields: Any) -> Iterator[None]:
    """Let Celery run a due task without its ETA timer; ``task.request.eta`` does not change."""
    message.kept_eta = fields.pop("eta")
    try:
        yield
    finally:
        fields["eta"] = message.kept_eta


class Waker:
    """Wakes up a worker's event loop, so that new callbacks run at once."""

    # kombu 5.7 does not wake up its event loop for callbacks that a timer adds. These callbacks may
    # be a second late without a Waker.

    def __init__(self, hub: Any) -> None:
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        hub.add_reader(self._reader, self._drain)

    def wake(self) -> None:
        """Wake up the event loop, so that its poll() returns now."""
        with suppress(OSError):  # the socket is full, so the loop is awake
            self._writer.send(b"\0")

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _drain(self) -> None:
        with suppress(OSError):
            self._reader.recv(4096)
