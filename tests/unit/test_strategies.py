"""A worker's strategies, which carry out the rulings of the gates on each task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import InvalidTaskError
from celery.worker import state
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer as KombuTimer

from celery_native_delay.due_time import due_us
from celery_native_delay.message import Delayed
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.interface import Wait
from celery_native_delay.worker import strategies
from celery_native_delay.worker.arrival import (
    Arrival,
    AskAgain,
    Drop,
    Gate,
    Ruling,
    WaitUntil,
)
from celery_native_delay.worker.gates import Revoked, gates
from celery_native_delay.worker.strategies import GatedStrategies, Waker, forget_eta
from celery_native_delay.worker.tally import Tallying

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def delayed(expires_ms: int | None = None) -> Delayed:
    return Delayed("id-1", due_us=0, exchange="", routing_key="celery", expires_ms=expires_ms)


# ---- a request's ETA ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "early_seconds", "due"),
    [
        (SimpleNamespace(native_delay=None), 0, True),
        (SimpleNamespace(native_delay=None), -60, True),
        (SimpleNamespace(native_delay=None), 0.001, False),
        (SimpleNamespace(native_delay=delayed()), 0, True),
        (SimpleNamespace(native_delay=delayed()), 0.5, True),
        (SimpleNamespace(native_delay=delayed()), 1, True),
        (SimpleNamespace(native_delay=delayed()), 1.001, False),
        (SimpleNamespace(), 0.5, False),  # another transport's message
    ],
)
def test_a_message_that_waited_is_due_up_to_a_second_early(
    message: Any, early_seconds: float, due: bool
) -> None:
    """The clocks of producer and worker may differ.

    A message that did not wait is never due early.
    """
    eta = NOON + timedelta(seconds=early_seconds)
    request = SimpleNamespace(message=message, eta=eta, _eta=eta)
    forget_eta(request, NOON)
    assert request._eta == (None if due else eta)


def test_celery_gets_a_task_that_waited_without_its_eta_and_the_user_with_it() -> None:
    """Celery would parse the ETA for a timer. The user's code still sees it."""
    eta = in_seconds(-0.1)
    message = Message({"id": "1", "eta": eta}, delayed())
    seen: list[Any] = []

    def strategy(*_: Any) -> None:
        request = SimpleNamespace(message=message, request_dict=dict(message.headers), eta=None)
        seen.append(dict(request.request_dict))
        forget_eta(request, NOON)
        seen.append(request.request_dict)

    strategies = Worker().strategies()
    strategies["t"] = strategy
    strategies["t"](message, None, None, None, None)
    assert seen == [{"id": "1"}, {"id": "1", "eta": eta}]
    assert message.headers == {"id": "1", "eta": eta}


# ---- strategies --------------------------------------------------------------------------


@dataclass
class Timer:
    """A timer that keeps its calls."""

    calls: list[Callable[[], Any]] = field(default_factory=list)

    def call_after(self, seconds: float, call: Callable[[], Any]) -> None:
        assert 0 < seconds <= 5
        self.calls.append(call)


@dataclass
class Consumer:
    """The attributes of Celery's consumer that strategies use."""

    soon: list[Callable[[], Any]] = field(default_factory=list)
    connection_errors: tuple[type[Exception], ...] = (OSError,)
    task_consumer: Any = field(
        default_factory=lambda: SimpleNamespace(_active_tags={"celery": "1", "jobs": "2"})
    )

    hub: Any = "a hub"
    pool: Any = None
    timer: Any = field(default_factory=lambda: Timer())

    event_dispatcher: Any = None
    qos: Any = None

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        self.soon.append(partial(function, *args))


@dataclass
class Message:
    headers: dict[str, Any]
    native_delay: Delayed | None = None
    delivery_info: dict[str, Any] = field(default_factory=lambda: {"consumer_tag": "2"})
    channel: Any = field(default_factory=lambda: SimpleNamespace(connection=object()))
    acked: list[tuple[Any, ...]] = field(default_factory=list)
    kept_eta: str | None = None

    def ack_log_error(self, *args: Any) -> None:
        self.acked.append(args)


@dataclass(frozen=True)
class Adopted:
    """A message to be put back, with the callbacks for success and failure."""

    wait: Wait
    done: Callable[[], Any]
    instead: Callable[[], Any]


