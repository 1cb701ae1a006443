"""A worker's strategies, which carry out the rulings of the gates on each task.

The worker is Celery's consumer in this thread, on the test clock. A plain producer sends to it; a
message with this package's header seems to have waited in a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, signals
from celery.worker.consumer import Consumer
from kombu import Queue
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer

from celery_native_delay import Delay, install
from celery_native_delay.clock import Clock
from celery_native_delay.clock.inline_worker import InlineAttendant
from celery_native_delay.due_time import due_us
from celery_native_delay.message import HEADER, Delayed, due_ms_of
from celery_native_delay.transports.interface import Wait
from celery_native_delay.worker import strategies
from celery_native_delay.worker.arrival import (
    Arrival,
    AskAgain,
    Drop,
    Gate,
    Ruling,
    WaitUntil,
    queue_of,
)
from celery_native_delay.worker.strategies import Waker

WAITED = Delayed("d-1", due_us=0, exchange="", routing_key="celery")


@dataclass(eq=False)
class Worker:
    """A worker on the clock, which notes when its tasks start, and which ETA they see."""

    app: Celery
    clock: Clock
    ran: list[tuple[float, str | None]] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.clock._worker is not None
        self.consumer = self.clock._worker._consumer
        self.began = self.clock.now
        self.plain = Celery("plain", broker="memory://localhost", set_as_current=False)

    def at(self, seconds: float | None) -> str | None:
        """The time so many seconds after the test began, as text."""
        if seconds is None:
            return None
        return (self.began + timedelta(seconds=seconds)).isoformat()

    def gate(self, gate: Gate) -> None:
        """Add a gate behind the others."""
        self.consumer.strategies._gates += (gate,)

    def receives(
        self,
        *,
        name: str = "t",
        eta: Any = None,
        expires: float | None = None,
        waited: dict[str, Any] | None = None,
        protocol: int = 2,
        **headers: Any,
    ) -> None:
        """Send a task to the queue "side", and let the worker handle it."""
        own = {"eta": self.at(eta) if isinstance(eta, int | float) else eta}
        own["expires"] = self.at(expires)
        if waited is not None:
            headers[HEADER] = WAITED.header({"eta": due_ms_of(own), **waited})
        with self.plain.connection_for_write() as connection:
            message = self.plain.amqp.task_protocols[protocol]("1", name)
            is_old = protocol == 1
            body = message.body | own if is_old else message.body
            headers = headers if is_old else message.headers | own | headers
            producer = self.plain.amqp.Producer(connection)
            producer.publish(body, routing_key="side", headers=headers, serializer="json")
        self.clock.advance()


@pytest.fixture
def worker() -> Iterator[Worker]:
    app = install(Celery("shop", broker="memory://", set_as_current=False))
    app.conf.task_queues = [Queue("celery"), Queue("side")]

    @app.task(name="t", bind=True)
    def t(self: Any) -> None:
        seconds = round((worker.clock.now - worker.began).total_seconds(), 2)
        worker.ran.append((seconds, self.request.eta))

    @app.task(name="once", once=True)
    def once() -> None: ...

    def note_rejected(message: Any, exc: Any, **_: Any) -> None:
        worker.rejected.append(str(exc))

    with Clock(app) as clock:
        worker = Worker(app, clock)
        signals.task_rejected.connect(note_rejected)
        yield worker
    signals.task_rejected.disconnect(note_rejected)


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Wait, Callable[[], Any], Any]]:
    """The messages to be put back, with the callbacks for success and failure."""
    found: list[Any] = []

    def adopt(_: Any, *task: Any) -> bool:
        found.append(task)
        return True

    monkeypatch.setattr(InlineAttendant, "put_back", adopt)
    return found


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message can be put back."""
    monkeypatch.setattr(InlineAttendant, "put_back", lambda *_: False)


# ---- early tasks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eta", "waited", "protocol", "starts"),
    [
        (None, None, 2, 0),
        (-60, None, 2, 0),
        (0.05, None, 2, 0.05),  # Celery's timer is exact, and it is over sooner
        (5, None, 2, 5),
        (60, None, 1, 60),
        (-60, {}, 2, 0),
        (1, {}, 2, 0),  # the clocks of producer and worker may differ
        (1, {}, 1, 0),
        (1.5, {}, 2, 1.5),
    ],
)
def test_a_task_that_is_early_enough_waits_in_the_broker(
    worker: Worker, eta: float | None, waited: Any, protocol: int, starts: float
) -> None:
    """With its queue and due time. The user's code sees its ETA, which no timer gets."""
    worker.receives(eta=eta, waited=waited, protocol=protocol)
    waiting = [(task.queue, task.due_us) for task in Delay(worker.app).ls()]
    assert waiting == ([("side", due_us(worker.at(eta)))] if starts > 0.1 else [])
    assert bool(worker.consumer.timer._entries) is (0 < starts < 0.1)
    worker.clock.run_all()
    assert worker.ran == [(starts, worker.at(eta))]


