"""RabbitMQ with records, in each backend."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic, time_ns
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import (
    Delay,
    DelayTooLong,
    NoRecords,
    RecordsUnavailable,
    Verdict,
    install,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.records.interface import (
    PATIENCE_SECONDS,
    STALE_AFTER_US,
    Index,
    IndexEntry,
    MessageState,
)
from celery_native_delay.records.opened import records_of_process
from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
    vhost_name,
)
from celery_native_delay.transports.rabbitmq.entry import Entry
from pytest_celery_native_delay import installed
from tests.brokers import in_ci
from tests.postgresql import find_postgresql, private_postgresql
from tests.traffic import JOBS, send_task
from tests.waiting import wait_until


@pytest.fixture(scope="module", params=["redis", "sqlite", in_ci("postgresql")])
def records_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of the records."""
    if request.param == "redis":
        yield request.getfixturevalue("records_server").url
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('records')}/records.db"
    else:
        installed(find_postgresql)
        with private_postgresql() as postgresql:
            yield postgresql.new_database()


@pytest.fixture(scope="module")
def vhost_url(rabbitmq: PrivateRabbitMQ, records_url: str) -> Iterator[str]:
    """A virtual host for all tests; their messages in the levels are due in an hour."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def app(vhost_url: str, records_url: str, records_server: PrivateRedis) -> Iterator[Celery]:
    """An installed app with empty records."""
    app = Celery("shop", broker=vhost_url, set_as_current=False)
    install(app, records=records_url)
    empty(records_of(app), records_server)
    yield app
    app.close()


def records_of(app: Celery) -> Any:
    vhost = app.connection_for_write().virtual_host
    return records_of_process(app.conf.native_delay_records, f"celery_delay.{vhost}")


def empty(records: Any, server: PrivateRedis) -> None:
    """Empty the *records*, which may be in *server*."""
    server.client.flushall()
    if hasattr(records, "engine"):
        from celery_native_delay.records.sql import METADATA

        METADATA.drop_all(records.engine)


def test_without_records_the_error_names_the_setting(vhost_url: str) -> None:
    with install(Celery("shop", broker=vhost_url, set_as_current=False)) as app:
        with pytest.raises(NoRecords, match="set native_delay_records"):
            Delay(app).ls()
        app.control.revoke("order-1")  # as ever


@pytest.mark.ci
def test_virtual_hosts_may_share_records(
    app: Celery, rabbitmq: PrivateRabbitMQ, records_url: str
) -> None:
    """Tasks stay separate, although all settings are the same."""
    url = rabbitmq.new_vhost()
    with install(Celery("bills", broker=url, set_as_current=False), records=records_url) as other:
        send_task(app, 1, countdown=3600)
        send_task(other, 2, countdown=3600)
        assert Delay(other).ids() == ["order-2"]
        assert Delay(app).ids() == ["order-1"]
        assert not Delay(app).cancel("order-2")
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.mark.parametrize(
    "records", ["redis://:secret@localhost/3", "postgresql+psycopg://shop:secret@localhost/shop"]
)
def test_the_password_of_the_records_is_not_shown(records: str) -> None:
    app = install(Celery("shop", broker="amqp://", set_as_current=False), records=records)
    assert "secret" not in repr(app.connection_for_write().transport_options)
    app.close()


def test_purged_parked_messages_are_no_longer_listed(app: Celery, delay: Delay) -> None:
    """Messages in the levels stay listed."""
    send_task(app, 1, countdown=3600)
    send_task(app, 2, countdown=3600, queue="nobody")
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete("nobody")
        for number in range(3, 153):
            send_task(app, number, countdown=1, queue="nobody")
        admin = connection.default_channel.admin_part(app._native_delay.settings())
        wait_until(lambda: admin.backlog().parked == 150)
        assert delay.count() == 152
        assert admin.purge_parked() == 150
        assert admin.backlog().parked == 0
        assert admin.purge_parked() == 0
    wait_until(lambda: delay.count() == 2)
    assert [task.id for task in delay.ls().tasks] == ["order-1", "order-2"]


def test_a_template_records_what_apply_async_does(app: Celery, delay: Delay) -> None:
    """The entry from which a moved or cancelled task is published again."""
    entries: dict[str, Entry] = {}
    options = {"countdown": 3600, "priority": 3, "queue": "side", "headers": {"tenant": 7}}
    note = Index.note
    records = records_of(app)

    class Noting:
        @staticmethod
        def note(listed: IndexEntry) -> None:
            entries[listed.member.partition(":")[0]] = Entry.decoded(listed.entry)

    records.note = Noting.note
    try:
        with bulk(app, headers={"tenant": 7}) as batch:
            for number in range(3):
                batch.send("shop.remind", (number, "äöü"), countdown=3600, queue="side", priority=3)
        sent = app.send_task("shop.remind", (2, "äöü"), **options)
    finally:
        del records.note
    assert note is Index.note
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


def test_failed_publishes_are_not_listed_and_a_purge_keeps_due_entries(
    app: Celery, delay: Delay
) -> None:
    """A worker receives a due message soon, so its entry stays."""
    with pytest.raises(struct.error):  # AMQP has room for 255 bytes
        send_task(app, 1, countdown=3600, task_id="x" * 300)
    assert delay.ls().tasks == ()
    send_task(app, 2, countdown=3600)
    records = records_of(app)
    records.note(IndexEntry("due:d", time_ns() // 1000, '["", "q", null, null, {}]\n{}'))
    records.flush()
    with app.connection_for_write() as connection:
        assert connection.default_channel.admin_part(app._native_delay.settings()).purge()
    assert records.state_of("due:d") is MessageState.KNOWN
    assert delay.show("order-2") == []


# ---- unreachable records ---------------------------------------------------------------------


def timed(app: Celery, count: int, **options: Any) -> float:
    """The seconds that *count* delayed publishes take."""
    started = monotonic()
    for _ in range(count):
        app.send_task("shop.remind", countdown=3600, queue=JOBS, **options)
    return monotonic() - started


@pytest.mark.ci
@pytest.mark.parametrize("how", ["down", "slow"])
def test_publishing_goes_on_while_the_records_are_unreachable(
    vhost_url: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """With one warning; later the records are used again."""
    with private_redis() as server:
        app = Celery("shop", broker=vhost_url, set_as_current=False)
        install(app, records=server.url)
        delay = Delay(app)
        timed(app, 1)
        usual_seconds = timed(app, 100)
        assert delay.count() == 101
        if how == "down":
            server.kill()
        else:
            server.client.execute_command("CLIENT", "PAUSE", 5000, "ALL")
        away_seconds = timed(app, 100)
        # The publishes do not each wait for the records.
        assert away_seconds < usual_seconds + 100 * PATIENCE_SECONDS / 2

        def told() -> int:
            timed(app, 1)
            return sum("are unreachable" in record.message for record in caplog.records)

        wait_until(lambda: told() or None)
        if how == "down":
            with pytest.raises(RecordsUnavailable):
                delay.count()
            server.start()

        def noted_down_again() -> bool:
            task_id = app.send_task("shop.remind", countdown=3600, queue=JOBS).id
            return bool(delay.show(task_id))

        wait_until(noted_down_again)
        assert delay.cancel(delay.ls().tasks[0].id)
        assert told() == 1
        app.close()


def reset() -> None:
    """Raise the error of a pooled connection after a restart of its broker."""
    raise ConnectionResetError


def test_tasks_are_changed_although_workers_receive_each_message_first(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker receives a message that is due now before its sender has recorded the change."""
    index = type(records_of(app))
    compare_and_set = index.compare_and_set

    def late(self: Any, step: Any) -> bool:
        if step.new is not None and step.new.due_us <= time_ns() // 1000:
            assert self.received(step.new.member) is False
        return bool(compare_and_set(self, step))

    monkeypatch.setattr(index, "compare_and_set", late)
    delay = Delay(app)
    ids = [send_task(app, number, countdown=900) for number in range(3)]
    assert delay.cancel(ids[0]).verdict is Verdict.DONE
    assert delay.run_now(ids[1]).verdict is Verdict.DONE
    assert delay.reschedule(ids[2], countdown=-5).verdict is Verdict.DONE


