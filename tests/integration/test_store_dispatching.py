"""The dispatcher of a store, also after outages, and ``bulk(app)`` with a store.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from time import sleep, time
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue
from sqlalchemy import create_engine, event, text

from celery_native_delay import DelaySettings, UnsupportedBroker, install
from celery_native_delay.bulk import bulk
from celery_native_delay.store import interface
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Row, Store
from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.transports.rabbitmq.from_store import RowPublisher
from tests.conformance.brokers import Broker, options_of, running_broker, settings_of
from tests.conformance.traffic import delaying, waiting_count
from tests.integration.project import Project
from tests.integration.traffic import on_all_versions
from tests.traffic import PATIENCE_SECONDS, beside, inbox, publish
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def filesystem() -> Iterator[Broker]:
    with running_broker("filesystem", pytest.fail) as broker:
        yield broker


@pytest.fixture
def folder_url(filesystem: Broker) -> str:
    return filesystem.new_space()


def store_of(connection: Any) -> Store:
    store: Store = connection.default_channel.needed_store
    return store


def another(store: Any) -> Any:
    """The same store, as another process opens it."""
    return store_at(store.url, store.namespace, timeout_seconds=5)


@contextmanager
def dispatching(url: str, *, own_store: bool = False, **settings: Any) -> Iterator[Dispatcher]:
    with delaying(url) as connection:
        known = DelaySettings.from_mapping({**settings_of(url), "namespace": "tests", **settings})
        part = connection.default_channel.worker_part(known)
        part.prepare(url)
        if own_store:  # as in another process
            channel = connection.default_channel
            store = another(store_of(connection))
            dispatcher = Dispatcher(store, lambda: channel.publisher_of(delaying(url)))
        else:
            dispatcher = part.promoter(lambda **options: delaying(url, **options))
        with beside(dispatcher.run, stop=dispatcher.stop):
            yield dispatcher
        if own_store:
            store.close()


def test_three_dispatchers_hand_over_each_message_once(url: str) -> None:
    if not url.startswith("sqla+") and settings_of(url)["store"].startswith("postgresql"):
        make_serializable(settings_of(url)["store"])
    with delaying(url) as connection, inbox(connection, "jobs") as received:
        due = time() + 1.5
        for number in range(500):
            publish(connection, number, "jobs", delay=due - time())
        wait_until(lambda: time() > due)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(dispatching(url, own_store=True))
            arrivals = received.wait_for(500)
        assert sorted(arrival.body for arrival in arrivals) == list(range(500))
        assert waiting_count(connection) == 0


def make_serializable(store: str) -> None:
    """Make serializable the default isolation level of the database."""
    engine = create_engine(store)
    with engine.begin() as connection:
        name = connection.dialect.identifier_preparer.quote(str(engine.url.database))
        strict = f"ALTER DATABASE {name} SET default_transaction_isolation TO serializable"
        connection.execute(text(strict))
    engine.dispose()


# ---- destinations that refuse -------------------------------------------------------------------


@pytest.mark.ci
def test_a_message_that_its_destination_refuses_is_parked(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After several attempts, while others are delivered."""
    monkeypatch.setattr(interface, "REFUSALS_UNTIL_PARKED", 2)
    shop = Project(tmp_path, settings={**settings_of(folder_url), "namespace": "tests"}).write(
        SHOP, folder_url, transport_options=options_of(folder_url)
    )
    with delaying(folder_url) as connection, inbox(connection, "jobs") as received:
        headers = {"task": "shop.remind", "id": "task-1"}
        publish(connection, "never", "no/such/folder", delay=1, headers=headers)
        for number in range(150):
            publish(connection, number, "jobs", delay=1)
        with dispatching(folder_url) as dispatcher:
            received.wait_for(150)
            store = store_of(connection)
            wait_until(lambda: store.census().parked == 1)
        assert (dispatcher.promoted, dispatcher.parked) == (150, 1)
        (parked,) = store.parked(10)
        assert parked.reason.startswith("ChannelError: Cannot add file")
    assert shop.told("status")["parked"] == 1
    listed = shop.told("parked", "list")
    assert (listed["parked"], listed["messages"][0]["id"]) == (1, "task-1")
    assert shop.told("parked", "requeue")["waiting_again"] == 1
    assert shop.told("parked", "list") == {"parked": 0, "messages": []}
    assert shop.told("parked", "purge", "--yes") == {"purged": 0}


SHOP = """
from celery import Celery
from celery_native_delay import install

settings = {settings!r}
app = Celery("shop", broker={url!r})
app.conf.broker_transport_options = settings.pop("transport_options")
install(app, **settings)
"""