@pytest.mark.usefixtures("full")
def test_a_task_that_cannot_be_put_back_is_held_by_celery(worker: Worker) -> None:
    worker.receives(eta=60)
    assert Delay(worker.app).count() == 0
    worker.clock.run_all()
    assert worker.ran == [(60, worker.at(60))]


def test_the_queue_of_a_message_is_known_by_its_consumer_or_its_attribute() -> None:
    """Redis has no consumer tags. A broadcast has no queue, so each worker holds it."""
    tags = SimpleNamespace(_active_tags={"celery": "1", "jobs": "2"})
    for tag, queue in (("2", "jobs"), ("9", "")):
        by_tag = SimpleNamespace(delivery_info={"consumer_tag": tag})
        assert queue_of(SimpleNamespace(task_consumer=tags), by_tag) == queue
    assert queue_of(SimpleNamespace(task_consumer=tags), SimpleNamespace(consumed_from="")) == ""


@pytest.mark.parametrize("again", [False, True])
def test_an_invalid_task_is_rejected_also_when_asked_again(worker: Worker, again: bool) -> None:
    """No other code would reject it, and an error would end the consumer."""
    if again:
        worker.gate(lambda arrival: AskAgain(0.5) if worker.clock.now == worker.began else None)
    for eta in ("tomorrow", "2026-13-01", [1], {"a": 1}):
        worker.receives(eta=eta)
    assert bool(worker.rejected) is not again
    worker.clock.advance(seconds=1)
    assert ["invalid ETA value" in why for why in worker.rejected] == [True] * 4
    assert worker.ran == []


# ---- what another thread put back ----------------------------------------------------------------


@pytest.mark.parametrize("is_green", [False, True])
def test_a_task_that_was_put_back_is_settled_in_the_consumers_thread(
    worker: Worker, put_back: list[Any], monkeypatch: pytest.MonkeyPatch, is_green: bool
) -> None:
    """Only a green worker does so at once: without a hub, call_soon() waits up to two seconds."""
    monkeypatch.setattr(worker.consumer.pool, "is_green", is_green, raising=False)
    monkeypatch.delattr(Consumer, "call_soon_ack", raising=False)  # Celery has it since 5.7
    worker.receives(eta=60)
    [(wait, done, instead)] = put_back
    done()
    assert wait.message.acknowledged is is_green
    worker.clock.advance()
    assert wait.message.acknowledged
    instead()
    worker.clock.run_all()
    assert worker.ran == [(60, worker.at(60))]


def test_a_task_whose_connection_is_gone_is_not_run(worker: Worker, put_back: list[Any]) -> None:
    """The broker delivers it again."""
    worker.receives(eta=60)
    [(wait, _, instead)] = put_back
    wait.message.channel = SimpleNamespace(connection=None)
    instead()
    worker.clock.run_all()
    assert worker.ran == []


# ---- gates --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Asking:
    """A gate that postpones its ruling, and gives it when asked again."""

    ruling: Ruling | None = None
    arrivals: list[Arrival] = field(default_factory=list)

    def __call__(self, arrival: Arrival) -> Ruling | None:
        self.arrivals.append(arrival)
        return AskAgain(0.5) if len(self.arrivals) == 1 else self.ruling


def test_gates_are_asked_only_about_messages_that_concern_them(worker: Worker) -> None:
    """A task's name, an ETA, a wait or a header of ours; others go to Celery at once."""
    worker.gate(gate := Mock(return_value=None))
    concern: list[dict[str, Any]] = [{"name": "once"}, {"waited": {}}, {"eta": -60}]
    concern += [{header: {}} for header in strategies._READ]
    for number, message in enumerate(concern, 1):
        worker.receives(**message)
        assert gate.call_count == number, message
    worker.receives()
    worker.receives(expires=60)
    assert gate.call_count == len(concern)


@pytest.mark.parametrize("waited", [None, {}])
def test_a_gate_that_has_not_decided_is_asked_again(worker: Worker, waited: Any) -> None:
    """Then the task runs as without a lookup, with its ETA still in the message.

    The loop is woken for it.
    """
    worker.consumer.strategies.wake = wake = Mock()
    worker.gate(gate := Asking())
    worker.receives(eta=-1, waited=waited)
    (arrival,) = gate.arrivals
    assert (arrival.name, arrival.id, arrival.queue) == ("t", "1", "side")
    assert not arrival.message.acknowledged
    assert worker.ran == wake.mock_calls == []
    worker.clock.advance(seconds=1)
    assert worker.ran == [(0.5, worker.at(-1))]
    assert arrival.message.headers["eta"] == worker.at(-1)
    assert (len(gate.arrivals), wake.call_count) == (2, 1)


