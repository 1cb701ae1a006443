"""Publishing with confirms in a window: fast, and nothing is lost or dropped in silence."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from kombu import Connection, Producer, Queue

from celery_native_delay import PublishRefused, flush_delayed
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.rabbitmq.outbox import Outbox
from tests.brokers import LARGEST_MESSAGE
from tests.integration.traffic import (
    SETTINGS,
    TOPOLOGY,
    bodies,
    declare_queue,
    delaying,
    delays_of,
    delete_levels,
    inbox,
)
from tests.traffic import eta_in, publish
from tests.waiting import PATIENCE_SECONDS, wait_until

ORDERS = Queue("orders", durable=True)


def windowed(url: str, **settings: Any) -> Any:
    return delaying(url, confirm_publish="window", **settings)


@pytest.fixture
def connection(vhost_url: str) -> Iterator[Any]:
    with windowed(vhost_url) as connection:
        delays_of(connection).prepare()
        declare_queue(connection, "orders")
        yield connection


def outbox_of(connection: Any) -> Outbox:
    return delays_of(connection).outbox


# ---- sending ---------------------------------------------------------------------------------


def test_flushing_waits_until_the_broker_has_everything(connection: Any, vhost_url: str) -> None:
    for number in range(3_000):  # three windows
        publish(connection, number, "orders", delay=128 * SETTINGS["resolution"])
    flush_delayed()
    assert outbox_of(connection).unconfirmed_count == 0
    with inbox(vhost_url, "orders") as letters:
        came = letters.wait_for(3_000)
    assert sorted(bodies(came)) == list(range(3_000))
    assert all(arrival.waited for arrival in came)


def test_no_more_than_the_window_is_unconfirmed(vhost_url: str) -> None:
    with windowed(vhost_url, confirm_window=7) as connection:
        declare_queue(connection, "orders")
        most = 0
        for number in range(200):
            publish(connection, number, "orders", delay=0.5)
            most = max(most, outbox_of(connection).unconfirmed_count)
        assert 1 < most <= 7
        flush_delayed()


def test_what_no_further_publish_comes_for_is_confirmed_by_itself(connection: Any) -> None:
    publish(connection, "alone", "orders", delay=0.5)
    wait_until(lambda: not outbox_of(connection).unconfirmed_count)


def test_threads_share_one_window(vhost_url: str) -> None:
    """Each publishes on a connection of its own, as from a pool; others flush meanwhile."""

    def send(first: int) -> None:
        with windowed(vhost_url) as connection:
            declare_queue(connection, "orders")
            for number in range(first, first + 200):
                publish(connection, number, "orders", delay=2)
            flush_delayed()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(0, 800, 200)))
    with inbox(vhost_url, "orders") as letters:
        assert sorted(bodies(letters.wait_for(800))) == list(range(800))


# ---- connections and brokers that die --------------------------------------------------------


def declare_for_good(broker: PrivateRabbitMQ, connection: Any) -> None:
    """The levels and `orders`, so that SIGKILL finds them on disk.

    RabbitMQ writes down half a second late that a quorum queue exists, and a node killed before
    starts it empty, whatever it had confirmed (ra_directory.erl: auto_save). A good end writes all.
    """
    delays_of(connection).prepare()
    declare_queue(connection, "orders")
    broker.stop()
    broker.start()


@pytest.mark.ci
def test_the_broker_is_killed_in_the_middle_of_a_loop(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str
) -> None:
    """Nothing is lost, and a message that comes twice has the same delivery id both times."""
    count = 6_000
    half = Event()

    def restart() -> None:
        half.wait(PATIENCE_SECONDS)
        mortal_rabbitmq.kill()
        mortal_rabbitmq.start()

    killer = Thread(target=restart)
    # Long enough for the broker to be back before anything is due.
    with windowed(mortal_url, levels=12) as connection:
        declare_for_good(mortal_rabbitmq, connection)
        killer.start()
        producer = Producer(connection)
        for number in range(count):
            if number == count // 2:
                half.set()
            producer.publish(
                number,
                routing_key="orders",
                declare=[ORDERS],
                headers={"eta": eta_in(1024 * SETTINGS["resolution"])},
                retry=True,
                retry_policy={"max_retries": 600, "interval_start": 0.1, "interval_max": 0.1},
            )
        killer.join()
        flush_delayed()
        assert outbox_of(connection).connects > 1
    came = everything_in(mortal_url, "orders", count)
    assert set(Counter(body for body, _ in came)) == set(range(count))
    assert len({delivery_id for _, delivery_id in came}) == count


def everything_in(url: str, queue: str, count: int) -> list[tuple[Any, str]]:
    """Body and delivery id of all that comes until *count* different bodies have."""
    with inbox(url, queue) as letters:
        letters.receive_until(lambda: len(set(bodies(letters.arrivals))) >= count)
        return [(a.body, a.message.native_delay.delivery_id) for a in letters.arrivals]


@pytest.mark.ci
def test_a_dead_connection_is_replaced_without_any_further_publish(
    connection: Any, vhost_url: str
) -> None:
    """What was unconfirmed goes out again under the same delivery id."""
    outbox = outbox_of(connection)
    publish(connection, "first", "orders", delay=2)
    # Nobody reads the confirm, and the socket is gone.
    outbox._client.connection.transport.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not outbox.unconfirmed_count)
    came = everything_in(vhost_url, "orders", 1)
    assert {body for body, _ in came} == {"first"}
    assert len({delivery_id for _, delivery_id in came}) == 1


def test_the_levels_are_deleted_under_a_window(
    connection: Any, vhost_url: str, rabbitmq: PrivateRabbitMQ
) -> None:
    """They are declared again, and what came back or was cut off is sent again."""
    publish(connection, "gone with the levels", "orders", delay=5)
    flush_delayed()
    delete_levels(rabbitmq, vhost_url)
    for number in range(10):
        publish(connection, number, "orders", delay=2)
    flush_delayed()
    publish(connection, "after", "orders", delay=2)
    with inbox(vhost_url, "orders") as letters:
        assert set(bodies(letters.wait_for(11))) == {*range(10), "after"}


def test_a_level_queue_is_deleted_under_a_window(connection: Any, vhost_url: str) -> None:
    """The messages come back, the queue is declared again, they are sent again."""
    publish(connection, "before", "orders", delay=2)
    flush_delayed()
    with Connection(vhost_url) as admin:
        for hop in TOPOLOGY.level_queues:
            admin.default_channel.queue_delete(hop.queue)
    for number in range(10):
        publish(connection, number, "orders", delay=2)
    flush_delayed()
    with inbox(vhost_url, "orders") as letters:
        assert sorted(bodies(letters.wait_for(10))) == list(range(10))


# ---- refusals --------------------------------------------------------------------------------


def test_refused_messages_are_named_once(
    connection: Any, vhost: str, rabbitmq: PrivateRabbitMQ
) -> None:
    """A policy fills a level: flushing names what did not fit, then all is well again."""
    rabbitmq.set_policy(vhost, "full", f"^{TOPOLOGY.level_queue(128)}$", {"max-length": 3})

    def is_limited() -> bool:
        queues = rabbitmq.queues(vhost)
        return any(queue.get("policy") == "full" for queue in queues)

    wait_until(is_limited)

    def refusal() -> PublishRefused | None:
        """The queue tells its publishers a moment after it is full."""
        try:
            for number in range(20):
                headers = {"id": f"n{number}", "task": "shop.remind"}
                publish(connection, number, "orders", delay=5, headers=headers)
            flush_delayed()
        except PublishRefused as exc:
            return exc
        return None

    refused = wait_until(refusal).refused
    assert 0 < len(refused) <= 20
    assert {message.routing_key for message in refused} == {"orders"}
    assert len({message.task_id for message in refused}) == len(refused)
    with suppress(PublishRefused):  # those before the one that was not sent
        flush_delayed()

    publish(connection, "refused", "orders", delay=5)
    wait_until(lambda: not outbox_of(connection).unconfirmed_count)
    with pytest.raises(PublishRefused, match="this message was not sent"):
        publish(connection, "not sent", "orders", delay=1)
    rabbitmq.clear_policy(vhost, "full")
    publish(connection, "taken", "orders", delay=1)
    flush_delayed()


def test_a_message_that_closes_the_channel_is_found_out(mortal_url: str) -> None:
    """It is named; those around it wait as if it had not been there."""
    with windowed(mortal_url) as connection:
        declare_queue(connection, "orders")
        for body in ("a", "b", "x" * (2 * LARGEST_MESSAGE), "c", "d"):
            publish(connection, body, "orders", delay=2)
        with pytest.raises(PublishRefused, match="larger than") as refused:
            flush_delayed()
        assert [len(message.body) > LARGEST_MESSAGE for message in refused.value.refused] == [True]
        with inbox(mortal_url, "orders") as letters:
            # RabbitMQ forgets the confirms of a channel that it closes: some may come twice.
            letters.receive_until(lambda: set(bodies(letters.arrivals)) == {"a", "b", "c", "d"})
            assert set(bodies(letters.arrivals)) == {"a", "b", "c", "d"}


# ---- processes -------------------------------------------------------------------------------

EXITING = f"""
import os, sys
from kombu import Connection, Producer
from celery_native_delay import delay_headers
option = {SETTINGS | {"confirm_publish": "window"}!r}
connection = Connection(sys.argv[1], transport_options={{"native_delay": option}})
for number in range(500):
    Producer(connection).publish(
        number, routing_key="orders", headers=delay_headers(countdown=3)
    )
{{rest}}
"""


def run(url: str, rest: str = "") -> None:
    subprocess.run([sys.executable, "-c", EXITING.replace("{rest}", rest), url], check=True)


def test_a_process_that_ends_has_sent_everything(connection: Any, vhost_url: str) -> None:
    run(vhost_url)
    with inbox(vhost_url, "orders") as letters:
        assert sorted(bodies(letters.wait_for(500))) == list(range(500))


FORKS = """
from celery_native_delay import flush_delayed
if not os.fork():
    Producer(connection.clone()).publish(
        "child", routing_key="orders", headers=delay_headers(countdown=3)
    )
    flush_delayed()
    os._exit(0)
