"""What waits in RabbitMQ, kept by RabbitMQ itself: the promises of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident
from time import monotonic, time
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, LedgerUnavailable, Verdict, install
from celery_native_delay.finding import WRONG
from celery_native_delay.message import Delayed
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, vhost_name
from celery_native_delay.transports.interface import Answer
from celery_native_delay.transports.rabbitmq.streams import connection as stream_connection
from celery_native_delay.transports.rabbitmq.streams import follower
from celery_native_delay.transports.rabbitmq.streams import ledger as stream_ledger
from celery_native_delay.transports.rabbitmq.streams.connection import StreamConnection
from celery_native_delay.transports.rabbitmq.streams.follower import Follower
from celery_native_delay.transports.rabbitmq.streams.ledger import (
    MARGIN_SECONDS,
    Followed,
    StreamLedger,
)
from celery_native_delay.transports.rabbitmq.streams.receipts import StreamReceipts
from tests.integration.ledger_promises import QUEUE, close_results, send
from tests.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def app(rabbitmq: PrivateRabbitMQ, vhost_url: str, ledger_redis: PrivateRedis) -> Iterator[Celery]:
    app = Celery("shop", broker=vhost_url, set_as_current=False)
    app.conf.result_backend = ledger_redis.url.replace("/0", "/1")
    yield install(app, ledger="stream", management_url=rabbitmq.management_url)
    close_results(app)
    app.close()


@pytest.fixture
def delay(app: Celery) -> Delay:
    return Delay(app)


def test_what_is_due_in_a_moment_can_no_longer_be_changed(
    app: Celery, delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker might not have read of it in time; whoever asks is told when it is due."""
    monkeypatch.setattr(stream_ledger, "MARGIN_SECONDS", 60)
    send(app, 0, countdown=3600)  # declares
    assert delay.count() == 1
    send(app, 1, countdown=59)
    for outcome in (delay.cancel("order-1"), delay.run_now("order-1")):
        assert outcome.verdict is Verdict.TOO_LATE
        assert re.search(r"it is due in [1-5]\d s", str(outcome))
    assert delay.count() == 2