@pytest.mark.parametrize("from_here", [False, True])
def test_gates_that_let_a_task_pass_are_asked_again_unless_the_ruling_says_no(
    worker: Worker, from_here: bool
) -> None:
    worker.gate(passes := Mock(return_value=None))
    worker.gate(Mock(side_effect=[AskAgain(0.5, from_here=from_here), None]))
    worker.receives(waited={})
    worker.clock.advance(seconds=1)
    assert (passes.call_count, worker.ran) == (1 if from_here else 2, [(0.5, None)])


def test_no_gate_is_asked_again_whose_connection_is_gone(worker: Worker) -> None:
    worker.gate(gate := Asking())
    worker.receives(waited={})
    gate.arrivals[0].message.channel = SimpleNamespace(connection=None)
    worker.clock.advance(seconds=1)
    assert (len(gate.arrivals), worker.ran) == (1, [])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_task_that_cannot_wait_passes_on_to_the_next_gate(
    worker: Worker, put_back: list[Any], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """At once, or after the broker has refused it. A gated task never runs without its gate."""
    if at_once:
        monkeypatch.setattr(InlineAttendant, "put_back", lambda *_: False)
    worker.gate(gate := Asking(Drop("it lost")))
    worker.receives(eta=60)
    if not at_once:
        assert gate.arrivals == [], "a task that waits is not asked about"
        put_back[0][2]()
        worker.clock.advance()
    assert len(gate.arrivals) == 1
    worker.clock.run_all()
    assert worker.ran == []


@pytest.mark.usefixtures("full")
def test_the_gate_of_a_task_that_cannot_wait_is_asked_again(worker: Worker) -> None:
    worker.gate(gate := Asking(WaitUntil(2**60, otherwise=AskAgain(1.0))))
    worker.receives(waited={})
    worker.clock.advance(seconds=1.6)
    assert (len(gate.arrivals), worker.ran) == (3, [])


def test_a_dropped_task_is_acknowledged_logged_and_sent_as_an_event(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.consumer.event_dispatcher = events = Mock(enabled=True)
    worker.gate(lambda _: Drop("it lost", "lost", {"run": "r"}))
    with caplog.at_level("INFO"):
        worker.receives(waited={})
    events.send.assert_called_once_with("lost", uuid="1", name="t", run="r")
    assert "task t[1] is dropped: it lost" in caplog.text
    worker.clock.run_all()
    assert worker.ran == []


@pytest.mark.parametrize("waited", [None, {}])
def test_after_an_error_in_a_gate_the_task_waits_in_the_broker(
    worker: Worker, put_back: list[Any], caplog: pytest.LogCaptureFixture, waited: Any
) -> None:
    """Celery would end this worker, and every worker that gets the message after it.

    In the worker's memory, a gate that always fails would collect the whole queue.
    """
    worker.gate(Mock(side_effect=RuntimeError("a fault")))
    worker.receives(eta=-1, waited=waited)
    assert "t[1]" in caplog.text
    assert "a fault" in caplog.text
    [(wait, _, _)] = put_back
    assert wait.due_us == due_us(worker.at(strategies.FAULT_SECONDS))
    assert wait.delivery_id == (None if waited is None else "d-1")


@pytest.mark.usefixtures("full")
def test_a_faulty_gate_is_asked_again_if_the_task_cannot_wait_in_the_broker(worker: Worker) -> None:
    """The task takes its place in the prefetch meanwhile: the worker gets no other for it."""
    worker.gate(Mock(side_effect=[RuntimeError("a fault"), None]))
    worker.receives(waited={})
    assert worker.consumer.qos.value == worker.consumer.initial_prefetch_count
    worker.clock.run_all()
    assert worker.ran == [(strategies.FAULT_SECONDS, None)]


def test_an_idle_loop_runs_a_new_callback_at_once() -> None:
    """Without a waker the loop would sleep up to a second after the timer has called."""
    hub = Hub(timer=Timer())
    waker, ran, slept = Waker(hub), list[str](), list[Any]()
    poll = hub.poller.poll

    def watched(timeout: float) -> Any:
        slept.append(poll(min(timeout, 0.05)))
        return slept[-1]

    def calls() -> None:
        hub.call_soon(ran.append, "ran")
        waker.wake()

    hub.poller.poll = watched
    try:
        hub.timer.call_after(0.01, calls)
        assert any(ran for _ in islice(hub.create_loop(), 100))
        assert any(slept), "the loop slept until its time was up, nothing woke it"
    finally:
        waker.close()
        hub.close()
