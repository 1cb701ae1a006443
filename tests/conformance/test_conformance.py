"""Delayed delivery on every broker: where, as what and when a delayed message arrives.

Features of one broker (delay levels, parking, promoters, maxmemory) are in tests/integration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate, pairwise
from time import time
from typing import Any

import pytest
from kombu import Exchange, Queue

from celery_native_delay import DelaySettings, DelayTooLong, InvalidDueTime, SettingsError
from celery_native_delay.due_time import due_us
from celery_native_delay.transports.interface import Wait
from tests.acceptance.worker import EARLY_SECONDS, Fleet, Worker, fleet_on
from tests.brokers import ON_RABBITMQS
from tests.conformance.brokers import BROKERS as ALL_BROKERS
from tests.conformance.brokers import (
    Broker,
    knows_bindings,
    options_of,
    settings_of,
    whole_seconds,
    without,
)
from tests.conformance.traffic import (
    SETTINGS,
    attended,
    delaying,
    plain,
    waiting_count,
    waiting_now,
)
from tests.traffic import DIRECT, QUEUES, TOPIC, Arrival, Inbox, eta_in, inbox, publish
from tests.waiting import wait_until

#: Valkey answers as Redis does: tests/integration/test_redis_* run on it, and two tests here.
BROKERS = without("valkey")
also_on_valkey = pytest.mark.parametrize("broker", ALL_BROKERS, indirect=True, scope="session")

#: tests/acceptance/test_tasks.py has the retries on the others.
NOT_IN_TEST_TASKS = without("redis", *(str(each.id) for each in ON_RABBITMQS))

FANOUT = Exchange("news", type="fanout")

EVERY_QUEUE = [*QUEUES, Queue("headlines", FANOUT)]

ROUTES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "default": ({"routing_key": "default"}, {"default"}),
    "direct": ({"exchange": DIRECT, "routing_key": "invoice"}, {"invoices", "copies"}),
    "topic": ({"exchange": TOPIC, "routing_key": "orders.today.late"}, {"orders"}),
    "topic-twice": ({"exchange": TOPIC, "routing_key": "orders.urgent"}, {"orders", "urgent"}),
    "fanout": ({"exchange": FANOUT, "routing_key": ""}, {"headlines"}),
}

KNOCK = "Is anybody listening?"

#: Properties that differ between any two messages.
OWN = {"delivery_tag", "delivery_info"}


def as_seen(message: Any) -> dict[str, Any]:
    """Everything that a consumer sees of a message, except its ETA."""
    info = message.delivery_info
    return {
        "body": message.decode(),
        "headers": {k: v for k, v in message.headers.items() if k != "eta"},
        "properties": {k: v for k, v in message.properties.items() if k not in OWN}
        | {"application_headers": None},
        "delivery": {key: info[key] for key in ("exchange", "routing_key")},
        "content": (message.content_type, message.content_encoding),
    }


def everything(boxes: dict[str, Inbox]) -> dict[tuple[str, str], Any]:
    """The arrived messages by queue and route, without knocks; fails if one arrived twice."""
    found = [
        ((queue, arrival.body["route"]), arrival.message)
        for queue, box in boxes.items()
        for arrival in box.arrivals
        if arrival.body != KNOCK
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def overtaken_seconds(arrivals: list[Arrival]) -> float:
    """The most that an arrival was due after a later arrival; 0 if all came in order."""
    due = [arrival.at - arrival.lateness_seconds for arrival in arrivals]
    return max(latest - each for latest, each in zip(accumulate(due, max), due, strict=True))


# ---- destination, content, time ----------------------------------------------------------------


def test_a_delayed_message_arrives_where_and_as_an_undelayed_one(url: str) -> None:
    headers = {"id": "task-1", "customer": {"n": 1.0}}
    routes = {name: ROUTES[name] for name in ROUTES if name != "fanout" or knows_bindings(url)}
    if url.startswith("pgmq://"):  # where kombu 5.7 publishes no header to a topic, delayed or not
        routes = {name: routes[name] for name in ("default", "direct")}
    boxes: dict[str, Inbox] = {}
    with attended(url), delaying(url) as connection:
        for queue in EVERY_QUEUE:
            boxes[queue.name] = Inbox(connection)
            connection.Consumer([queue], callbacks=[boxes[queue.name].receive]).consume()
        receiver = boxes["default"]

        def heard() -> bool:
            # On Redis a consumer subscribes to broadcasts when it is drained.
            publish(connection, KNOCK, "", exchange=FANOUT)
            return receiver.receive_until(lambda: boxes["headlines"].arrivals, timeout_seconds=0.5)

        if knows_bindings(url):
            wait_until(heard)
        expected = sorted((name, route) for route in routes for name in routes[route][1])
        seen = []
        for delay in (None, 1):
            for route, (options, _) in routes.items():
                content = {"route": route, "text": "äöü", "empty": [], "big": 12345678901234567}
                more = {"correlation_id": "c-1", "priority": 3, **options}
                publish(connection, content, headers=headers, delay=delay, **more)
            assert receiver.receive_until(lambda: len(everything(boxes)) >= len(expected))
            arrived = everything(boxes)
            assert sorted(arrived) == expected
            waits = [getattr(each, "native_delay", None) for each in arrived.values()]
            assert {wait is not None for wait in waits} == {delay is not None}
            seen.append({where: as_seen(message) for where, message in arrived.items()})
            for box in boxes.values():
                box.arrivals.clear()
    assert seen[1] == seen[0]


def test_messages_arrive_when_due_and_in_that_order(url: str) -> None:
    """In order within a second: messages may have different numbers of hops."""
    with attended(url), delaying(url) as connection, inbox(connection, "jobs") as received:
        for number in range(60):
            publish(connection, number, "jobs", delay=0.5 + number * 0.0277)
        arrivals = received.wait_for(60)
    assert min(arrival.lateness_seconds for arrival in arrivals) >= -EARLY_SECONDS
    assert overtaken_seconds(arrivals) <= 1 + whole_seconds(url)
    assert sorted(arrival.body for arrival in arrivals) == list(range(60))


def test_a_message_with_a_past_eta_is_published_at_once(url: str) -> None:
    """No worker is needed for it."""
    with delaying(url) as connection, inbox(connection, "jobs") as received:
        publish(connection, "hello", "jobs", delay=-60)
        (arrival,) = received.wait_for(1)
        assert arrival.message.native_delay is None


def test_a_delayed_message_is_kept_until_its_queue_is_declared(url: str) -> None:
    with attended(url), delaying(url) as producer, delaying(url) as connection:
        publish(producer, "hello", "jobs", delay=1.5)  # were it due already, it would be lost
        due = time() + 1.5
        wait_until(lambda: time() > due + 0.5)
        with inbox(connection, "jobs") as received:
            assert received.wait_for(1)[0].body == "hello"


# ---- delivery ids and limits -------------------------------------------------------------------


def test_messages_of_one_task_id_wait_side_by_side(url: str) -> None:
    """Attempts of a task share its id; each delivery has an id of its own."""
    with attended(url), delaying(url) as connection, inbox(connection, "jobs") as received:
        for attempt in range(3):
            publish(connection, attempt, "jobs", delay=0.5, headers={"id": "task-1"})
        arrivals = received.wait_for(3)
        # As a worker retries a task: with the headers that it received.
        headers = arrivals[0].message.headers
        publish(connection, 3, "jobs", headers=headers, delay=0.5)
        arrivals = received.wait_for(4)
    assert sorted(arrival.body for arrival in arrivals) == [0, 1, 2, 3]
    deliveries = {arrival.message.native_delay.delivery_id for arrival in arrivals}
    assert len(deliveries) == 4


def test_a_delay_beyond_the_longest_is_refused_and_nothing_is_sent(url: str) -> None:
    with delaying(url) as connection:
        for headers in ({}, {"task": "shop.remind", "id": "task-1"}):
            with pytest.raises(DelayTooLong, match=r"exceeds the longest delay of 2 min 43\.8"):
                publish(connection, "hello", "jobs", delay=170, headers=headers)
        with pytest.raises(InvalidDueTime):
            publish(connection, "hello", "jobs", headers={"task": "shop.remind", "eta": "soon"})
        assert waiting_count(connection) == 0
        publish(connection, "hello", "jobs", delay=160)
        assert waiting_count(connection) == 1


def test_a_worker_with_a_shorter_limit_puts_a_message_back_until_it_is_due(url: str) -> None:
    """A broker that cannot hold it long enough delivers it early, several times."""
    shorter = SETTINGS | settings_of(url) | {"levels": 6}  # 1.26 s
    settings = DelaySettings.from_mapping(shorter)
    with attended(url), plain(url) as producer, plain(url, native_delay=shorter) as connection:
        channel = connection.default_channel
        part = channel.worker_part(settings)
        part.prepare(url)
        part.serve(["jobs"])
        came: list[Arrival] = []

        def receive(body: Any, message: Any) -> None:
            came.append(Arrival(message, time()))
            if came[-1].lateness_seconds < -EARLY_SECONDS:
                due = due_us(message.headers["eta"])
                assert part.put_back([Wait(message, "jobs", due)]) == [None]
            message.ack()

        with connection.Consumer([Queue("jobs")], callbacks=[receive]):
            publish(producer, "hello", "jobs", delay=3)
            box = Inbox(connection, came)
            assert box.receive_until(lambda: came and came[-1].lateness_seconds >= -EARLY_SECONDS)
            with pytest.raises(DelayTooLong):
                publish(connection, "far", "jobs", delay=5)
    *early, last = came
    assert last.lateness_seconds >= -EARLY_SECONDS
    assert len(early) >= 1
    assert {arrival.body for arrival in came} == {"hello"}


def test_with_a_wrong_setting_immediate_messages_go_and_delayed_ones_are_refused(url: str) -> None:
    wrong = {"native_delay": SETTINGS | settings_of(url) | {"declare": 0}}
    with (
        delaying(url, transport_options=wrong) as connection,
        inbox(connection, "jobs") as received,
    ):
        with pytest.raises(SettingsError, match="native_delay_declare"):
            publish(connection, "later", "jobs", delay=1)
        publish(connection, "now", "jobs")
        assert received.wait_for(1)[0].body == "now"


def test_an_app_without_install_gets_kombus_own_transport(url: str) -> None:
    with delaying(url) as connection:
        publish(connection, "hello", "other", delay=60)
        for options in ({}, {"native_delay": False}, {"native_delay": {"enabled": False}}):
            with plain(url, **options) as untouched, inbox(untouched, "jobs") as received:
                assert type(untouched.default_channel).__module__.startswith("kombu.")
                publish(untouched, "hello", "jobs", delay=60)
                (arrival,) = received.wait_for(1)
                assert type(arrival.message).__module__.startswith("kombu.")
                assert arrival.message.headers.keys() == {"eta"}
        assert waiting_count(connection) == 1


# ---- plain and installed apps ------------------------------------------------------------------


def test_a_plain_consumer_receives_delayed_messages(url: str) -> None:
    with (
        attended(url),
        delaying(url) as connection,
        plain(url) as consumer,
        inbox(consumer, Queue("jobs")) as received,
    ):
        Queue("jobs")(connection.default_channel).declare()
        publish(connection, "hello", "jobs", delay=0.5, headers={"customer": 7})
        (arrival,) = received.wait_for(1)
    assert arrival.body == "hello"
    assert arrival.lateness_seconds >= -EARLY_SECONDS
    assert arrival.message.headers["customer"] == 7


@pytest.fixture(scope="module")
def fleet(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    url = broker.new_space()
    conf: dict[str, Any] = {"broker_transport_options": options_of(url)}
    conf |= {f"native_delay_{name}": value for name, value in settings_of(url).items()}
    with fleet_on(url, tmp_path_factory.mktemp("fleet"), **conf) as fleet:
        yield fleet
    broker.remove_space(url)


@pytest.fixture(scope="module")
def worker(fleet: Fleet) -> Worker:
    return fleet.worker()


@pytest.mark.parametrize("broker", NOT_IN_TEST_TASKS, indirect=True, scope="session")
@pytest.mark.usefixtures("worker")
def test_a_task_that_retries_comes_back_to_its_queue(fleet: Fleet) -> None:
    app = fleet.app()
    routes = {
        "no route": {},
        "queue": {"queue": "side"},
        "topic": {"queue": "orders"},
        "direct": {"queue": "invoices"},
    }
    if not knows_bindings(fleet.broker_url):
        # Retries, also undelayed ones, find no queue: a worker's process knows no bindings.
        del routes["topic"], routes["direct"]
    before = time()
    sent = {
        route: app.tasks["again"].apply_async((3, 0.3), countdown=1, **options).id
        for route, options in routes.items()
    }
    after = time()
    for route, task_id in sent.items():
        runs = fleet.record.wait_for(4, task_id=task_id)
        assert [run.retries for run in runs] == [0, 1, 2, 3], route
        assert len({run.delivery_info["routing_key"] for run in runs}) == 1, route
        runs[0].assert_on_time(before + 1, after + 1)
        for earlier, run in pairwise(runs):
            assert run.due is not None
            assert run.due >= earlier.started + 0.3
            run.assert_on_time(run.due)


@also_on_valkey
def test_an_installed_worker_puts_back_what_a_plain_producer_sent(
    fleet: Fleet, worker: Worker
) -> None:
    app = fleet.app()
    inspect = app.control.inspect(destination=[worker.name], timeout=10)

    def held_by_nobody() -> bool:
        if not knows_bindings(fleet.broker_url):
            with app.connection_for_write() as connection:
                return waiting_now(connection, "default") == len(far)
        return bool(inspect.scheduled() == {worker.name: []})

    code = (
        "import json\n"
        "send = app.tasks['note'].apply_async\n"
        "print(json.dumps([[send((n,), countdown=c).id for n in range(50)] for c in (150, 4)]))"
    )
    far, near = json.loads(fleet.produce(code))
    by_id = fleet.record.wait_for_ids(near)
    wait_until(held_by_nobody)
    assert [run for run in fleet.record.runs() if run.id in far] == []
    for task_id in near:
        (run,) = by_id[task_id]
        assert run.due is not None
        run.assert_on_time(run.due)


# ---- outages -----------------------------------------------------------------------------------


def test_a_producer_goes_on_after_its_broker_was_wiped(broker: Broker, url: str) -> None:
    with delaying(url) as producer:
        publish(producer, "lost", "jobs", delay=60)
        broker.wipe(url)
        publish(producer, "hello", "jobs", delay=0.5)
        publish(producer, "again", "jobs", delay=0.5)
        with attended(url), delaying(url) as connection, inbox(connection, "jobs") as received:
            arrivals = received.wait_for(2)
    assert {arrival.body for arrival in arrivals} == {"hello", "again"}
    assert min(arrival.lateness_seconds for arrival in arrivals) >= -EARLY_SECONDS


@pytest.mark.parametrize("used", [True, False], ids=["used before", "never used"])
def test_a_publish_on_a_closed_connection_is_retried_and_sent_once(url: str, used: bool) -> None:
    """It raises one of kombu's recoverable errors."""
    with attended(url), delaying(url) as connection:
        producer = connection.Producer()
        eta = {"headers": {"eta": eta_in(1)}, "routing_key": "jobs"}
        if used:
            producer.publish("before", **eta)
        else:
            assert producer.channel.connection is not None
        connection.collect()  # as kombu does when anything else on it met an outage
        far = eta | {"headers": {"eta": eta_in(60)}}  # one that is due would be kombu's affair
        for exchange in ("", TOPIC.name):
            with pytest.raises(connection.recoverable_connection_errors):
                producer.publish("refused", exchange=exchange, **far)
        producer.publish("again", **eta, retry=True, retry_policy={"max_retries": 3})
        with delaying(url) as reading, inbox(reading, "jobs") as received:
            arrivals = received.wait_for(1 + used)
            publish(reading, "last", "jobs")
            received.receive_until(lambda: received.arrivals[-1].body == "last")
    assert sorted(each.body for each in arrivals) == ["again", "before"][: 1 + used]
    assert [each.body for each in received.arrivals[1 + used :]] == ["last"]


def test_messages_wait_through_a_restart(broker: Broker, url: str) -> None:
    with delaying(url) as producer:
        Queue("jobs")(producer.default_channel).declare()
        for number in range(40):
            publish(producer, number, "jobs", delay=2 if number < 20 else 5)
    broker.restart()
    with attended(url), delaying(url) as connection, inbox(connection, "jobs") as received:
        # A broker may duplicate messages that it was moving; both copies have one delivery id.
        assert received.receive_until(lambda: len(deliveries_of(received)) >= 40)
    deliveries = deliveries_of(received)
    assert sorted(deliveries.values()) == list(range(40))
    assert min(arrival.lateness_seconds for arrival in received.arrivals) >= -EARLY_SECONDS


def deliveries_of(received: Inbox) -> dict[str, Any]:
    """Bodies by delivery id, or by body if the message was due before the levels existed."""
    waits = [(arrival.message.native_delay, arrival.body) for arrival in received.arrivals]
    return {wait.delivery_id if wait else body: body for wait, body in waits}
