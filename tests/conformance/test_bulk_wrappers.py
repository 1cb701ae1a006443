"""``bulk(app)`` beside code that wraps publishing, such as an APM."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Producer
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_native_delay import install
from celery_native_delay.bulk import bulk
from tests.brokers import ON_SYSTEM, in_ci
from tests.conformance.brokers import Broker, options_of, settings_of
from tests.conformance.test_bulk_conformance import PLAIN, inbox, ready_app
from tests.conformance.traffic import SETTINGS
from tests.integration.traffic import Arrival

#: RabbitMQ has templates of its own, the other brokers share one kind; what is wrapped is Celery's.
BROKERS = [pytest.param(ON_SYSTEM.id, marks=pytest.mark.rabbitmq), in_ci("redis")]

#: For wrappers that turn templates off: whose templates, does not matter.
on_one = pytest.mark.parametrize("broker", BROKERS[:1], indirect=True, scope="session")

TRACE = "trace"
SAID = "sending by apply_async, not by template: "

#: An app, and the traces of its messages by task id.
Watched = tuple[Celery, dict[str, str]]


def make_app(url: str) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        broker_url=url,
        task_queues=[PLAIN],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    install(app, **SETTINGS, **settings_of(url))

    @app.task(name="shop.remind", shared=False)
    def remind(number: int = 0) -> None:
        """Never run here."""

    return app


@pytest.fixture(scope="module")
def space(broker: Broker) -> Iterator[str]:
    """A space with declared queues and a worker's background jobs, shared by all tests here."""
    with ready_app(broker) as app:
        yield app.conf.broker_url


class Watching:
    """Wraps functions so that each publish gets a trace header, and keeps the traces by task id."""

    def __init__(self) -> None:
        self.traces: dict[str, str] = {}

    def header(self, task_id: str) -> dict[str, str]:
        self.traces[task_id] = trace = f"{len(self.traces):04}"
        return {TRACE: trace}

    def around(self, original: Any) -> Any:
        """Wrap ``apply_async`` or ``send_task``, as APMs do."""

        @functools.wraps(original)
        def watching(*args: Any, **options: Any) -> Any:
            headers = (options.get("headers") or {}) | self.header(options["task_id"])
            return original(*args, **options | {"headers": headers})

        return watching

    def around_publish(self, original: Any) -> Any:
        @functools.wraps(original)
        def watching(producer: Any, body: Any, *args: Any, **options: Any) -> Any:
            headers = options.get("headers") or {}
            if "id" in headers:
                headers = headers | self.header(headers["id"])
            return original(producer, body, *args, **options | {"headers": headers})

        return watching


@contextmanager
def patched(url: str, owner: Any, name: str, how: str) -> Iterator[Watched]:
    """An app made after a method of *owner* was wrapped."""
    watching = Watching()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, getattr(watching, how)(getattr(owner, name)))
        yield make_app(url), watching.traces


#: tests/unit/test_publish_hooks.py finds the other ways to wrap.
WRAPPERS: list[tuple[Any, str, str]] = [
    (Task, "apply_async", "around"),
    (Celery, "send_task", "around"),
    (Producer, "publish", "around_publish"),
]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's reasons why tasks are not sent by template."""
    lines = [each.getMessage() for each in caplog.records]
    return [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]


def traces_of(arrivals: list[Arrival]) -> dict[str, str | None]:
    return {a.message.headers["id"]: a.message.headers.get(TRACE) for a in arrivals}


@on_one
@pytest.mark.parametrize(("owner", "name", "how"), WRAPPERS)
def test_code_that_wraps_publishing_sees_each_task_of_a_batch(
    space: str, owner: Any, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each message has the header added for it, and the log gives the reason once."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    with patched(space, owner, name, how) as (app, traces), inbox(app, "plain") as letters:
        with bulk(app) as batch:
            ids = [batch.send("shop.remind", (n,), countdown=0.5) for n in range(6)]
        came = letters.wait_for(6)
        app.close()
    assert list(traces) == ids
    assert len(set(traces.values())) == 6
    assert traces_of(came) == traces
    assert batch.result.by_template == 0
    (line,) = told(caplog)
    assert f".{name} is wrapped" in line


def test_opentelemetry_has_a_span_for_each_message(space: str) -> None:
    """Instrumented in the middle of a batch; each message has its own trace context."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app, instrumentor = make_app(space), CeleryInstrumentor()
    with inbox(app, "plain") as letters:
        with bulk(app) as batch:
            for n in range(3):
                batch.send("shop.remind", (n,), countdown=0.5)
            instrumentor.instrument(tracer_provider=provider)
            try:
                ids = [batch.send("shop.remind", (n,), countdown=0.5) for n in range(6)]
            finally:
                instrumentor.uninstrument()
            batch.send("shop.remind", (9,), countdown=0.5)
        came = letters.wait_for(10)
    app.close()
    parents = {}
    for span in exporter.get_finished_spans():
        context = span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        parents[span.attributes["messaging.message.id"]] = parent
    assert list(parents) == ids
    headers = {a.message.headers["id"]: a.message.headers for a in came}
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
    space: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    around: Any,
) -> None:
    """A second message, with other arguments, shows it; the log says so."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    amqp = importlib.import_module("celery.app.amqp")
    app, sent = make_app(space), (1, 2, 3, 4, 4)
    with inbox(app, "plain") as letters:
        monkeypatch.setattr(amqp, "task_message", around(amqp.task_message))
        for number in sent:
            app.tasks["shop.remind"].apply_async((number,), countdown=0.5)
        with bulk(app) as batch:
            ids = [batch.send("shop.remind", (number,), countdown=0.5) for number in sent]
        monkeypatch.undo()
        came = letters.wait_for(2 * len(sent))
    app.close()
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
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header depends on the arguments, which differ first in the fifth task."""
    amqp = importlib.import_module("celery.app.amqp")
    app, sent = make_app(space), (1, 1, 1, 1, 2, 3)
    with inbox(app, "plain") as letters:
        monkeypatch.setattr(amqp, "task_message", OF_ARGUMENT(amqp.task_message))
        with bulk(app) as batch:
            ids = [batch.send("shop.remind", (number,), countdown=0.5) for number in sent]
        monkeypatch.undo()
        came = letters.wait_for(len(sent))
    app.close()
    assert traces_of(came) == {each: f"of {n}" for each, n in zip(ids, sent, strict=True)}
    assert batch.result.by_template == 2


def test_equal_options_of_different_types_are_not_mixed(space: str) -> None:
    """1, 1.0 and True arrive as they were sent."""
    app, values = make_app(space), (1, True, 1.0)
    with inbox(app, "plain") as letters:
        with bulk(app) as batch:
            sent = {
                batch.send("shop.remind", (n,), countdown=0.2, soft_time_limit=value): repr(value)
                for n in range(4)
                for value in values
            }
        came = letters.wait_for(12)
    app.close()
    found = {a.message.headers["id"]: repr(a.message.headers["timelimit"][1]) for a in came}
    assert found == sent
    assert batch.result.by_template == 6
