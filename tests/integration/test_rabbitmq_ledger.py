"""Beside RabbitMQ, what waits is kept in a Redis: the same promises, and those of the races."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from time import monotonic, time_ns
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Delay, DelayTooLong, LedgerUnavailable, NoLedger, install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
    vhost_name,
)
from celery_native_delay.transports.rabbitmq.ledger.connection import (
    PATIENCE_SECONDS as LEDGER_PATIENCE_SECONDS,
)
from celery_native_delay.transports.rabbitmq.ledger.connection import (
    LedgerConnection,
    ledger_connection,
)
from celery_native_delay.transports.rabbitmq.ledger.entry import Entry
from celery_native_delay.transports.rabbitmq.ledger.scripts import (
    MARK_GRACE_MS,
    REPLACE,
    STALE_AFTER_US,
    LedgerKeys,
)
from tests.integration.ledger_promises import *  # noqa: F403
from tests.waiting import wait_until

KEYS = LedgerKeys("celery_delay")


def keys_of(app: Celery) -> LedgerKeys:
    return LedgerKeys("celery_delay", app.connection_for_write().virtual_host)


def line_for(app: Celery) -> LedgerConnection:
    return ledger_connection(app.conf.native_delay_ledger, "celery_delay", keys_of(app).vhost)


@pytest.fixture(scope="module")
def vhost_url(rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """One for all: what a test leaves in its levels is due in an hour."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def app(vhost_url: str, ledger_redis: PrivateRedis) -> Iterator[Celery]:
    app = Celery("shop", broker=vhost_url, set_as_current=False)
    app.conf.result_backend = ledger_redis.url.replace("/0", "/1")
    yield install(app, ledger=ledger_redis.url)
    close_results(app)  # noqa: F405
    app.close()


@pytest.fixture
def plain_app(vhost_url: str) -> Iterator[Celery]:
    with Celery("shop", broker=vhost_url, set_as_current=False) as app:
        yield app


def test_without_a_ledger_the_way_out_is_told(vhost_url: str) -> None:
    with install(Celery("shop", broker=vhost_url, set_as_current=False)) as app:
        with pytest.raises(NoLedger, match="set native_delay_ledger"):
            Delay(app).ls()
        app.control.revoke("order-1")  # as ever


@pytest.mark.ci
def test_virtual_hosts_may_share_a_redis(
    app: Celery, rabbitmq: PrivateRabbitMQ, ledger_redis: PrivateRedis
) -> None:
    """Their tasks never meet, though all settings be the same."""
    ledger_redis.client.flushall()
    url = rabbitmq.new_vhost()
    with install(
        Celery("bills", broker=url, set_as_current=False), ledger=ledger_redis.url
    ) as other:
        send(app, 1, countdown=3600)  # noqa: F405
        send(other, 2, countdown=3600)  # noqa: F405
        assert Delay(other).ids() == ["order-2"]
        assert Delay(app).ids() == ["order-1"]
        assert not Delay(app).cancel("order-2")
    rabbitmq.delete_vhost(vhost_name(url))


def test_the_ledgers_password_is_not_shown() -> None:
    app = install(
        Celery("shop", broker="amqp://", set_as_current=False),
        ledger="redis://:secret@localhost/3",
    )
    assert "secret" not in repr(app.connection_for_write().transport_options)
    app.close()


def test_what_is_thrown_away_where_it_is_parked_is_listed_no_more(
    app: Celery, delay: Delay
) -> None:
    """What waits in the levels is, as ever."""
    send(app, 1, countdown=3600)  # noqa: F405
    send(app, 2, countdown=3600, queue="nobody")  # noqa: F405
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete("nobody")
        for number in range(3, 153):
            send(app, number, countdown=1, queue="nobody")  # noqa: F405
        admin = connection.default_channel.admin_part(app._native_delay.settings())
        wait_until(lambda: admin.backlog().parked == 150)
        assert delay.count() == 152
        assert admin.purge_parked() == 150
        assert admin.backlog().parked == 0
        assert admin.purge_parked() == 0
    wait_until(lambda: delay.count() == 2)
    assert [task.id for task in delay.ls().tasks] == ["order-1", "order-2"]


