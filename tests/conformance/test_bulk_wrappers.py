"""``bulk(app)`` beside code that wraps publishing, such as an APM."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import celery
import pytest
from celery import Celery, Task
from celery.app.amqp import AMQP
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
Wrapper = Callable[[str], AbstractContextManager[Watched]]


def make_app(url: str, app: Celery | None = None, **task_options: Any) -> Celery:
    app = app or Celery("shop", set_as_current=False)
    app.conf.update(
        broker_url=url,
        task_queues=[PLAIN],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    install(app, **SETTINGS, **settings_of(url))

    @app.task(name="shop.remind", shared=False, **task_options)
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

    def around_message(self, original: Any) -> Any:
        @functools.wraps(original)
        def watching(*args: Any, **options: Any) -> Any:
            message = original(*args, **options)
            message.headers.update(self.header(message.headers["id"]))
            return message

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


@contextmanager
def own_task(url: str, how: str) -> Iterator[Watched]:
    """An app with its own Task class, given as *how*; its methods have Celery's names."""
    watching = Watching()

    class Task(celery.Task):
        __qualname__ = "Task"

        def apply_async(self, *args: Any, **options: Any) -> Any:
            headers = (options.get("headers") or {}) | watching.header(options["task_id"])
            return super().apply_async(*args, **options | {"headers": headers})

        apply_async.__qualname__ = "Task.apply_async"

    app = Celery("shop", task_cls=Task if how == "task_cls" else None, set_as_current=False)
    if how == "app.Task":
        app.Task = Task
    options = {"base": Task} if how == "base" else {}
    yield make_app(url, app, **options), watching.traces


@contextmanager
def own_celery(url: str) -> Iterator[Watched]:
    watching = Watching()

    class Shop(Celery):
        def send_task(self, *args: Any, **options: Any) -> Any:
            headers = (options.get("headers") or {}) | watching.header(options["task_id"])
            return super().send_task(*args, **options | {"headers": headers})

    yield make_app(url, Shop("shop", set_as_current=False)), watching.traces


@contextmanager
def own_amqp(url: str) -> Iterator[Watched]:
    watching, app = Watching(), make_app(url)
    app.amqp.task_protocols[2] = watching.around_message(app.amqp.task_protocols[2])
    yield app, watching.traces


@contextmanager
def own_send_task(url: str) -> Iterator[Watched]:
    """An app whose own ``send_task`` was wrapped after install()."""
    watching, app = Watching(), make_app(url)
    app.send_task = watching.around(app.send_task)
    yield app, watching.traces


#: Each with the name that the log must show.
WRAPPERS: dict[str, tuple[Wrapper, str]] = {
    "Task.apply_async": (
        functools.partial(patched, owner=Task, name="apply_async", how="around"),
        "celery.app.task.Task.apply_async is wrapped",
    ),
    "Celery.send_task": (
        functools.partial(patched, owner=Celery, name="send_task", how="around"),
        "celery.app.base.Celery.send_task is wrapped",
    ),
    "AMQP.as_task_v2": (
        functools.partial(patched, owner=AMQP, name="as_task_v2", how="around_message"),
        "celery.app.amqp.AMQP.as_task_v2 is wrapped",
    ),
    "Producer.publish": (
        functools.partial(patched, owner=Producer, name="publish", how="around_publish"),
        "kombu.messaging.Producer.publish is wrapped",
    ),
    "app.amqp": (own_amqp, "AMQP.as_task_v2 is wrapped"),
    "app.send_task": (own_send_task, "Installation.send_task is wrapped"),
    "subclass of Celery": (own_celery, "Shop.send_task"),
    "base": (functools.partial(own_task, how="base"), "Task.apply_async"),
    "task_cls": (functools.partial(own_task, how="task_cls"), "Task.apply_async"),
    "app.Task": (functools.partial(own_task, how="app.Task"), "Task.apply_async"),
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's reasons why tasks are not sent by template."""
    lines = [each.getMessage() for each in caplog.records]
    return [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]


def traces_of(arrivals: list[Arrival]) -> dict[str, str | None]:
    return {a.message.headers["id"]: a.message.headers.get(TRACE) for a in arrivals}


@on_one
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_code_that_wraps_publishing_sees_each_task_of_a_batch(
    space: str, wrapper: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each message has the header added for it, and the log gives the reason once."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    watched, named = WRAPPERS[wrapper]
    with watched(space) as (app, traces), inbox(app, "plain") as letters:
        with bulk(app) as batch:
            ids = [batch.send("shop.remind", (n,), countdown=0.5) for n in range(6)]
        came = letters.wait_for(6)
        app.close()
    assert list(traces) == ids
    assert len(set(traces.values())) == 6
    assert traces_of(came) == traces
    assert batch.result.by_template == 0
    (line,) = told(caplog)
    assert named in line


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


# ---- templates that would change a message -------------------------------------------------------


def adding(value: Callable[[Any], str]) -> Callable[[Any], Any]:
    """Wrap a function so that it adds a header computed from the body."""

    def around(task_message: Any) -> Any:
        def make(headers: Any, properties: Any, body: Any, sent_event: Any) -> Any:
            headers = {**headers, TRACE: value(body)}
            return task_message(headers, properties, body, sent_event)

        return make

    return around


def masking(saferepr: Any) -> Any:
    return lambda arguments, *_, **__: saferepr(arguments).replace("2", "*")


def jittering(add_seconds: Any) -> Any:
    return lambda now, seconds: add_seconds(now, seconds + 0.5)


def compact(dumps: Any) -> Any:
    def without_blanks(*args: Any, **options: Any) -> Any:
        content_type, encoding, body = dumps(*args, **options)
        return content_type, encoding, body.replace(": null", ":null")

    return without_blanks


_numbers = count()
RANDOM = adding(lambda _: str(next(_numbers)))
OF_ARGUMENT = adding(lambda body: f"of {body[0][0]}")


@pytest.mark.parametrize(
    ("module", "name", "around"),
    [
        ("celery.app.amqp", "task_message", RANDOM),
        ("celery.app.amqp", "task_message", OF_ARGUMENT),
        ("celery.app.amqp", "saferepr", masking),
        ("celery.app.amqp", "add_seconds_to_datetime", jittering),
        ("kombu.messaging", "dumps", compact),
    ],
    ids=["random", "by argument", "argsrepr", "eta", "body"],
)
def test_tasks_that_a_template_would_change_are_sent_as_apply_async_sends_them(
    space: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: str,
    name: str,
    around: Any,
) -> None:
    """A second message, with other arguments, shows it; the log says so."""
    caplog.set_level(logging.INFO, "celery_native_delay.bulk")
    owner = importlib.import_module(module)
    app, sent = make_app(space), (1, 2, 3, 4, 4)
    with inbox(app, "plain") as letters:
        monkeypatch.setattr(owner, name, around(getattr(owner, name)))
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


def test_after_a_reconnect_templates_are_checked_once_more(space: str) -> None:
    app = make_app(space)
    with inbox(app, "plain") as letters:
        with bulk(app) as batch:
            for number in range(8):
                if number == 4:
                    outbox = batch._publisher.outbox
                    with outbox.lock:
                        outbox._lose()
                    batch.send("shop.remind", (8,), countdown=0.2, headers={})  # connects
                batch.send("shop.remind", (number,), countdown=0.5)
        # On RabbitMQ some may arrive twice.
        letters.receive_until(lambda: len({str(each.body) for each in letters.arrivals}) == 9)
    app.close()
    assert batch._publisher.outbox.connects == 2
    assert batch.result.confirmed == 9
    assert batch.result.by_template == 2 + 3
