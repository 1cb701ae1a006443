"""``bulk(app)`` beside code that wraps publishing, such as an APM."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Producer
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_native_delay.bulk import bulk
from tests.brokers import ON_SYSTEM, in_ci
from tests.conformance.brokers import Broker
from tests.conformance.test_bulk_conformance import inbox, make_app, ready_app
from tests.integration.traffic import Arrival, Inbox

#: RabbitMQ has templates of its own, the other brokers share one kind; what is wrapped is Celery's.
BROKERS = [pytest.param(ON_SYSTEM.id, marks=pytest.mark.rabbitmq), in_ci("redis")]

#: For wrappers that turn templates off: whose templates, does not matter.
on_one = pytest.mark.parametrize("broker", BROKERS[:1], indirect=True, scope="session")

TRACE = "trace"
SAID = "sending by apply_async, not by template: "


@pytest.fixture(scope="module")
def space(broker: Broker) -> Iterator[str]:
    """A space with declared queues and a worker's background jobs, shared by all tests here."""
    with ready_app(broker) as app:
        yield app.conf.broker_url


@pytest.fixture
def app(space: str) -> Iterator[Celery]:
    with make_app(space) as app:
        yield app


@pytest.fixture
def letters(app: Celery) -> Iterator[Inbox]:
    with inbox(app, "plain") as letters:
        yield letters


class Watching:
    """Wraps functions so that each publish gets a trace header, and keeps the traces by task id."""

    def __init__(self) -> None:
        self.traces: dict[str, str] = {}

    def header(self, task_id: str) -> dict[str, str]:
        self.traces[task_id] = trace = f"{len(self.traces):04}"
        return {TRACE: trace}

    def around(self, original: Any) -> Any:
        """Wrap ``apply_async``, ``send_task`` or a producer's ``publish``, as APMs do."""

        @functools.wraps(original)
        def watching(*args: Any, **options: Any) -> Any:
            headers = options.get("headers") or {}
            if task_id := options.get("task_id") or headers.get("id"):
                headers = headers | self.header(task_id)
            return original(*args, **options | {"headers": headers})

        return watching


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's reasons why tasks are not sent by template."""
    lines = [each.getMessage() for each in caplog.records]
    return [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]


def traces_of(arrivals: list[Arrival]) -> dict[str, str | None]:
    return {a.message.headers["id"]: a.message.headers.get(TRACE) for a in arrivals}