def test_cancelling_many_tasks_reconnects_and_reports_its_progress(
    vhost_url: str,
) -> None:
    with private_redis() as server:
        app = Celery("shop", broker=vhost_url, set_as_current=False)
        install(app, records=server.url)
        ids = [send_task(app, number, countdown=3600) for number in range(5)]
        happens = {ids[1]: reset, ids[4]: server.kill}

        def cancel(found: Any, task_id: str) -> Any:
            happens.pop(task_id, lambda: None)()
            return found.cancel(task_id)

        delay = Delay(app)
        assert all(delay._change(ids[:3], cancel))
        with pytest.raises(RecordsUnavailable, match="1 of 2 were changed; then the records"):
            delay._change(ids[3:], cancel)
        app.close()


def test_a_sweep_removes_entries_long_past_their_due_time(app: Celery) -> None:
    records, now_us = records_of(app), time_ns() // 1000
    for number in range(3):
        due_us = now_us - number * 2 * STALE_AFTER_US // 3
        records.note(IndexEntry(f"task-{number}:d{number}", due_us, "[]\n"))
    records.flush()
    with app.connection_for_write() as connection:
        part = connection.default_channel.worker_part(app._native_delay.settings())
        assert part.sweep() == 1
        assert part.sweep() == 0
    standings = [records.state_of(f"task-{number}:d{number}") for number in range(3)]
    assert standings == [MessageState.KNOWN, MessageState.KNOWN, MessageState.UNKNOWN]


def test_keyed_calls_that_send_nothing_leave_no_mark(
    app: Celery, records_server: PrivateRedis, records_url: str
) -> None:
    """A mark left behind would make a message void."""
    delay, signature = Delay(app), app.signature("shop.reindex")
    with pytest.raises(DelayTooLong):
        delay.debounce(signature, key="k", seconds=1e9)
    first = delay.throttle(signature, key="k", seconds=60)
    assert delay.throttle(signature, key="k", seconds=60).id == first.id
    if records_url.startswith("redis"):
        assert records_server.client.keys("*.mark.*") == []
    else:
        from sqlalchemy import func, select

        from celery_native_delay.records.sql import MARKS

        counted = select(func.count()).select_from(MARKS)
        assert records_of(app).look_up(lambda found: found.execute(counted).scalar()) == 0
