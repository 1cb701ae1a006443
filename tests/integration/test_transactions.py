"""Tasks that are sent in the user's own transaction: sent if, and only if, it commits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.trace import build_tracer
from celery.contrib.django.task import DjangoTask
from celery.signals import before_task_publish
from kombu import Connection
from kombu.exceptions import OperationalError
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Table,
    create_engine,
    inspect,
    make_url,
    text,
)
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from celery_native_delay import (
    CannotDelay,
    Delay,
    NoStore,
    RetryAfter,
    StoreUnavailable,
    in_transaction,
    install,
    outside_transaction,
)
from celery_native_delay.app.broker import opened
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.install import drop_pools
from celery_native_delay.app.installation import admin_part, delaying_channel
from celery_native_delay.bulk import bulk
from celery_native_delay.store.dispatcher import TransactionRelay
from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.worker.once import let_claim
from tests.brokers import in_ci
from tests.conformance.brokers import running_database
from tests.hanging import hung
from tests.traffic import beside
from tests.waiting import PATIENCE_SECONDS, wait_until

django = pytest.importorskip("django")

HOUR_SECONDS = 3600


@pytest.fixture(scope="module", params=["sqlite", in_ci("postgresql"), in_ci("mariadb")])
def database_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a new database, for SQLAlchemy."""
    with running_database(request.param, tmp_path_factory.mktemp("shop")) as url:
        yield url


def django_settings(url: str) -> dict[str, Any]:
    place = make_url(url)
    kind = {"mysql": "mysql", "sqlite": "sqlite3"}.get(place.get_backend_name(), "postgresql")
    if kind == "mysql":
        pymysql = pytest.importorskip("pymysql")
        pymysql.version_info = (2, 2, 7, "final", 0)  # as Django asks of mysqlclient
        pymysql.install_as_MySQLdb()
    settings = {"ENGINE": f"django.db.backends.{kind}", "NAME": place.database}
    if kind != "sqlite3":
        settings["USER"] = place.username
        settings["HOST"] = place.query["unix_socket" if kind == "mysql" else "host"]
    return settings