@dataclass
class Worker:
    """Strategies around one that notes Celery's calls."""

    takes: bool = True
    gate: Gate = lambda arrival: None
    ran: list[tuple[Any, ...]] = field(default_factory=list)
    adopted: list[Adopted] = field(default_factory=list)
    acked: list[tuple[Any, ...]] = field(default_factory=list)
    consumer: Consumer = field(default_factory=Consumer)

    def strategies(self) -> GatedStrategies:
        passed = gates(DelaySettings(), revoked=Revoked(), scheduling=self.gate)
        strategies = GatedStrategies(self.consumer, passed, self._put_back, Tallying(self.consumer))
        strategies["t"] = lambda *args, **kwargs: self.ran.append((args, kwargs))
        return strategies

    def receives(self, message: Message, payload: Any = None) -> str:
        strategies = self.strategies()
        strategies["t"](message, payload, self._ack, "reject", ["callback"])
        outcomes = {"ran": self.ran, "adopted": self.adopted, "acked": self.acked}
        [outcome] = [name for name, calls in outcomes.items() if calls]
        return outcome

    def _put_back(self, wait: Wait, done: Callable[[], Any], instead: Callable[[], Any]) -> bool:
        if self.takes:
            self.adopted.append(Adopted(wait, done, instead))
        return self.takes

    def _ack(self, *args: Any) -> None:
        self.acked.append(args)


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.fixture(autouse=True)
def nothing_revoked() -> Iterator[None]:
    yield
    state.revoked.clear()
    strategies._cancelled.clear()


@pytest.mark.parametrize(
    ("name", "headers", "waited", "asked"),
    [
        ("t", {}, None, False),
        ("t", {"eta": None, "expires": "2000-01-01T00:00:00"}, None, False),
        ("once", {}, None, True),
        ("t", {}, delayed(), True),
        ("t", {"eta": "2000-01-01T00:00:00"}, None, True),
        *(("t", {header: {}}, None, True) for header in strategies._READ),
    ],
)
def test_gates_are_asked_only_about_messages_that_concern_them(
    name: str, headers: dict[str, Any], waited: Delayed | None, asked: bool
) -> None:
    """A task's name, an ETA, a wait or a header of ours; others go to Celery at once."""
    questions: list[Arrival] = []
    ran: list[Any] = []
    consumer = Consumer()
    gated = GatedStrategies(
        consumer,
        (questions.append,),  # type: ignore[arg-type]
        lambda *_: True,
        Tallying(consumer),
        has_gates=lambda task: task == "once",
    )
    gated[name] = lambda *args: ran.append(args)
    gated[name](Message({"id": "1", **headers}, waited), None, "ack", "reject", [])
    assert (len(ran), bool(questions)) == (1, asked)


def test_an_early_task_is_put_back_with_its_queue_and_due_time() -> None:
    worker, eta = Worker(), in_seconds(60)
    message = Message({"id": "1", "eta": eta})
    assert worker.receives(message) == "adopted"
    [task] = worker.adopted
    assert task.wait == Wait(message, "jobs", due_us(eta))


@pytest.mark.parametrize(
    ("eta_in", "waited_before", "outcome"),
    [
        (None, False, "ran"),
        (-60, False, "ran"),
        (0.01, False, "ran"),  # Celery's timer is exact, and it is over sooner
        (5, False, "adopted"),
        (-60, True, "ran"),
        (0.5, True, "ran"),  # clock skew
        (5, True, "adopted"),
    ],
)
def test_only_a_task_that_is_early_enough_is_put_back(
    eta_in: float | None, waited_before: bool, outcome: str
) -> None:
    eta = None if eta_in is None else in_seconds(eta_in)
    message = Message({"id": "1", "eta": eta}, delayed() if waited_before else None)
    assert Worker().receives(message) == outcome


def test_a_task_of_protocol_1_has_its_eta_in_the_payload() -> None:
    worker = Worker()
    assert worker.receives(Message({}), {"id": "1", "eta": in_seconds(60)}) == "adopted"