def test_who_follows_reads_what_others_send_and_writes_nothing(
    app: Celery, delay: Delay, vhost_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor that asks every second would fill the streams; and is not read anew each time."""
    send(app, 1, countdown=3600)
    assert delay.count() == 1
    monkeypatch.setattr(StreamConnection, "write", None)
    monkeypatch.setattr(Follower, "start", None)
    other = f"""
from celery import Celery
from celery_native_delay import install
with install(Celery("shop", broker={vhost_url!r}), ledger="stream") as app:
    app.send_task("shop.remind", countdown=3600, queue="reminders")
"""
    subprocess.run([sys.executable, "-c", other], check=True, timeout=PATIENCE_SECONDS)

    def both() -> bool:
        return delay.count() == 2

    wait_until(both)


@pytest.mark.ci
def test_the_plan_is_on_the_broker_and_a_purge_empties_ledger_and_levels(
    app: Celery, delay: Delay, rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    for number in range(3):
        send(app, number, countdown=3600 * 40**number)
    with app.connection_for_write() as connection:
        admin = connection.default_channel.admin_part(app._native_delay.settings())
        assert [each for each in admin.verify() if each.level == WRONG] == []
        assert admin.backlog().ledger_answers
        assert admin.purge() == 3
        assert admin.backlog().until_first_us is None
    send(app, 7, countdown=3600)
    assert [task.id for task in delay.ls().tasks] == ["order-7"]
    with app.connection_for_write() as connection:
        admin = connection.default_channel.admin_part(app._native_delay.settings())
        vhost = vhost_name(vhost_url)
        rabbitmq.set_policy(vhost, "short", "ledger", {"max-age": "1h"})
        assert "sets max-age" in str(admin.verify())


@pytest.mark.ci
def test_a_stream_that_was_deleted_is_declared_again(app: Celery, delay: Delay) -> None:
    """Tasks wait meanwhile as ever; those sent after that are in the ledger."""
    send(app, 1, countdown=3600)
    assert delay.count() == 1
    with app.connection_for_write() as connection:
        channel = connection.channel()
        for stream in connection.default_channel.delays.topology.ledger.of_entries:
            channel.queue_delete(stream.name)
    sent = 0

    def listed_again() -> bool:
        nonlocal sent
        sent += 1
        send(app, sent, countdown=3600)
        return delay.count() > 0

    wait_until(listed_again)
    with app.connection_for_write() as connection:
        admin = connection.default_channel.admin_part(app._native_delay.settings())
        assert [each for each in admin.verify() if each.level == WRONG] == []
        assert admin.backlog().waiting == sent + 1


@pytest.mark.ci
def test_nobody_is_answered_from_streams_that_are_being_read_anew(
    app: Celery, delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between the look whether all was read, and the question."""
    for number in range(50):
        send(app, number, countdown=3600)
    assert delay.count() == 50
    restarted = Event()
    restart, up_to_date = Followed.restart, StreamLedger._up_to_date

    def restart_and_tell(followed: Followed) -> None:
        restart(followed)
        restarted.set()

    def and_then_lost(ledger: StreamLedger) -> Followed:
        followed = up_to_date(ledger)
        followed.follower._client.connection.sock.shutdown(socket.SHUT_RDWR)
        assert restarted.wait(PATIENCE_SECONDS)
        return followed

    monkeypatch.setattr(Followed, "restart", restart_and_tell)
    monkeypatch.setattr(StreamLedger, "_up_to_date", and_then_lost)
    assert delay.count() == 50


@pytest.mark.ci
def test_what_is_sent_while_the_ledgers_connection_is_lost_is_listed(
    app: Celery, delay: Delay, vhost_url: str
) -> None:
    """As when a node of a cluster dies: publishing goes on at once, the ledger a second later."""
    send(app, 0, countdown=3600)
    assert delay.count() == 1
    line = list(stream_connection._connections.values())[-1]
    line._backoff.seconds = 4.0  # long enough for a busy machine to send a hundred
    line._client.connection.sock.shutdown(socket.SHUT_RDWR)
    for number in range(1, 101):
        send(app, number, countdown=3600)
    assert line._channel is None, "it was not lost, or is back already"
    assert delay.count() == 101


@pytest.mark.ci
def test_who_may_declare_nothing_uses_what_is_there(
    app: Celery, rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    """Also on a connection after one that was lost."""
    send(app, 1, countdown=3600)
    vhost = vhost_name(vhost_url)
    url = rabbitmq.add_user(f"limited-{vhost}", "secret", configure="^$", vhost=vhost)
    with Celery("shop", broker=url, set_as_current=False) as limited:
        delay = Delay(install(limited, ledger="stream"))
        assert delay.count() == 1
        followed = list(stream_ledger._followed.values())[-1]
        followed.follower._client.connection.sock.shutdown(socket.SHUT_RDWR)

        def cancelled() -> bool:
            try:
                return bool(delay.cancel("order-1"))
            except LedgerUnavailable:
                return False

        wait_until(cancelled)


@pytest.mark.ci
def test_a_node_that_cannot_read_the_streams_is_left_for_the_next(
    app: Celery, delay: Delay, rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    """As one that joined the cluster later; here it is another user who is refused."""
    send(app, 1, countdown=3600)
    (task,) = delay.show("order-1")
    vhost = vhost_name(vhost_url)
    refusing = rabbitmq.add_user(f"blind-{vhost}", "secret", read="^$", vhost=vhost)
    url = f"{refusing};{vhost_url}"
    with Celery("shop", broker=url, set_as_current=False) as other:
        elsewhere = Delay(install(other, ledger="stream"))

        def shown() -> bool:
            try:
                return elsewhere.show("order-1") == [task]
            except LedgerUnavailable:
                return False

        wait_until(shown)


@pytest.mark.ci
def test_a_worker_knows_when_it_cannot_tell_and_never_forgets(
    mortal_streams: PrivateRabbitMQ, mortal_url: str
) -> None:
    """Its reader is lost with the broker, comes back, and knows what was decided meanwhile."""
    app = Celery("shop", broker=mortal_url, set_as_current=False)
    install(app, ledger="stream")
    delay = Delay(app)
    ids = {}
    for name in ("before", "after", "kept"):
        send(app, 1, task_id=name, countdown=3600)
        ids[name] = delay.show(name)[0].delivery_id
    assert delay.cancel("before")
    with app.connection_for_write() as connection:
        topology = connection.default_channel.delays.topology
        receipts = StreamReceipts(connection, topology)

    def answer(name: str) -> Answer:
        delayed = Delayed(ids[name], round(time() * 1_000_000), "", QUEUE)
        return receipts.may_run({"task": "shop.remind", "id": name}, delayed)

    assert [answer(name) for name in ids] == [Answer.DROP, Answer.RUN, Answer.RUN]
    mortal_streams.kill()
    wait_until(lambda: answer("kept") is Answer.AWAY or None)
    assert answer("before") is Answer.DROP
    wait_until(lambda: is_away(delay))
    mortal_streams.start()
    assert delay.cancel("after")
    wait_until(lambda: answer("kept") is Answer.RUN or None)
    margin_ends = monotonic() + MARGIN_SECONDS

    def is_dropped() -> bool:
        found = answer("after")
        assert found is not Answer.RUN or monotonic() < margin_ends
        return found is Answer.DROP

    wait_until(is_dropped)
    assert [answer(name) for name in ids] == [Answer.DROP, Answer.DROP, Answer.RUN]
    receipts.close()
    app.close()


def is_away(delay: Delay) -> bool:
    try:
        delay.count()
    except (LedgerUnavailable, OSError):
        return True
    return False


@pytest.mark.ci
def test_a_worker_that_has_fallen_behind_heeds_what_it_reads_while_it_waits(
    app: Celery, delay: Delay
) -> None:
    send(app, 1, countdown=3600)
    (task,) = delay.show("order-1")
    with app.connection_for_write() as connection:
        receipts = StreamReceipts(connection, connection.default_channel.delays.topology)
    delayed = Delayed(task.delivery_id, round(time() * 1_000_000), "", QUEUE)
    reading = receipts._follower
    wait_until(lambda: reading.is_fresh)
    with ThreadPoolExecutor(1) as executor:
        with reading.lock:  # its thread does not have its turn
            assert delay.cancel("order-1")
            wait_until(lambda: not reading.is_fresh)
            headers = {"task": "shop.remind", "id": "order-1"}
            answer = executor.submit(receipts.may_run, headers, delayed)
        assert answer.result(timeout=PATIENCE_SECONDS) is Answer.DROP
    receipts.close()


@pytest.mark.ci
def test_a_broker_that_hangs_is_taken_for_lost_and_read_again(
    mortal_streams: PrivateRabbitMQ, mortal_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket stays open, as that of a machine that vanished behind a proxy."""
    monkeypatch.setattr(follower, "_UNANSWERED_SECONDS", 1)
    app = Celery("shop", broker=mortal_url, set_as_current=False)
    delay = Delay(install(app, ledger="stream"))
    send(app, 1, countdown=3600)
    assert delay.count() == 1
    assert mortal_streams.pid is not None
    os.kill(mortal_streams.pid, signal.SIGSTOP)
    try:
        followed = list(stream_ledger._followed.values())[-1]
        wait_until(lambda: followed.follower._error is not None)
    finally:
        os.kill(mortal_streams.pid, signal.SIGCONT)

    def counted_again() -> bool:
        try:
            return delay.count() == 1
        except LedgerUnavailable:
            return False

    wait_until(counted_again)
    app.close()


@pytest.mark.ci
def test_a_workers_question_is_answered_from_memory(
    app: Celery, delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microseconds, without a word to the broker: what it costs that nothing was cancelled."""
    send(app, 1, countdown=3600)
    with app.connection_for_write() as connection:
        topology = connection.default_channel.delays.topology
        receipts = StreamReceipts(connection, topology)
    delayed = Delayed("id", 0, "", QUEUE)
    headers = {"task": "shop.remind", "id": "1"}
    mine = get_ident()

    def refuse(*_: Any) -> None:
        assert get_ident() != mine, "it asked the broker"

    with monkeypatch.context() as patched:
        for name in ("write", "read_frame"):
            patched.setattr(f"amqp.transport._AbstractTransport.{name}", refuse)
        assert all(receipts.may_run(headers, delayed) is Answer.RUN for _ in range(1000))
    receipts.close()