def test_a_template_records_what_apply_async_does(app: Celery, ledger_redis: PrivateRedis) -> None:
    """All that is needed to send the message again, when its task is moved or cancelled."""
    options = {"countdown": 3600, "priority": 3, "queue": "side", "headers": {"tenant": 7}}
    ledger_redis.client.flushall()
    with bulk(app, headers={"tenant": 7}) as batch:
        for number in range(3):
            batch.send("shop.remind", (number, "äöü"), countdown=3600, queue="side", priority=3)
    sent = app.send_task("shop.remind", (2, "äöü"), **options)
    line_for(app).flush()
    entries = {
        member.decode().partition(":")[0]: Entry.decoded(data)
        for member, data in ledger_redis.client.hgetall(keys_of(app).messages).items()
    }
    assert len(entries) == 4
    expected = entries.pop(sent.id)
    for task_id, entry in entries.items():
        headers = entry.headers
        assert headers["id"] == headers["root_id"] == entry.properties["correlation_id"] == task_id
        assert json.loads(entry.body)[0] == [int(headers["argsrepr"][1]), "äöü"]
    own = {name: expected.headers[name] for name in ("id", "root_id", "eta")}
    last = next(each for each in entries.values() if each.body == expected.body)
    same = {**last.properties, "correlation_id": sent.id}
    same["application_headers"] = {**last.headers, **own}
    assert replace(last, properties=same) == expected