def test_a_dispatcher_lets_others_write_to_a_sqlite_file(folder_url: str) -> None:
    """SQLite has no queue of writers: each tries ten times a second, then gives up."""
    with delaying(folder_url) as connection:
        store = store_of(connection)
        publish(connection, "hello", "jobs", delay=1)
        with store.engine.begin() as transaction:
            transaction.execute(text(TEN_THOUSAND_MORE))
        asking = sqlite3.connect(store.engine.url.database, timeout=0, isolation_level=None)
        with dispatching(folder_url, own_store=True) as dispatcher:
            wait_until(lambda: dispatcher.promoted > 0)
            answers = [may_write(asking) for _ in range(500)]
            assert dispatcher.promoted < 10_000, "it was at it all the time"
        asking.close()
        assert sum(answers) / len(answers) > 0.1


TEN_THOUSAND_MORE = """
WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 10000)
INSERT INTO native_delay_task (namespace, digest, task_id, state, next_us, refusals, entry)
SELECT namespace, n, task_id, state, next_us, refusals, entry FROM native_delay_task, numbers
"""


def may_write(connection: sqlite3.Connection) -> bool:
    sleep(0.002)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    connection.execute("ROLLBACK")
    return True


# ---- outages ------------------------------------------------------------------------------------


def space_of(url: str) -> Path:
    return Path(url.partition("://")[2])


@contextmanager
def away(store: Path) -> Iterator[None]:
    """Make the database's file impossible to open or create, until the block ends."""
    hidden, nothing = (store.with_name(f"{name}-{store.name}") for name in ("hidden", "nothing"))
    nothing.mkdir()
    hidden.hardlink_to(store)
    # Replaced in one step: else a process could create the file in between.
    symlink = store.with_name("symlink")
    symlink.symlink_to(nothing)
    symlink.replace(store)
    logs = [
        file.rename(file.with_name(f"hidden-{file.name}"))
        for file in store.parent.glob(f"{store.name}-*")
    ]
    try:
        yield
    finally:
        for file in logs:
            file.rename(file.with_name(file.name.removeprefix("hidden-")))
        hidden.replace(store)
        nothing.rmdir()


