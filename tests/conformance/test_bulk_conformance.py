"""``bulk(app)`` on every broker: each task is sent as by ``apply_async``, and confirmed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self

import pytest
from celery import Celery, signals
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from celery_native_delay import DelayTooLong, InvalidDueTime, UnsupportedBroker, install
from celery_native_delay.bulk import bulk
from tests.conformance.brokers import Broker, options_of, settings_of, whole_seconds, without
from tests.conformance.traffic import SETTINGS, attended, delaying
from tests.integration.traffic import Arrival, Inbox, bodies
from tests.traffic import eta_in
from tests.waiting import wait_until

#: kombu 5.7 publishes a topic message with headers by a function that pgmq lacks.
BROKERS = without("valkey", "pgmq", "rabbitmq-4.3")

ORDERS = Queue("orders", Exchange("shop", type="topic"), routing_key="order.#")
PLAIN = Queue("plain")

PER_TASK = ("id", "root_id", "eta", "expires")


def make_app(url: str) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[PLAIN, ORDERS],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    install(app, **SETTINGS, **settings_of(url))

    @app.task(name="shop.remind", shared=False)
    def remind(number: int = 0, text: str = "") -> None:
        """Never run here."""

    return app


class Acknowledging(Inbox):
    """An inbox that acknowledges each message, as SQS needs it."""

    def consume(self, queues: Iterable[str]) -> Self:
        for queue in queues:
            self._channel.basic_consume(
                queue, no_ack=False, callback=partial(self._on, queue), consumer_tag=queue
            )
        return self

    def _on(self, queue: str, raw: Any) -> None:
        super()._on(queue, raw)
        self.arrivals[-1].message.ack()


@contextmanager
def inbox(app: Celery, *queues: str) -> Iterator[Inbox]:
    """An inbox on a connection of its own."""
    with delaying(app.conf.broker_url) as connection:
        yield Acknowledging(connection).consume(queues)


@contextmanager
def ready_app(broker: Broker) -> Iterator[Celery]:
    """An app with declared queues, and with a worker's background jobs."""
    url = broker.new_space()
    app = make_app(url)
    with attended(url):
        with bulk(app) as batch:
            for queue in ("plain", "orders"):
                batch.send("shop.warm_up", queue=queue, countdown=0.01)
        with inbox(app, "plain", "orders") as letters:
            letters.wait_for(2)
        yield app
    app.close()
    broker.remove_space(url)


@pytest.fixture(scope="module")
def app(broker: Broker) -> Iterator[Celery]:
    """An app shared by tests that consume all their messages."""
    with ready_app(broker) as app:
        yield app


@pytest.fixture
def letters(app: Celery) -> Iterator[Inbox]:
    """What arrives in the app's queues."""
    with inbox(app, "plain", "orders") as letters:
        yield letters


@pytest.fixture(scope="module")
def unread_app(broker: Broker) -> Iterator[Celery]:
    """An app shared by tests that consume no message."""
    with ready_app(broker) as app:
        yield app


def seen(arrival: Arrival) -> dict[str, Any]:
    """Everything that a worker sees of a message, except ids and times."""
    message = arrival.message
    headers = {k: v for k, v in message.headers.items() if k not in PER_TASK}
    properties = {
        k: v
        for k, v in message.properties.items()
        if k not in ("correlation_id", "application_headers", "delivery_tag", "delivery_info")
    }
    info = {k: message.delivery_info[k] for k in ("exchange", "routing_key")}
    return {
        "queue": arrival.queue,
        "headers": headers,
        "properties": properties,
        "delivery_info": info,
        "type": (message.content_type, message.content_encoding),
        "body": getattr(message, "raw_body", message.body),
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"priority": 3},
    {"queue": "orders"},
    {"exchange": "shop", "routing_key": "order.new", "declare": [ORDERS]},
    {"expires": 600},
    {"serializer": "pickle"},
    {"compression": "gzip"},
    {"headers": {"tenant": "a"}},
    {"ignore_result": False, "shadow": "other", "soft_time_limit": 5},
]


def test_a_task_in_bulk_is_the_task_that_apply_async_sends(app: Celery, letters: Inbox) -> None:
    """With each of the options, the second and third by template."""
    send = app.tasks["shop.remind"].apply_async
    arguments = (7,), {"text": 'é % "quoted"'}
    single_of = {}
    with bulk(app) as batch:
        for options in OPTIONS:
            single = send(*arguments, countdown=0.3, **options).id
            for _ in range(3):
                sent = batch.send("shop.remind", *arguments, countdown=0.3, **options)
                single_of[sent] = single
    arrived = {a.message.headers["id"]: a for a in letters.wait_for(4 * len(OPTIONS))}
    assert arrived.keys() == single_of.keys() | {*single_of.values()}
    for sent, single in single_of.items():
        arrival = arrived[sent]
        assert seen(arrival) == seen(arrived[single]), single
        assert arrival.message.headers["root_id"] == arrival.message.headers["id"]
        assert arrival.message.properties["correlation_id"] == arrival.message.headers["id"]
        assert arrival.at >= datetime.fromisoformat(arrival.message.headers["eta"]).timestamp()