def test_revoked_and_expired_tasks_are_left_to_celery() -> None:
    """Celery reports them. Another wait would only postpone that."""
    state.revoked.add("revoked")
    assert Worker().receives(Message({"id": "revoked", "eta": in_seconds(60)})) == "ran"
    expired = {"id": "1", "eta": in_seconds(60), "expires": in_seconds(-1)}
    assert Worker().receives(Message(expired)) == "ran"
    still_good = {"id": "1", "eta": in_seconds(60), "expires": in_seconds(30)}
    assert Worker().receives(Message(still_good)) == "adopted"


def test_a_task_that_cannot_be_put_back_is_held_by_celery() -> None:
    assert Worker(takes=False).receives(Message({"id": "1", "eta": in_seconds(60)})) == "ran"


def test_a_task_of_an_unknown_queue_is_held_by_celery() -> None:
    message = Message({"id": "1", "eta": in_seconds(60)}, delivery_info={"consumer_tag": "9"})
    assert Worker().receives(message) == "ran"


@pytest.mark.parametrize(("queue", "outcome"), [("side", "adopted"), ("", "ran")])
def test_the_queue_attribute_of_a_message_counts(queue: str, outcome: str) -> None:
    """Redis has no consumer tags. A broadcast has no queue, so each worker holds it."""
    worker, message = Worker(), Message({"id": "1", "eta": in_seconds(60)}, delivery_info={})
    message.consumed_from = queue  # type: ignore[attr-defined]
    assert worker.receives(message) == outcome
    assert [task.wait.queue for task in worker.adopted] == [queue] * (outcome == "adopted")


def test_a_task_that_is_due_reaches_celery_unchanged() -> None:
    worker = Worker()
    message = Message({"id": "1"})
    worker.receives(message, "payload")
    [(args, kwargs)] = worker.ran
    assert args[:2] == (message, "payload")
    assert (args[3].args[1], args[4]) == ("reject", ["callback"])
    assert kwargs == {}


@pytest.mark.parametrize("eta", ["tomorrow", "2026-13-01", 5, 5.5, [1], {"a": 1}])
def test_an_invalid_eta_is_left_to_celery(eta: Any) -> None:
    assert Worker().receives(Message({"id": "1", "eta": eta})) == "ran"


def test_a_task_that_was_put_back_is_settled_in_the_consumers_thread() -> None:
    """The callbacks only schedule the call: another thread runs them."""
    worker, message = Worker(), Message({"id": "1", "eta": in_seconds(60)})
    worker.receives(message)
    [task] = worker.adopted
    task.done()
    assert not message.acked
    worker.consumer.soon.pop()()
    assert len(message.acked) == 1
    task.instead()
    assert not worker.ran
    worker.consumer.soon.pop()()
    assert len(worker.ran) == 1


def test_a_green_worker_acknowledges_at_once() -> None:
    """Without a hub, call_soon() waits up to two seconds."""
    consumer = Consumer(hub=None, pool=SimpleNamespace(is_green=True))
    worker, message = Worker(consumer=consumer), Message({"id": "1", "eta": in_seconds(60)})
    worker.receives(message)
    worker.adopted[0].done()
    assert len(message.acked) == 1
    assert not consumer.soon


def test_a_task_whose_connection_is_gone_is_not_run() -> None:
    """The broker delivers it again."""
    worker, message = Worker(), Message({"id": "1", "eta": in_seconds(60)})
    worker.receives(message)
    worker.adopted[0].instead()
    message.channel.connection = None
    worker.consumer.soon.pop()()
    assert worker.ran == []


def test_a_green_worker_drops_at_once() -> None:
    """Before Celery 5.7 its own promise would wait up to two seconds."""
    consumer = Consumer(hub=None, pool=SimpleNamespace(is_green=True))
    worker, message = Worker(consumer=consumer), Message({"id": "1"}, delayed(ms_from_now(-1)))
    worker.strategies()["t"](message, None, worker._ack, "reject", [])
    assert len(message.acked) == 1
    assert worker.acked == worker.ran == []


# ---- gates that are asked again ---------------------------------------------------------


@dataclass(eq=False)
class Asking:
    """A gate that postpones its ruling, and gives it when asked again."""

    ruling: Ruling | None = None
    arrivals: list[Arrival] = field(default_factory=list)

    def __call__(self, arrival: Arrival) -> Ruling | None:
        self.arrivals.append(arrival)
        return AskAgain(0.5) if len(self.arrivals) == 1 else self.ruling