os.wait()
Producer(connection).publish("parent", routing_key="orders", headers=delay_headers(countdown=3))
"""


def test_a_forked_child_sends_its_own_and_leaves_the_parents_alone(
    connection: Any, vhost_url: str
) -> None:
    run(vhost_url, FORKS)
    with inbox(vhost_url, "orders") as letters:
        came = letters.wait_for(502)
        assert set(bodies(came)) == {*range(500), "child", "parent"}


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_process_ends_while_the_broker_is_away(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, tmp_path: Path
) -> None:
    """It waits for the broker to come back, and sends what was in doubt."""
    with windowed(mortal_url) as connection:
        declare_for_good(mortal_rabbitmq, connection)
    killed, sent = tmp_path / "killed", tmp_path / "sent"
    rest = f"""
import pathlib, time
from celery_native_delay.transports.rabbitmq import outbox
outbox.EXIT_SECONDS = 150  # RabbitMQ may take a minute to boot on a machine that is busy
pathlib.Path({str(sent)!r}).touch()
while not pathlib.Path({str(killed)!r}).exists():
    time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", EXITING.replace("{rest}", rest), mortal_url])
    try:
        wait_until(sent.exists)
        mortal_rabbitmq.kill()
        killed.touch()
        mortal_rabbitmq.start()
        assert process.wait(150) == 0
    finally:
        process.poll() is None and process.send_signal(signal.SIGKILL)
    came = everything_in(mortal_url, "orders", 500)
    assert {body for body, _ in came} == set(range(500))