def test_mixed_due_times_and_queues_arrive_once_and_on_time(app: Celery, letters: Inbox) -> None:
    """By countdown, by aware and naive ETA, by ISO text, and with a past ETA."""
    count = 100 if whole_seconds(app.conf.broker_url) else 400  # moto takes its time
    with bulk(app, window=50) as batch:
        for number in range(count):
            at = datetime.now(UTC) + timedelta(seconds=number % 40 / 10)
            when: dict[str, Any] = [
                {"countdown": number % 40 / 10},
                {"eta": at},
                {"eta": at.replace(tzinfo=None)},
                {"eta": at.isoformat()},
                {"eta": at - timedelta(hours=1)},
            ][number % 5]
            queue = ("plain", "orders")[number % 2]
            batch.send("shop.remind", (number,), queue=queue, **when)
    came = letters.wait_for(count)
    assert sorted(body[0][0] for body in bodies(came)) == list(range(count))
    for arrival in came:
        number = arrival.body[0][0]
        assert arrival.queue == ("plain", "orders")[number % 2]
        eta = arrival.message.headers["eta"]
        if eta:
            due = datetime.fromisoformat(eta)
            due = due if due.tzinfo else due.replace(tzinfo=UTC)
            assert arrival.at >= due.timestamp()
    result = batch.result
    assert (result.sent, result.confirmed, result.refused) == (count, count, [])


def test_headers_of_a_batch_are_in_every_message(app: Celery, letters: Inbox) -> None:
    """Sent by template or not; a task's own headers win."""
    with bulk(app, headers={"tenant": "a", "run": "r/0/0"}) as batch:
        for _ in range(3):
            batch.send("shop.remind", countdown=0.5)
        batch.send("shop.remind", countdown=0.5, headers={"tenant": "b"})
    came = letters.wait_for(4)
    headers = [arrival.message.headers for arrival in came]
    assert sorted(each["tenant"] for each in headers) == ["a", "a", "a", "b"]
    assert {each["run"] for each in headers} == {"r/0/0"}
    assert batch.result.by_template == 1


def test_before_task_publish_is_sent_for_every_task(app: Celery, letters: Inbox) -> None:
    """A receiver sees each task, and may change its headers."""
    heard = []

    def listen(headers: Any = None, **_: Any) -> None:
        heard.append(headers["id"])
        headers["tenant"] = "a"

    with bulk(app) as batch:
        batch.send("shop.remind", countdown=1)
        signals.before_task_publish.connect(listen)
        try:
            ids = [batch.send("shop.remind", countdown=1) for _ in range(3)]
        finally:
            signals.before_task_publish.disconnect(listen)
        batch.send("shop.remind", countdown=1)
    came = letters.wait_for(5)
    assert heard == ids
    tenants = [a.message.headers.get("tenant") for a in came]
    assert sorted(tenants, key=str) == [None, None, "a", "a", "a"]


def test_a_refused_task_does_not_stop_the_batch(unread_app: Celery) -> None:
    with bulk(unread_app) as batch:
        for _ in range(2):
            batch.send("shop.remind", countdown=1)
            with pytest.raises(DelayTooLong):
                batch.send("shop.remind", countdown=3600)
            with pytest.raises(InvalidDueTime):
                batch.send("shop.remind", countdown=float("nan"))
            with pytest.raises(TypeError):
                batch.send("shop.remind", (1, "two", 3), countdown=1)
            with pytest.raises(EncodeError):  # as apply_async
                batch.send("shop.remind", (object(),), countdown=1)
        batch.send("shop.remind", countdown=1)
    assert (batch.result.sent, batch.result.confirmed) == (3, 3)


def test_large_and_unknown_tasks(app: Celery, letters: Inbox) -> None:
    """A body of several AMQP frames, and a task that is not registered."""
    text = "x" * 300_000
    with bulk(app) as batch:
        for _ in range(3):
            batch.send("shop.remind", (1, text), countdown=1)
            batch.send("elsewhere.task", (1,), {"text": text}, countdown=1)
    came = letters.wait_for(6)
    assert {len(a.body[0]) for a in came} == {1, 2}
    assert batch.result.by_template == 2


def test_tasks_without_positional_arguments_go_by_template(unread_app: Celery) -> None:
    """An empty list is shown as an empty tuple, as by Celery."""
    nothings: list[Any] = [(), []]
    for nothing in nothings:
        with bulk(unread_app) as batch:
            for number in range(6):
                batch.send("shop.remind", nothing, {"number": number}, countdown=60)
        assert batch.result.by_template == 4, nothing


def test_outside_its_block_a_batch_sends_nothing_and_says_so(app: Celery) -> None:
    batch = bulk(app)
    with pytest.raises(RuntimeError, match="within the block"):
        batch.send("shop.remind", countdown=1)
    with batch:
        pass
    with pytest.raises(RuntimeError, match="within the block"):
        batch.send("shop.remind", countdown=1)
    assert batch.result.sent == 0


def test_an_app_that_is_not_installed_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedBroker, match="install"):
        bulk(Celery("plain", broker=url, set_as_current=False))


def test_an_incomplete_batch_is_sent_in_time(app: Celery, letters: Inbox) -> None:
    """A task arrives when it is due, without a further send() and before the block ends."""
    with bulk(app) as batch:
        for _ in range(6):
            batch.send("shop.remind", eta=eta_in(0.3))
        assert letters.wait_for(6)


def test_held_tasks_are_sent_on_the_next_connection(broker: Broker) -> None:
    """Also if the block ends right after the connection was lost."""
    with ready_app(broker) as app, inbox(app, "plain") as letters:
        with bulk(app) as batch:
            outbox = batch._publisher.outbox
            with outbox.lock:
                batch.send("shop.remind", countdown=1)
                outbox._lose()
        # On RabbitMQ it may arrive twice.
        assert letters.receive_until(lambda: letters.arrivals)
    assert batch.result.confirmed == 1


def test_a_batch_ends_its_threads(unread_app: Celery) -> None:
    def sends_in_time() -> bool:
        return "native-delay-bulk" in {each.name for each in threading.enumerate()}

    with bulk(unread_app) as batch:
        batch.send("shop.remind", countdown=1)
        assert sends_in_time()
    wait_until(lambda: not sends_in_time())