def ask_again(worker: Worker) -> None:
    """Let the pause end after which *worker* asks its gate again."""
    worker.consumer.timer.calls.pop()()
    worker.consumer.soon.pop()()


def headers(**more: Any) -> dict[str, Any]:
    return {"id": "1", "task": "t", **more}


def test_no_later_gate_is_asked_about_a_task_that_is_early() -> None:
    gate = Asking()
    assert Worker(gate=gate).receives(Message(headers(eta=in_seconds(60)))) == "adopted"
    assert gate.arrivals == []


def test_a_task_that_cannot_wait_passes_on_to_the_next_gate() -> None:
    """At once, or after the broker has refused it. A gated task never runs without its gate."""
    gate = Asking(AskAgain(0.5))
    worker = Worker(gate=gate, takes=False)
    message = Message(headers(eta=in_seconds(60)))
    worker.strategies()["t"](message, None, worker._ack, "reject", [])
    assert len(gate.arrivals) == 1
    worker.takes = True
    worker.strategies()["t"](message, None, worker._ack, "reject", [])
    assert len(gate.arrivals) == 1
    worker.adopted[0].instead()
    worker.consumer.soon.pop()()
    assert len(gate.arrivals) == 2
    assert worker.ran == []


@pytest.mark.parametrize("waited", [None, delayed()])
def test_a_task_whose_gate_is_asked_again_passes_in_the_consumers_thread(
    waited: Delayed | None,
) -> None:
    """Then it runs as without a lookup, with its ETA still in the message."""
    gate, ran = Asking(), []
    worker = Worker(gate=gate)
    strategies = worker.strategies()
    strategies["t"] = lambda message, *_: ran.append(message.headers.get("eta"))
    eta = in_seconds(-1)
    message = Message(headers(eta=eta), waited)
    strategies["t"](message, None, None, None, None)
    [arrival] = gate.arrivals
    assert (arrival.name, arrival.id, arrival.queue, arrival.is_connected) == (
        "t",
        "1",
        "jobs",
        True,
    )
    assert message.headers["eta"] == eta
    worker.consumer.timer.calls.pop()()
    assert ran == []
    worker.consumer.soon.pop()()
    assert ran == [None if waited else eta]
    assert len(gate.arrivals) == 2


def test_a_dropped_task_is_acknowledged_logged_and_sent_as_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Any] = []
    consumer = Consumer()
    consumer.event_dispatcher = SimpleNamespace(
        enabled=True, send=lambda event, **fields: sent.append((event, fields))
    )
    worker = Worker(consumer=consumer, gate=lambda _: Drop("it lost", "lost", {"run": "r"}))
    with caplog.at_level("INFO"):
        assert worker.receives(Message({"id": "1", "task": "t"})) == "acked"
    assert sent == [("lost", {"uuid": "1", "name": "t", "run": "r"})]
    assert "task t[1] is dropped: it lost" in caplog.text


def faulty(_: Arrival) -> Ruling | None:
    raise RuntimeError("a fault")


@pytest.mark.parametrize("waited", [False, True])
def test_after_an_error_in_a_gate_the_task_waits_in_the_broker(
    caplog: pytest.LogCaptureFixture, waited: bool
) -> None:
    """Celery would end this worker, and every worker that gets the message after it.

    In the worker's memory, a gate that always fails would collect the whole queue.
    """
    worker = Worker(gate=faulty)
    now_us = due_us(in_seconds(0))
    message = Message({"id": "1", "task": "t"}, delayed() if waited else None)
    assert worker.receives(message) == "adopted"
    assert "t[1]" in caplog.text
    assert "a fault" in caplog.text
    [task] = worker.adopted
    assert task.wait.due_us >= now_us + strategies.FAULT_SECONDS * 1e6
    assert task.wait.delivery_id == ("id-1" if waited else None)


def test_a_faulty_gate_is_asked_again_if_the_task_cannot_wait_in_the_broker() -> None:
    """The task takes its place in the prefetch meanwhile: the worker gets no other for it."""
    faults = [faulty]
    worker = Worker(takes=False, gate=lambda arrival: faults.pop()(arrival) if faults else None)
    worker.strategies()["t"](Message({"id": "1", "task": "t"}), None, worker._ack, "reject", [])
    assert (worker.ran, worker.adopted, worker.acked) == ([], [], [])
    ask_again(worker)
    assert len(worker.ran) == 1