def test_what_is_thrown_away_or_was_never_sent_does_not_stay_in_the_ledger(
    app: Celery, ledger_redis: PrivateRedis
) -> None:
    """Else it could be run after all; what is due is with a worker soon, and is kept."""
    delay = Delay(app)
    ledger_redis.client.flushall()
    with pytest.raises(struct.error):  # AMQP has room for 255 bytes
        send(app, 1, countdown=3600, task_id="x" * 300)  # noqa: F405
    line = line_for(app)
    line.flush()
    assert delay.ls().tasks == ()
    send(app, 2, countdown=3600)  # noqa: F405
    line.record("due:d", time_ns() // 1000, b"[]\n")
    line.flush()
    with app.connection_for_write() as connection:
        assert connection.default_channel.admin_part(app._native_delay.settings()).purge()
    assert ledger_redis.client.zrange(keys_of(app).ids, 0, -1) == [b"due:d"]
    ledger_redis.client.flushall()


# ---- the races of a move ---------------------------------------------------------------------


class Race:
    """One task that is moved, step by step, beside workers that receive its two messages."""

    def __init__(self, server: PrivateRedis) -> None:
        self.client = server.client
        self.client.flushall()
        self.line = ledger_connection(server.url, "celery_delay")
        self.due_us = time_ns() // 1000
        self.line.record("task:old", self.due_us, b"old")
        self.line.flush()
        self.mark = KEYS.marks + "new"
        self.client.set(self.mark, "task:old", px=MARK_GRACE_MS)
        self.ran: list[str] = []
        self.counts: bool | None = None

    def receive(self, delivery: str) -> None:
        if self.line.received(f"task:{delivery}"):
            self.ran.append(delivery)

    def replace(self) -> None:
        keys = [*KEYS.index, f"{KEYS.marks}old", self.mark]
        arguments = ["task:old", 1000, "task:new", self.due_us, b"new", 1000]
        self.counts = bool(self.client.eval(REPLACE, len(keys), *keys, *arguments))


def test_a_moved_task_runs_once_whatever_comes_first(ledger_redis: PrivateRedis) -> None:
    """Also if the mover dies between its steps, and if messages are delivered again."""
    steps = ("old", "new", "replace")
    orders = [order for length in (2, 3) for order in permutations(steps, length)]
    for order in orders:
        if not {"old", "new"} <= set(order):
            continue
        race = Race(ledger_redis)
        for step in order:
            race.replace() if step == "replace" else race.receive(step)
        assert len(race.ran) == 1, order
        if race.counts is not None:
            assert race.counts is (race.ran == ["new"]), order
        loser = "new" if race.ran == ["old"] else "old"
        race.receive(loser)
        assert loser not in race.ran, order
        assert ledger_redis.client.exists(*KEYS.index) == 0, order


# ---- a ledger that is away -------------------------------------------------------------------


def timed(app: Celery, count: int, **options: Any) -> float:
    """Seconds that so many delayed publishes take."""
    started = monotonic()
    for _ in range(count):
        app.send_task("shop.remind", countdown=3600, queue=QUEUE, **options)  # noqa: F405
    return monotonic() - started


def test_a_ledger_that_was_away_for_hours_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more failures than a pool of redis-py's allows for connections."""
    monkeypatch.setattr(sys.modules[LedgerConnection.__module__], "LEFT_ALONE_SECONDS", (0, 0))
    with private_redis() as server:
        line = LedgerConnection(server.url, "shop")
        server.kill()
        for number in range(200):
            line.record(f"order-{number}", 1, b"")
        assert line.missed == 200
        server.start()
        assert line.connect()
        line.close()


@pytest.mark.ci
@pytest.mark.parametrize("how", ["down", "slow"])
def test_publishing_goes_on_while_the_ledger_is_away(
    vhost_url: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """With one warning; and the ledger is used again when it is back."""
    with private_redis() as server:
        app = Celery("shop", broker=vhost_url, set_as_current=False)
        install(app, ledger=server.url)
        delay = Delay(app)
        timed(app, 1)
        usual_seconds = timed(app, 100)
        assert delay.count() == 101
        if how == "down":
            server.kill()
        else:
            server.client.execute_command("CLIENT", "PAUSE", 5000, "ALL")
        away_seconds = timed(app, 100)
        # Not waiting for the ledger once for each.
        assert away_seconds < usual_seconds + 100 * LEDGER_PATIENCE_SECONDS / 2

        def told() -> int:
            timed(app, 1)
            return sum("is away" in record.message for record in caplog.records)

        wait_until(lambda: told() or None)
        if how == "down":
            with pytest.raises(LedgerUnavailable):
                delay.count()
            server.start()

        def noted_down_again() -> bool:
            task_id = app.send_task("shop.remind", countdown=3600, queue=QUEUE).id  # noqa: F405
            return bool(delay.show(task_id))

        wait_until(noted_down_again)
        assert delay.cancel(delay.ls().tasks[0].id)
        assert told() == 1
        app.close()


def reset() -> None:
    """What a pooled connection raises whose broker was restarted."""
    raise ConnectionResetError


def test_a_change_of_many_goes_on_over_a_new_connection_and_says_how_far_it_came(
    vhost_url: str,
) -> None:
    with private_redis() as server:
        app = Celery("shop", broker=vhost_url, set_as_current=False)
        install(app, ledger=server.url)
        ids = [send(app, number, countdown=3600) for number in range(5)]  # noqa: F405
        happens = {ids[1]: reset, ids[4]: server.kill}

        def cancel(found: Any, task_id: str) -> Any:
            happens.pop(task_id, lambda: None)()
            return found.cancel(task_id)

        delay = Delay(app)
        assert all(delay._change(ids[:3], cancel))
        with pytest.raises(LedgerUnavailable, match="1 of 2 were changed, then the ledger"):
            delay._change(ids[3:], cancel)
        app.close()


def test_a_sweep_removes_what_nobody_has_told_the_ledger_of(
    app: Celery, ledger_redis: PrivateRedis
) -> None:
    line = line_for(app)
    now_us = time_ns() // 1000
    for number in range(3):
        line.record(f"task-{number}:d", now_us - number * 2 * STALE_AFTER_US // 3, b"[]\n")
    line.flush()
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        ledger = channel.ledger(app._native_delay.settings())
        assert ledger.sweep() == 1
        assert ledger.sweep() == 0
        ledger.close()
    assert ledger_redis.client.zrange(keys_of(app).due, 0, -1) == [b"task-1:d", b"task-0:d"]


def test_calls_under_a_key_leave_no_mark_of_what_was_not_sent_or_counts(
    app: Celery, ledger_redis: PrivateRedis
) -> None:
    """A mark makes void what a worker gets before its key knows it."""
    delay, signature = Delay(app), app.signature("shop.reindex")
    with pytest.raises(DelayTooLong):
        delay.debounce(signature, key="k", seconds=1e9)
    first = delay.throttle(signature, key="k", seconds=60)
    assert delay.throttle(signature, key="k", seconds=60).id == first.id
    assert ledger_redis.client.keys("*.mark.*") == []