@on_one
@pytest.mark.parametrize(  # tests/unit/test_publish_hooks.py finds the other ways to wrap
    ("owner", "name"), [(Task, "apply_async"), (Celery, "send_task"), (Producer, "publish")]
)
def test_code_that_wraps_publishing_sees_each_task_of_a_batch(
    space: str,
    letters: Inbox,
    owner: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each message has the header added for it, and the log gives the reason once."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    watching = Watching()
    monkeypatch.setattr(owner, name, watching.around(getattr(owner, name)))
    with make_app(space) as app, bulk(app) as batch:
        ids = [batch.send("shop.remind", (n,), countdown=0.5) for n in range(6)]
    assert list(watching.traces) == ids
    assert len(set(watching.traces.values())) == 6
    assert traces_of(letters.wait_for(6)) == watching.traces
    assert batch.result.by_template == 0
    (line,) = told(caplog)
    assert f".{name} is wrapped" in line


def test_opentelemetry_has_a_span_for_each_message(app: Celery, letters: Inbox) -> None:
    """Instrumented in the middle of a batch; each message has its own trace context."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    with bulk(app) as batch:
        for n in range(3):
            batch.send("shop.remind", (n,), countdown=0.5)
        instrumentor.instrument(tracer_provider=provider)
        try:
            ids = [batch.send("shop.remind", (n,), countdown=0.5) for n in range(6)]
        finally:
            instrumentor.uninstrument()
        batch.send("shop.remind", (9,), countdown=0.5)
    parents = {}
    for span in exporter.get_finished_spans():
        context = span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        parents[span.attributes["messaging.message.id"]] = parent
    assert list(parents) == ids
    headers = {a.message.headers["id"]: a.message.headers for a in letters.wait_for(10)}
    found = {each: headers[each].get("traceparent") for each in headers}
    assert found == dict.fromkeys(headers) | parents
    assert batch.result.by_template == 2  # one before, one after


# ---- templates that would change a message -------------------------------------------------------


def adding(value: Callable[[Any], str]) -> Callable[[Any], Any]:
    """Wrap a function so that it adds a header computed from the body."""

    def around(task_message: Any) -> Any:
        def make(headers: Any, properties: Any, body: Any, sent_event: Any) -> Any:
            headers = {**headers, TRACE: value(body)}
            return task_message(headers, properties, body, sent_event)

        return make

    return around


_numbers = count()
RANDOM = adding(lambda _: str(next(_numbers)))
OF_ARGUMENT = adding(lambda body: f"of {body[0][0]}")


@pytest.mark.parametrize("around", [RANDOM, OF_ARGUMENT], ids=["random", "by argument"])
def test_tasks_that_a_template_would_change_are_sent_as_apply_async_sends_them(
    app: Celery,
    letters: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    around: Any,
) -> None:
    """A second message, with other arguments, shows it; the log says so."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    amqp, sent = importlib.import_module("celery.app.amqp"), (1, 2, 3, 4, 4)
    monkeypatch.setattr(amqp, "task_message", around(amqp.task_message))
    for number in sent:
        app.tasks["shop.remind"].apply_async((number,), countdown=0.5)
    with bulk(app) as batch:
        ids = [batch.send("shop.remind", (number,), countdown=0.5) for number in sent]
    came = letters.wait_for(2 * len(sent))
    if around is RANDOM:
        assert len(set(traces_of(came).values())) == len(came)

    def seen(arrival: Arrival) -> tuple[str, ...]:
        headers = arrival.message.headers
        trace = "" if around is RANDOM else str(headers.get(TRACE))
        return trace, headers["argsrepr"], str(arrival.message.body)

    of_batch = sorted(seen(a) for a in came if a.message.headers["id"] in ids)
    assert of_batch == sorted(seen(a) for a in came if a.message.headers["id"] not in ids)
    assert batch.result.by_template == 0
    (line,) = told(caplog)
    assert line.endswith("two tasks 'shop.remind' differ unexpectedly")


def test_a_template_made_from_equal_tasks_is_not_used_for_others(
    app: Celery, letters: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header depends on the arguments, which differ first in the fifth task."""
    amqp, sent = importlib.import_module("celery.app.amqp"), (1, 1, 1, 1, 2, 3)
    monkeypatch.setattr(amqp, "task_message", OF_ARGUMENT(amqp.task_message))
    with bulk(app) as batch:
        ids = [batch.send("shop.remind", (number,), countdown=0.5) for number in sent]
    came = letters.wait_for(len(sent))
    assert traces_of(came) == {each: f"of {n}" for each, n in zip(ids, sent, strict=True)}
    assert batch.result.by_template == 2


def test_equal_options_of_different_types_are_not_mixed(app: Celery, letters: Inbox) -> None:
    """1, 1.0 and True arrive as they were sent."""
    with bulk(app) as batch:
        sent = {
            batch.send("shop.remind", (n,), countdown=0.2, soft_time_limit=value): repr(value)
            for n in range(4)
            for value in (1, True, 1.0)
        }
    came = letters.wait_for(12)
    found = {a.message.headers["id"]: repr(a.message.headers["timelimit"][1]) for a in came}
    assert found == sent
    assert batch.result.by_template == 6


def test_sentry_has_a_span_for_each_message(space: str) -> None:
    """In a process of its own, because Sentry patches Celery for good."""
    command = [sys.executable, "-m", "tests.conformance.sentry_process", space]
    with inbox(make_app(space), "plain") as letters:
        run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert run.returncode == 0, run.stderr
        came = letters.wait_for(18)
    seen = json.loads(run.stdout)
    headers = {a.message.headers["id"]: a.message.headers for a in came}
    assert seen["by_template"] == 0
    assert [span["id"] for span in seen["publishes"]] == seen["ids"]
    for span in seen["publishes"]:
        own = headers[span["id"]]
        assert own["sentry-trace"].split("-")[0] == span["trace_id"]
        assert f"sentry-trace_id={span['trace_id']}" in own["baggage"]
    for name in ("sentry-trace", "baggage", "sentry-task-enqueued-time"):
        assert len({each[name] for each in headers.values()}) == 18
    assert f"{SAID}celery.app.base.Celery.send_task is wrapped by other code" in run.stderr