def test_the_gate_of_a_task_that_cannot_wait_is_asked_again() -> None:
    gate = Asking(WaitUntil(2**60, otherwise=AskAgain(1.0)))
    worker = Worker(takes=False, gate=gate)
    worker.strategies()["t"](Message({"id": "1"}), None, worker._ack, "reject", [])
    ask_again(worker)
    ask_again(worker)
    assert len(gate.arrivals) == 3
    assert worker.ran == []


def test_an_invalid_task_is_rejected_when_it_passes_its_gates_again() -> None:
    """No other code would reject it, and an error would end the consumer."""
    gate, invalid = Asking(), []
    worker = Worker(gate=gate)
    worker.consumer.on_invalid_task = lambda *args: invalid.append(args)  # type: ignore[attr-defined]
    strategies = worker.strategies()

    def strategy(*_: Any) -> None:
        raise InvalidTaskError("no task")

    strategies["t"] = strategy
    message = Message(headers())
    strategies["t"](message, "payload", None, None, None)
    ask_again(worker)
    [(payload, rejected, exc)] = invalid
    assert (payload, rejected, str(exc)) == ("payload", message, "no task")


# ---- a message's own expiration ----------------------------------------------------------


def ms_from_now(seconds: float) -> int:
    return due_us(in_seconds(seconds)) // 1000


def test_a_message_that_expired_while_it_waited_is_discarded() -> None:
    worker = Worker()
    assert worker.receives(Message({"id": "1"}, delayed(ms_from_now(-1)))) == "acked"
    [(logger, errors)] = worker.acked
    assert errors == worker.consumer.connection_errors
    assert hasattr(logger, "critical"), "what Celery's ack_log_error wants"


# ---- cancelled tasks -----------------------------------------------------------


def test_a_cancelled_task_goes_to_celery_at_once() -> None:
    """If it were put back it would lose its mark and run. The canceller's clock may be ahead."""
    cancelled = delayed(ms_from_now(-1))._replace(cancelled=True)
    worker = Worker()
    assert worker.receives(Message({"id": "1", "eta": in_seconds(60)}, cancelled)) == "ran"


def test_a_gate_that_has_not_decided_is_asked_again() -> None:
    """The task stays unacknowledged. It does not run if its connection was lost meanwhile."""
    rulings: list[Ruling | None] = [AskAgain(0.5)]
    worker = Worker(gate=lambda arrival: rulings[-1])
    message = Message({"id": "1", "task": "t"}, delayed())
    strategies = worker.strategies()
    strategies["t"](message, None, worker._ack, "reject", ["callback"])
    assert (worker.ran, worker.adopted, worker.acked) == ([], [], [])
    [call] = worker.consumer.timer.calls
    rulings.append(None)
    call()
    worker.consumer.soon.pop()()
    assert len(worker.ran) == 1
    message.channel.connection = None
    call()
    worker.consumer.soon.pop()()
    assert len(worker.ran) == 1


def test_a_gate_is_asked_again_on_time_in_an_idle_worker() -> None:
    """Without a waker the loop would sleep up to a second after the timer has called."""
    hub = Hub(timer=KombuTimer())
    waker = Waker(hub)
    slept: list[Any] = []
    asked: list[str] = []
    poll = hub.poller.poll

    def watched(timeout: float) -> Any:
        slept.append(poll(min(timeout, 0.05)))
        return slept[-1]

    def gate(arrival: Arrival) -> Ruling | None:
        asked.append(arrival.id)
        return AskAgain(0.01) if len(asked) == 1 else None

    consumer = Consumer(hub=hub, timer=hub.timer)
    consumer.call_soon = hub.call_soon  # type: ignore[method-assign]
    strategies = GatedStrategies(consumer, (gate,), lambda *_: False, Tallying(consumer))
    strategies.wake = waker.wake
    strategies["t"] = lambda *_args, **_options: asked.append("ran")
    hub.poller.poll = watched
    try:
        strategies["t"](Message({"id": "1"}), None, None, "reject", [])
        assert any("ran" in asked for _ in islice(hub.create_loop(), 100))
        assert asked == ["1", "1", "ran"]
        assert any(slept), "the loop slept until its time was up, nothing woke it"
    finally:
        waker.close()
        hub.close()