def test_a_broker_that_is_away_is_tried_again_and_its_messages_are_not_to_blame(
    folder_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """None is put off or parked."""
    queues = Path(options_of(folder_url)["data_folder_in"])
    with delaying(folder_url) as connection:
        publish(connection, "hello", "jobs", delay=1)
        store = store_of(connection)
        aside = queues.rename(queues.with_name("aside"))
        with dispatching(folder_url):
            wait_until(lambda: "due tasks wait in sqlite:" in caplog.text)
            assert store.census().parked == 0
            aside.rename(queues)
            with inbox(connection, "jobs") as received:
                assert received.wait_for(1)[0].body == "hello"
            wait_until(lambda: "are published again" in caplog.text)
    assert "No such file or directory" in caplog.text


@on_all_versions
@pytest.mark.rabbitmq
def test_a_dispatcher_with_write_permission_only_publishes_to_exchanges(
    rabbitmq: PrivateRabbitMQ, vhost: str, vhost_url: str
) -> None:
    """RabbitMQ 4.3.0 does not let it ask whether the exchange exists."""
    url = rabbitmq.add_user(f"writer-{vhost}", "secret", configure="^$", read="^$", vhost=vhost)
    with Connection(vhost_url) as consumer:
        Queue("orders", Exchange("shop"), "new")(consumer.default_channel).declare()
        publisher = RowPublisher(Connection(url), timeout_seconds=PATIENCE_SECONDS)
        entry = StoreEntry(1, "shop", "new", {"application_headers": {}}, b"due", "id")
        assert publisher.publish([entry]) == {0: None}
        publisher.close()
        with inbox(consumer, "orders") as letters:
            assert letters.wait_for(1)[0].body == "due"


@on_all_versions
@pytest.mark.rabbitmq
def test_a_row_for_an_exchange_without_permission_doubles_no_other(
    rabbitmq: PrivateRabbitMQ, vhost: str, vhost_url: str
) -> None:
    url = rabbitmq.add_user(f"limited-{vhost}", "secret", write="^amq.default$", vhost=vhost)

    def row(exchange: str, key: str, body: bytes) -> StoreEntry:
        return StoreEntry(1, exchange, key, {"application_headers": {}}, body, "id")

    with Connection(vhost_url) as consumer, inbox(consumer, "jobs") as letters:
        Exchange("closed", "topic")(consumer.default_channel).declare()
        rows = [row("", "jobs", b"%d" % number) for number in range(99)]
        rows.insert(50, row("closed", "x", b"never"))
        publisher = RowPublisher(Connection(url), timeout_seconds=PATIENCE_SECONDS)
        outcomes = dict(publisher.publish(rows))
        assert "ACCESS_REFUSED" in str(outcomes.pop(50))
        assert set(outcomes.values()) == {None}
        publisher.publish([row("", "jobs", b"last")])
        publisher.close()
        bodies = [int(letter.body) for letter in letters.wait_for(100)[:-1]]
        assert bodies == list(range(99))


@on_all_versions
@pytest.mark.rabbitmq
def test_what_rabbitmq_refuses_is_parked_and_doubles_no_other(
    vhost_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing exchange, a header that AMQP cannot hold, a row of a later release."""
    monkeypatch.setattr(interface, "REFUSALS_UNTIL_PARKED", 1)
    own: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/delays.db"}
    with delaying(vhost_url, **own) as connection, inbox(connection, "jobs") as received:
        due = time() + 3
        for number in range(100):
            publish(connection, number, "jobs", delay=due - time())
            if number % 20 == 0:
                key = f"gone-{number}"
                publish(connection, key, "jobs", delay=due - time(), exchange=key)
            if number % 25 == 0:
                headers = {"too_large": 1 << 70}
                publish(connection, number, "jobs", delay=due - time(), headers=headers)
        publish(connection, "too long", "jobs", delay=due - time(), exchange="x" * 300)
        store: Any = store_of(connection)
        later = Row("later", "later", round(due * 1e6), '[2,"of a later release"]\nbody')
        store.add([later])
        known = DelaySettings.from_mapping({"namespace": "tests", **own})
        part = connection.default_channel.worker_part(known)
        wait_until(lambda: time() > due)
        dispatcher = part.promoter(lambda **options: delaying(vhost_url, **own, **options))
        with beside(dispatcher.run, stop=dispatcher.stop):
            wait_until(lambda: store.census().parked == 5 + 4 + 1 + 1)
            publish(connection, "last", "jobs")
            arrivals = received.wait_for(101)
        assert sorted(arrival.body for arrival in arrivals[:-1]) == list(range(100))
        assert (dispatcher.promoted, dispatcher.parked) == (100, 11)
        assert len(store.parked(20)) == 10  # without the row that this release cannot read


def test_two_processes_that_first_use_a_queue_of_a_database_both_send(tmp_path: Path) -> None:
    """kombu lets one of them fail, as its queue is a row."""
    url = f"sqla+sqlite:///{tmp_path}/shop.db"
    with delaying(url) as one, delaying(url) as other:
        session = one.default_channel.session
        other.default_channel.session  # noqa: B018  makes the tables

        @event.listens_for(session, "before_commit", once=True)
        def another_is_first(_: Any) -> None:
            publish(other, "first", "jobs")

        publish(one, "second", "jobs")
        with inbox(one, "jobs") as received:
            arrivals = received.wait_for(2)
    assert sorted(arrival.body for arrival in arrivals) == ["first", "second"]


@pytest.mark.parametrize("url", ["memory://", "sqla+sqlite://"])
def test_without_a_store_a_delayed_publish_names_the_setting(url: str) -> None:
    """SQLite in memory cannot be the store: each thread has its own."""
    with Connection(url, transport_options={"native_delay": True}) as connection:
        publish(connection, "now", "jobs-without-store")
        with pytest.raises(UnsupportedBroker, match="expected native_delay_store to be"):
            publish(connection, "later", "jobs-without-store", delay=60)


def test_different_filesystem_folders_for_in_and_out_are_reported(folder_url: str) -> None:
    with delaying(folder_url) as connection:
        part = connection.default_channel.worker_part(DelaySettings(**settings_of(folder_url)))
        part.prepare("here")
        assert list(part.dangers()) == []
        connection.default_channel.transport_options["data_folder_out"] = "elsewhere"
        (said,) = connection.channel().worker_part(DelaySettings()).dangers()
        assert "due messages go to data_folder_out, elsewhere, and this" in said.problem


def test_without_sqlalchemy_a_delayed_publish_names_the_extra() -> None:
    code = """
import sys
sys.modules["sqlalchemy"] = None
from kombu import Connection
from celery_native_delay import DelaySettings, UnsupportedBroker, delay_headers
settings = {"store": "sqlite:////tmp/never.db"}
with Connection("memory://", transport_options={"native_delay": settings}) as connection:
    channel, producer = connection.default_channel, connection.Producer()
    producer.publish("now", routing_key="jobs")
    assert channel._size("jobs") == 1
    later = {"routing_key": "jobs", "headers": delay_headers(countdown=5)}
    publish = lambda: producer.publish("later", **later)
    for ask in (publish, lambda: channel.worker_part(DelaySettings(**settings))):
        try:
            ask()
        except UnsupportedBroker as exc:
            print(exc)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'celery_native_delay[sql]'") == 2


# ---- bulk: each task is stored once, or reported -------------------------------------------------


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[Queue("plain"), Queue("other")],
        task_default_queue="plain",
        task_ignore_result=True,
        broker_transport_options=options_of(url),
    )
    return install(app, **settings)


def store_of_app(app: Celery) -> Store:
    with app.connection_for_write() as connection:
        store: Store = connection.default_channel.needed_store
        return store


def entries(store: Store) -> list[StoreEntry]:
    found: list[StoreEntry] = []
    row = None
    while rows := store.rows_after(row, limit=500):
        row = rows[-1]
        found += [StoreEntry.decoded(each.entry) for each in rows]
    return found


def numbers(store: Store) -> list[int]:
    """The ``order`` of each task in *store*."""
    return sorted(int(entry.task_id.removeprefix("order-")) for entry in entries(store))


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    with make_app(url, **settings_of(url)) as app:
        yield app


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Broker]:
    with running_broker("filesystem-postgresql", pytest.fail) as broker:
        yield broker