@pytest.fixture(scope="module")
def migrated(database_url: str) -> Iterator[Any]:
    """Django's connections to a database with our tables and a table of orders."""
    from django.conf import settings

    if not settings.configured:
        settings.configure(
            INSTALLED_APPS=["celery_native_delay.django"],
            DATABASES={"default": django_settings("sqlite:////no/such/default.db")},
        )
        django.setup()
    from django.core.management import call_command
    from django.db import connections

    connections.settings["shop"] = connections.configure_settings(
        {"default": {}, "shop": django_settings(database_url)}
    )["shop"]
    call_command("migrate", database="shop", verbosity=0)
    with connections["shop"].cursor() as cursor:
        cursor.execute("CREATE TABLE orders (number integer)")
    yield connections["shop"]
    connections["shop"].close()
    del connections["shop"], connections.settings["shop"]


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """SQLAlchemy's, to the same database."""
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def app(vhost_url: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app whose store is Django's database, and whose broker is RabbitMQ."""
    app = Celery("shop", broker=vhost_url, backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = "orders"
    app.conf.broker_connection_timeout = 1
    app.conf.broker_transport_options = {"max_retries": 1}
    namespace = f"test{abs(hash(request.node.nodeid)) % 10**9}"
    install(app, store="django:shop", namespace=namespace)

    @app.task(name="shop.remind")
    def remind(*numbers: Any) -> None: ...

    with app.connection_for_write() as connection:
        app.amqp.queues["orders"](connection.default_channel).declare()
    yield app
    app.close()


@pytest.fixture
def atomic(migrated: Any) -> Any:
    from django.db import transaction

    return partial(transaction.atomic, using="shop")


def send(app: Celery, number: int, **options: Any) -> None:
    app.tasks["shop.remind"].apply_async((number,), task_id=f"order-{number}", **options)


def sent(app: Celery) -> list[str]:
    """The ids of the tasks in the queue, which is then empty."""
    ids = []
    with Connection(app.conf.broker_url) as connection, connection.SimpleQueue("orders") as queue:
        with suppress(queue.Empty):
            while True:
                message = queue.get(block=False)
                message.ack()
                ids.append(message.headers["id"])
    return ids


def waiting(app: Celery) -> list[str]:
    return [task.id for task in Delay(app).ls().tasks]


@contextmanager
def rolled_back(transaction: Any) -> Iterator[None]:
    """Send in a transaction that is rolled back."""
    with suppress(ZeroDivisionError), transaction:
        yield
        raise ZeroDivisionError


def dispatch(app: Celery, count: int) -> None:
    """Run a dispatcher until it has published so many tasks."""
    with app.connection_for_write() as connection:
        channel, settings = delaying_channel(app, connection)
        dispatcher = channel.worker_part(settings).promoter(app.connection_for_write)
        with beside(dispatcher.run, stop=dispatcher.stop):
            wait_until(lambda: dispatcher.promoted == count)


def taken(app: Celery) -> int:
    """The number of rows in the store that would be published when their lease ends."""
    with app.connection_for_write() as connection:
        return delaying_channel(app, connection)[0].needed_store.census().taken


def test_a_task_is_sent_if_and_only_if_its_transaction_commits(app: Celery, atomic: Any) -> None:
    with rolled_back(atomic()):
        send(app, 1)
        send(app, 2, countdown=HOUR_SECONDS)
    assert (sent(app), waiting(app)) == ([], [])
    with atomic():
        send(app, 3)
        send(app, 4, countdown=HOUR_SECONDS)
        with rolled_back(atomic()):  # a savepoint
            send(app, 5)
            send(app, 6, countdown=HOUR_SECONDS)
        with atomic():
            send(app, 7)
        assert sent(app) == []
    assert (sent(app), taken(app)) == (["order-3", "order-7"], 0)
    assert waiting(app) == ["order-4"]


def test_every_way_to_send_joins_the_transaction(app: Celery, atomic: Any) -> None:
    """send_task, chains, groups, chords, bulk, keys and Celery's own delay_on_commit."""
    remind = app.tasks["shop.remind"]

    @app.task(name="shop.mail", base=DjangoTask)
    def mail(number: int) -> None: ...

    def send_all() -> None:
        app.send_task("shop.remind", (1,), task_id="by-name")
        remind.s(1).set(task_id="alone").delay()
        chain(remind.si(1).set(task_id="first"), remind.si(2)).delay()
        group(remind.si(1).set(task_id="one"), remind.si(2).set(task_id="two")).delay()
        chord([remind.si(1).set(task_id="head")])(remind.si(2))
        with bulk(app) as outbox:
            outbox.send(remind, (1,), task_id="bulk")
            outbox.send(remind, (1,), task_id="later", countdown=HOUR_SECONDS)
        mail.delay_on_commit(1)
        mail.apply_async_on_commit((1,), task_id="on-commit")
        debounced = remind.s(1).set(task_id="debounced")
        Delay(app).debounce(debounced, key="user:1", seconds=HOUR_SECONDS)

    with rolled_back(atomic()):
        send_all()
    assert (sent(app), waiting(app)) == ([], [])
    with atomic():
        send_all()
        assert sent(app) == []
    told = sent(app)
    assert told[:7] == ["by-name", "alone", "first", "one", "two", "head", "bulk"]
    assert (len(told), told[8]) == (9, "on-commit")
    assert sorted(waiting(app)) == ["debounced", "later"]


def test_a_cancel_in_a_transaction_is_undone_with_it(app: Celery, atomic: Any) -> None:
    send(app, 1, countdown=HOUR_SECONDS)
    with rolled_back(atomic()):
        Delay(app).cancel("order-1")
        assert waiting(app) == []
    assert waiting(app) == ["order-1"]
    with atomic():
        Delay(app).cancel("order-1")
    assert waiting(app) == []


def test_outside_the_transaction_a_task_is_sent_at_once(app: Celery, atomic: Any) -> None:
    """In ``outside_transaction``, or with ``native_delay_store_transactions`` off."""
    with rolled_back(atomic()):
        with outside_transaction(app):
            send(app, 1)
            assert sent(app) == ["order-1"]
            send(app, 2, countdown=HOUR_SECONDS)
        send(app, 3)
    assert (sent(app), waiting(app)) == ([], ["order-2"])
    install(app, store_transactions=False, namespace="off")
    with rolled_back(atomic()):
        send(app, 4)
    assert sent(app) == ["order-4"]


def test_a_draining_app_sends_at_the_commit_and_delays_nothing(app: Celery, atomic: Any) -> None:
    """Also Celery's own delay_on_commit. A task with an ETA goes to a worker, which holds it."""
    install(app, enabled="drain")

    @app.task(name="shop.mail", base=DjangoTask)
    def mail(number: int) -> None: ...

    def send_all() -> None:
        send(app, 1)
        send(app, 2, countdown=HOUR_SECONDS)
        mail.apply_async_on_commit((1,), task_id="on-commit")
        with bulk(app) as outbox:
            for number in range(5):  # from the third on by a template
                outbox.send(mail, (1,), task_id=f"bulk-{number}", countdown=HOUR_SECONDS)

    with rolled_back(atomic()):
        send_all()
    assert sent(app) == []
    with atomic():
        send_all()
        assert sent(app) == []
    assert sent(app) == ["order-1", "order-2", "on-commit", *(f"bulk-{n}" for n in range(5))]
    assert (waiting(app), taken(app)) == ([], 0)


def run(task: Any, number: int, **request: Any) -> None:
    """Run a task as a worker does."""
    where = {"exchange": "", "routing_key": "orders"}
    request |= {"id": f"order-{number}", "delivery_info": where}
    build_tracer(task.name, task, app=task.app)(request["id"], (number,), {}, request)


def test_what_follows_a_task_is_sent_although_its_exception_ends_a_transaction(
    app: Celery, atomic: Any, migrated: Any
) -> None:
    """A retry and a replacement. If the task is ``once``, its effects stay with a replacement."""

    @app.task(name="shop.replaced", bind=True)
    def replaced(self: Any, number: int) -> None:
        with atomic():
            self.replace(app.tasks["shop.remind"].s(number))

    @app.task(name="shop.swapped", bind=True, once="transaction")
    def swapped(self: Any, number: int) -> None:
        with migrated.cursor() as cursor:
            cursor.execute(f"INSERT INTO orders (number) VALUES ({number})")
        again = self if not self.request.get("replaced_task_nesting") else app.tasks["shop.remind"]
        self.replace(again.s(number))

    @app.task(name="shop.refused", once="transaction")
    def refused(number: int) -> None:
        raise RetryAfter(0)

    let_claim(app)
    run(replaced, 1)
    for _ in range(2):  # deliveries
        run(swapped, 902)
    run(swapped, 902, replaced_task_nesting=1)
    run(refused, 3)
    assert sent(app) == ["order-1", "order-902", "order-902", "order-3"]
    with migrated.cursor() as cursor:
        cursor.execute("SELECT number FROM orders WHERE number = 902")
        assert len(cursor.fetchall()) == 2


def test_a_task_that_is_called_directly_claims_nothing(
    app: Celery, database_url: str, engine: Engine, migrated: Any
) -> None:
    install(app, store=database_url)
    ran = []

    @app.task(name="shop.charge")
    def charge(number: int) -> None:
        with engine.connect() as connection, in_transaction(app, connection, once=True):
            ran.append(number)
            connection.commit()

    for number in (1, 2):
        charge(number)
        run(charge, 3)
    assert ran == [1, 3, 2]


def test_two_apps_send_with_one_transaction(app: Celery, atomic: Any, vhost_url: str) -> None:
    """Right after the commit, each by its own store."""
    with Celery("mails", broker=vhost_url, set_as_current=False) as other:
        install(other, store="django:shop", namespace="mails")
        other.conf.task_default_queue = "orders"
        with atomic():
            send(app, 1)
            other.send_task("mails.send", task_id="mail-1")
            send(app, 2)
        assert sorted(sent(app)) == ["mail-1", "order-1", "order-2"]


def test_a_send_leaves_the_users_connection_as_it_is(
    app: Celery, atomic: Any, migrated: Any
) -> None:
    """Its locks, cursors and temporary tables belong to the user; a closed one is replaced."""
    with atomic():
        pass
    users = migrated.connection
    send(app, 1, countdown=HOUR_SECONDS)
    with atomic():
        send(app, 2)
    assert migrated.connection is users
    if migrated.vendor == "postgresql":  # the others do not end so
        users.close()
        send(app, 3, countdown=HOUR_SECONDS)
        assert waiting(app) == ["order-1", "order-3"]


def test_a_task_is_sent_with_a_transaction_that_the_user_began_by_hand(
    app: Celery, atomic: Any, migrated: Any
) -> None:
    """After ``set_autocommit(False)``. Django tells no commit, so a worker publishes the task."""
    migrated.set_autocommit(False)
    send(app, 1)
    send(app, 2, countdown=HOUR_SECONDS)
    migrated.rollback()
    send(app, 3)
    send(app, 4, countdown=HOUR_SECONDS)
    migrated.commit()
    migrated.set_autocommit(True)
    assert (sent(app), taken(app), waiting(app)) == ([], 1, ["order-4"])


def test_sqlalchemys_transaction_sends_tasks_too(
    app: Celery, database_url: str, engine: Engine, migrated: Any
) -> None:
    with engine.connect() as connection, in_transaction(app, connection):  # in Django's database
        send(app, 0, countdown=HOUR_SECONDS)
        connection.rollback()
    assert waiting(app) == []
    install(app, store=database_url)
    orders = Table("orders", MetaData(), Column("number", Integer))
    with Session(engine) as session, in_transaction(app, session):
        session.execute(orders.insert().values(number=1))
        send(app, 1)
        send(app, 2, countdown=HOUR_SECONDS)
        with rolled_back(session.begin_nested()):
            send(app, 3)
        assert sent(app) == []
        session.commit()
        assert sent(app) == ["order-1"]
        assert (session.in_transaction(), taken(app)) == (False, 0)  # it is not sent again
        send(app, 4)
        session.rollback()
        send(app, 5)
        session.commit()
    assert sent(app) == ["order-5"]
    with engine.connect() as connection, in_transaction(app, connection):
        send(app, 6)
        connection.commit()
    assert (sent(app), taken(app)) == (["order-6"], 0)
    with Session(engine) as session:
        for number in (7, 8, 9):
            with session.begin(), in_transaction(app, session):
                send(app, number)
        assert len(list(session.dispatch.after_transaction_end)) == 1, "else it grows for ever"
    assert (sent(app), taken(app)) == (["order-7", "order-8", "order-9"], 0)
    assert waiting(app) == ["order-2"]
    send(app, 10)
    assert sent(app) == ["order-10"]


@pytest.mark.filterwarnings("ignore:coroutine .AsyncConnection.connect:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_async_session_sends_in_run_sync(app: Celery, database_url: str, migrated: Any) -> None:
    if not database_url.startswith("postgresql"):
        pytest.skip("the others have no async driver here")
    install(app, store=database_url)
    engine = create_async_engine(database_url)

    def order(session: Session) -> None:
        with in_transaction(app, session):
            send(app, 1)
            send(app, 2, countdown=HOUR_SECONDS)

    async def run() -> None:
        async with AsyncSession(engine) as session:
            with pytest.raises(CannotDelay, match="run_sync"), in_transaction(app, session):
                send(app, 3)
            await session.run_sync(order)
            await session.rollback()
            await session.run_sync(order)
            assert sent(app) == []
            await session.commit()
        await engine.dispose()

    asyncio.run(run())
    assert (sent(app), waiting(app)) == (["order-1"], ["order-2"])


@pytest.fixture
def renamed(migrated: Any) -> Iterator[None]:
    """The tables of the database begin with "shop_delay_"."""
    from django.core.management import call_command
    from django.test import override_settings

    from celery_native_delay.store.django import _KEPT

    def migrate(name: str) -> None:
        call_command("migrate", "native_delay", name, database="shop", verbosity=0)
        vars(migrated).pop(_KEPT, None)  # of a store with the other names

    migrate("zero")
    with override_settings(DELAY_TABLE_PREFIX="shop_delay_"):
        migrate("0001")
        yield
        migrate("zero")
    migrate("0001")


def test_the_names_of_tables_begin_as_djangos_setting_or_the_url_says(
    app: Celery, database_url: str, engine: Engine, renamed: None, atomic: Any
) -> None:
    from django.test import override_settings

    for number, ends in ((1, rolled_back(atomic())), (2, atomic())):
        with ends:
            send(app, number)
            send(app, number + 10, countdown=HOUR_SECONDS)
    assert (sent(app), waiting(app)) == (["order-2"], ["order-12"])
    tables = {name for name in inspect(engine).get_table_names() if "delay_" in name}
    assert tables == {"shop_delay_task", "shop_delay_record"}
    with override_settings(DELAY_TABLE_PREFIX="other_"):
        store = store_at("django:shop", "tests", timeout_seconds=PATIENCE_SECONDS)
        told = "no tables other_task and other_record, but shop_delay_task and shop_delay_record"
        with pytest.raises(StoreUnavailable, match=told):
            store.census()
        (finding,) = store.findings()
        assert told in finding.problem
        assert 'DELAY_TABLE_PREFIX to "shop_delay_"' in finding.remedy
    mark = "&" if "?" in database_url else "?"
    install(app, store=f"{database_url}{mark}native_delay_prefix=shop_delay_")
    for number, end in ((3, "rollback"), (4, "commit")):
        with Session(engine) as session, in_transaction(app, session):
            send(app, number)
            send(app, number + 10, countdown=HOUR_SECONDS)
            getattr(session, end)()
    assert (sent(app), waiting(app)) == (["order-4"], ["order-12", "order-14"])
    asked = text("SELECT 'native_delay_task'")
    with engine.connect() as connection, connection.begin():  # it is the user's again
        assert connection.execute(asked).scalar() == "native_delay_task"
    install(app, store=f"{database_url}{mark}native_delay_prefix=other_")
    with (
        create_engine("sqlite://").connect() as connection,
        pytest.raises(CannotDelay, match="no table other_task"),
        in_transaction(app, connection),
    ):
        send(app, 5)


def test_two_transactions_may_use_a_new_key_at_the_same_time(
    app: Celery, database_url: str, engine: Engine, migrated: Any
) -> None:
    """The second waits for the first to commit, and replaces its task."""
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time")
    install(app, store=database_url)
    tells: Queue[Any] = Queue()

    def debounce(number: int) -> None:
        signature = app.tasks["shop.remind"].s(number).set(task_id=f"order-{number}")
        Delay(app).debounce(signature, key="user:1", seconds=HOUR_SECONDS)

    def second() -> None:
        try:
            with Session(engine) as session, in_transaction(app, session):
                tells.put("begins")
                debounce(2)
                session.commit()
                tells.put(None)
        except Exception as exc:  # for the assertion
            tells.put(exc)

    with Session(engine) as session, in_transaction(app, session):
        debounce(1)
        thread = Thread(target=second, daemon=True)
        thread.start()
        assert tells.get(timeout=PATIENCE_SECONDS) == "begins"
        with suppress(Empty):  # it waits
            assert tells.get(timeout=0.5) is None
        session.commit()
    assert tells.get(timeout=PATIENCE_SECONDS) is None
    thread.join(PATIENCE_SECONDS)
    assert waiting(app) == ["order-2"]


def test_a_transaction_that_cannot_commit_is_refused_before_anything_is_sent(
    app: Celery, database_url: str, engine: Engine, migrated: Any, tmp_path: Any
) -> None:
    """In AUTOCOMMIT, in another database, in none; and beside a store that joins none."""
    redis, other = "redis://127.0.0.1:1/0", create_engine(f"sqlite:///{tmp_path}/other.db")
    at_once = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with at_once, other.connect() as elsewhere, engine.connect() as connection:
        refusals: list[tuple[Any, ...]] = [
            (database_url, at_once, CannotDelay, "AUTOCOMMIT"),
            (database_url, elsewhere, CannotDelay, "no table native_delay_task"),
            (database_url, engine, TypeError, "expected a Session"),
            (redis, connection, NoStore, "the database of the transaction"),
        ]
        for store, place, error, said in refusals:
            install(app, store=store)
            with pytest.raises(error, match=said), in_transaction(app, place):
                send(app, 1)
    assert sent(app) == []
    other.dispose()


def test_a_database_without_the_tables_is_named_with_the_way_out(
    app: Celery, migrated: Any, tmp_path: Any
) -> None:
    from django.db import connections, transaction

    settings = {**connections.settings["default"], "NAME": str(tmp_path / "empty.db")}
    connections.settings["empty"] = settings
    install(app, store="django:empty")
    with transaction.atomic(using="empty"), pytest.raises(StoreUnavailable, match="migrate"):
        send(app, 1)
    assert sent(app) == []


def test_no_thread_keeps_a_connection_of_djangos_pool(database_url: str, migrated: Any) -> None:
    """Else the threads of a worker would wait for each other for ever."""
    from django.db import connections

    if migrated.vendor != "postgresql":
        pytest.skip("Django pools connections to PostgreSQL and Oracle")
    pool = {"min_size": 1, "max_size": 1, "timeout": 1}
    settings = {**django_settings(database_url), "OPTIONS": {"pool": pool}}
    connections.settings["pooled"] = connections.configure_settings(
        {"default": {}, "pooled": settings}
    )["pooled"]
    store = store_at("django:pooled", "tests", timeout_seconds=PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        for call in (store.table_names, store.prepare, store.census):
            threads.submit(call).result(PATIENCE_SECONDS)
            call()
    connections["pooled"].close_pool()
    del connections["pooled"], connections.settings["pooled"]


@pytest.mark.ci
def test_requests_go_on_while_the_broker_is_away_and_their_tasks_follow_in_order(
    app: Celery,
    atomic: Any,
    mortal_url: str,
    mortal_rabbitmq: PrivateRabbitMQ,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks that are sent before a worker has published the earlier ones come after these."""
    monkeypatch.setattr("celery_native_delay.store.dispatcher._RELAY_PAUSES_SECONDS", (0.0, 0.0))
    app.conf.broker_url = mortal_url
    with app.connection_for_write() as connection:
        app.amqp.queues["orders"](connection.default_channel).declare()
    with atomic():
        send(app, 0)
    assert sent(app) == ["order-0"]
    mortal_rabbitmq.kill()
    began = monotonic()
    for number in range(1, 20):
        with atomic():
            send(app, number)
    assert monotonic() - began < PATIENCE_SECONDS
    mortal_rabbitmq.start()
    with app.connection_for_write() as connection:
        assert delaying_channel(app, connection)[0].needed_store.leads("a worker")
    with atomic():
        send(app, 20)
    dispatch(app, 20)
    with atomic():
        send(app, 21)
    came = [task_id for task_id in sent(app) if task_id != "order-0"]  # its ack may be lost
    assert came == [f"order-{number}" for number in range(1, 22)]


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_a_commit_ends_in_time_while_a_redis_broker_hangs(
    atomic: Any, migrated: Any, empty_redis: PrivateRedis
) -> None:
    with Celery("shop", broker=empty_redis.url, set_as_current=False) as app:
        own = f"hanging-{migrated.vendor}"  # each process has one store of a name
        install(app, store="django:shop", store_timeout_seconds=1, namespace=own)
        with atomic():
            app.send_task("shop.remind")  # it connects
        began = monotonic()
        with hung(empty_redis), ThreadPoolExecutor(1) as threads:
            ended = threads.submit(committed, app, atomic)
            assert ended.exception(PATIENCE_SECONDS) is None
        assert monotonic() - began < PATIENCE_SECONDS


def committed(app: Celery, atomic: Any) -> None:
    """Commit a transaction with a task, in a thread with a connection of its own."""
    from django.db import connections

    with atomic():
        app.send_task("shop.remind")
    connections["shop"].close()


def test_a_process_that_starts_while_the_broker_is_away_sends_and_looks(
    app: Celery, atomic: Any, vhost_url: str
) -> None:
    """Delayed tasks and those of a transaction go into the store; others fail as in Celery."""
    app.conf.broker_url = f"amqp://guest:guest@127.0.0.1:1/{make_url(vhost_url).database}"
    app.conf.task_send_sent_event = True
    tried = []

    @before_task_publish.connect
    def note(**_: Any) -> None:
        tried.append(1)

    for countdown in (None, -1.0):
        with pytest.raises(OperationalError, match="refused"):
            send(app, 0, retry=False, countdown=countdown)
    assert len(tried) == 2, "Celery itself tries, and as often as its retry policy says"
    send(app, 1, countdown=HOUR_SECONDS)
    assert not app.amqp._event_dispatcher._outbound_buffer  # which Celery never sends
    with atomic():
        send(app, 2)
        send(app, 3, countdown=HOUR_SECONDS)
    with pytest.raises(OperationalError):
        send(app, 4, retry=False)
    delay = Delay(app)
    keyed = app.tasks["shop.remind"].s(5).set(task_id="order-5")
    assert delay.debounce(keyed, key="user:5", seconds=HOUR_SECONDS).id == "order-5"
    assert sorted(waiting(app)) == ["order-1", "order-2", "order-3", "order-5"]
    assert delay.cancel("order-3")
    with app.connection_for_write() as connection:
        told = admin_part(app, opened(app, connection)).status()
    assert told.found[0].problem.startswith("the broker is away")
    assert told.facts["waiting"] == 3
    assert examine(app)[0].check == "broker"
    app.conf.broker_url = vhost_url
    drop_pools(app)
    dispatch(app, 2)  # and the cancelled one
    assert sorted(sent(app)) == ["order-2", "order-3"]


def test_a_worker_publishes_the_tasks_of_a_process_that_died_after_its_commit(
    app: Celery, atomic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionRelay, "__call__", lambda self, token: None)
    with atomic():
        for number in range(10):
            send(app, number)
    assert sent(app) == []
    dispatch(app, 10)
    assert sent(app) == [f"order-{number}" for number in range(10)]