@pytest.fixture
def shop(postgresql: Broker) -> Iterator[Celery]:
    """An app whose store is a PostgreSQL of this module."""
    url = postgresql.new_space()
    with make_app(url, **settings_of(url)) as app:
        yield app


def send(batch: Any, *numbers: int, **options: Any) -> None:
    for number in numbers:
        task_id = f"order-{number}"
        batch.send("shop.remind", (number,), countdown=600, task_id=task_id, **options)


@pytest.mark.ci
def test_a_restart_of_the_store_loses_and_duplicates_nothing(
    postgresql: Broker, shop: Celery
) -> None:
    with bulk(shop) as batch:
        send(batch, *range(500))
        postgresql.restart()
        send(batch, *range(500, 1000))
    assert batch.result.confirmed == 1_000
    assert numbers(store_of_app(shop)) == list(range(1_000))


def test_a_task_that_is_sent_twice_is_stored_once(app: Celery) -> None:
    with bulk(app) as batch:
        send(batch, *range(20), *range(20))
    assert numbers(store_of_app(app)) == list(range(20))


def test_arguments_that_celery_converts_arrive_converted(
    vhost_url: str, store_redis: PrivateRedis
) -> None:
    """As with ``@app.task(pydantic=True)``, whose models only ``apply_async`` can encode."""
    with make_app(vhost_url, store=store_redis.url) as app:

        @app.task(name="shop.remind", shared=False)
        def remind(order: int) -> None:
            """Never run here."""

        remind._dump_pydantic_arguments = lambda args, kwargs: ([args[0].numerator], kwargs)
        with bulk(app) as batch:
            for number in range(4):
                batch.send("shop.remind", (Fraction(number),), countdown=600)
        found = [json.loads(entry.body)[0] for entry in entries(store_of_app(app))]
    assert (sorted(found), batch.result.by_template) == ([[0], [1], [2], [3]], 0)


def test_only_named_tasks_are_stored(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, store_redis: PrivateRedis
) -> None:
    with make_app(vhost_url, store=store_redis.url, store_tasks=["shop.remind"]) as app:
        with bulk(app) as batch:
            send(batch, 1, 2, 3)
            for number in range(3):
                batch.send("shop.retry", (number,), countdown=600)
        assert batch.result.confirmed == 6
        assert numbers(store_of_app(app)) == [1, 2, 3]
        with app.connection_for_write() as connection:
            part = connection.default_channel.admin_part(app._native_delay.settings())
            assert part.own.backlog().waiting == 3


def test_a_task_without_a_queue_is_reported_as_returned(app: Celery) -> None:
    """kombu itself drops it silently."""
    with bulk(app, check=False) as batch:
        for number in range(3):
            send(batch, number)
            batch.send("shop.remind", (number,), countdown=600, exchange="nobodys", routing_key="x")
    assert batch.result.confirmed == 3
    assert [message.exchange for message in batch.result.returned] == ["nobodys"] * 3
    assert numbers(store_of_app(app)) == [0, 1, 2]


@pytest.mark.ci
def test_a_broadcast_is_stored_once(shop: Celery) -> None:
    news = Queue("headlines", Exchange("news", type="fanout"))
    to = {"exchange": "news", "routing_key": "any", "declare": [news]}
    with bulk(shop) as batch:
        send(batch, 1, 2, 3, **to)
    assert [entry.queue for entry in entries(store_of_app(shop))] == [None] * 3
