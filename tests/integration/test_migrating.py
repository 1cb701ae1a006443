"""``delay migrate``: move waiting messages unchanged into the app's delay levels."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import time_ns
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner
from kombu import Connection, Exchange, Queue

from celery_native_delay import Delay, NoStore, Verdict, install
from celery_native_delay.app import holds
from celery_native_delay.app.install import installation_of
from celery_native_delay.app.installation import ask_broker
from celery_native_delay.app.moving import Account, move, moving
from celery_native_delay.cli import delay
from celery_native_delay.keyed.record import HEADER as KEY
from celery_native_delay.message import HEADER
from celery_native_delay.records.holds import Hold
from celery_native_delay.records.waiting import HELD, PLACE, Held
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Row
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, vhost_name
from celery_native_delay.transports.moving import HELD_STAYS
from celery_native_delay.transports.rabbitmq.topology import Topology
from celery_native_delay.transports.rabbitmq.wrapping import COUNTED_BY_THE_QUEUE
from tests.brokers import in_ci
from tests.integration.project import APP, Project
from tests.integration.traffic import depth
from tests.traffic import inbox
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

LEVELS = {"levels": 13, "fused_bits": 0}
EARLIER = {"namespace": "old_delay"}
OLD = "namespace:old_delay"
"""What an app was configured with before, besides the queue type."""

QUORUM = {"x-queue-type": "quorum"}


def queues() -> list[Queue]:
    shop = Exchange("shop", type="topic")
    return [
        Queue("reminders", queue_arguments=QUORUM),
        Queue("orders", shop, routing_key="orders.#", queue_arguments=QUORUM),
        Queue("parcels", shop, routing_key="parcel", queue_arguments=QUORUM),
    ]


def plain_app(url: str, **conf: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(task_queues=queues(), task_default_queue="reminders", **conf)
    if url.startswith("amqp"):
        # Confirmed, so that a sent message can be counted at once.
        app.conf.broker_transport_options = {"confirm_publish": True}
    return app


@contextmanager
def an_app(url: str, **settings: Any) -> Iterator[Celery]:
    """An installed app with few delay levels."""
    with closing(install(plain_app(url), **{**LEVELS, **settings})) as app:
        yield app


@pytest.fixture
def settings(rabbitmq: PrivateRabbitMQ) -> dict[str, Any]:
    return {"management_url": rabbitmq.management_url}


@pytest.fixture
def app(vhost_url: str, settings: dict[str, Any]) -> Iterator[Celery]:
    with an_app(vhost_url, **settings) as app:
        yield app


def command(app: Celery, name: str, *words: str, answer: str = "") -> Any:
    obj = SimpleNamespace(app=app)
    done = CliRunner().invoke(delay.commands[name], words, obj=obj, input=answer)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def migrated(app: Celery, *names: str, status: int = 0, more: tuple[str, ...] = ()) -> Any:
    """The result of ``delay migrate --json`` from these sources."""
    words = [word for name in names for word in ("--from", name)]
    done = command(app, "migrate", *words, "--yes", "--json", *more)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def send(app: Celery, number: int, countdown: float, **options: Any) -> str:
    options = {"queue": "orders", "task_id": f"order-{number}"} | options
    return str(app.send_task("shop.remind", ("ada",), countdown=countdown, **options).id)


def topology_of(app: Celery) -> Topology:
    return Topology(installation_of(app).settings())  # type: ignore[union-attr]


def in_levels(app: Celery) -> list[Any]:
    """The messages in the delay levels of an app; they stay there."""
    found = []
    with Connection(app.conf.broker_url) as connection:
        channel = connection.default_channel
        for hop in topology_of(app).level_queues:
            while (message := channel.basic_get(hop.queue)) is not None:
                found.append(message)
    return found


def headers_of(message: Any) -> dict[str, Any]:
    """A message's headers, without a quorum queue's counters."""
    return {k: v for k, v in message.headers.items() if k not in COUNTED_BY_THE_QUEUE}


def due_of(message: Any) -> float:
    return float(message.headers[HEADER]["due"]) / 1000


@contextmanager
def arriving(app: Celery, *names: str) -> Iterator[Any]:
    with app.connection_for_read() as connection:
        wanted = [queue for queue in queues() if queue.name in (names or ("orders",))]
        with inbox(connection, *wanted) as receiver:
            yield receiver


EARLY_SECONDS = 0.002


# ---- earlier levels of ours --------------------------------------------------------------------


def test_messages_in_levels_of_another_namespace_stay_unchanged(vhost_url: str) -> None:
    """The management API is not needed."""
    nobody = {"management_url": "http://127.0.0.1:9"}
    with an_app(vhost_url, **nobody) as app, an_app(vhost_url, **EARLIER) as old:
        send(old, 1, 500, priority=3)
        send(old, 2, 4)
        before = {message.headers["id"]: message for message in in_levels(old)}
        told = migrated(app, OLD)
        (source,) = (each for each in told["sources"] if each["count"])
        assert source["moved"] == 2
        assert in_levels(old) == []
        after = {message.headers["id"]: message for message in in_levels(app)}
        kept, was = after["order-1"], before["order-1"]
        assert headers_of(kept) == headers_of(was)  # delivery id, due time, destination
        assert kept.properties["priority"] == 3
        with arriving(app) as inbox:
            (arrival,) = inbox.wait_for(1)
        assert arrival.lateness_seconds >= -EARLY_SECONDS
        assert arrival.message.headers["id"] == "order-2"
        assert migrated(app, OLD)["moved"] == 0


def test_a_task_that_was_cancelled_in_the_broker_is_not_listed_in_the_store(
    vhost_url: str, settings: dict[str, Any], store_redis: PrivateRedis
) -> None:
    with (
        an_app(vhost_url, **settings, store=store_redis.url, store_tasks=["other"]) as old,
        an_app(vhost_url, **settings, store=store_redis.url) as app,
    ):
        for number in (1, 2):
            send(old, number, 400 + number)
        assert Delay(old).cancel("order-1").verdict is Verdict.NOTED
        assert migrated(app, "broker")["moved"] == 2
        assert [task.id for task in Delay(app).ls()] == ["order-2"]


# ---- other brokers -----------------------------------------------------------------------------


@pytest.fixture
def other_url(rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The URL of another virtual host, which stands for another broker."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def places(
    vhost_url: str, other_url: str, settings: Any, store_redis: PrivateRedis, tmp_path: Path
) -> dict[str, Any]:
    """Apps on several kinds of brokers, most of them with keys."""
    return {
        "levels": an_app(vhost_url, **settings),
        "other levels": an_app(other_url),
        "rabbitmq": an_app(vhost_url, **settings, store=f"sqlite:///{tmp_path}/rabbitmq.db"),
        "redis": an_app(store_redis.url),
        "store": an_app(f"sqla+sqlite:///{tmp_path}/delays.db"),
    }


def name_of(app: Celery) -> str:
    """The app's broker as an argument of ``--from``."""
    return str(app.conf.broker_url).removeprefix("sqla+")


def ids_in(app: Celery) -> set[str]:
    with suppress(NoStore):
        return set(Delay(app).ids())
    return {message.headers["id"] for message in in_levels(app)}


@pytest.mark.parametrize(
    ("source", "target"), [("other levels", "levels"), ("store", "levels"), ("levels", "store")]
)
def test_all_that_waits_is_moved_once(places: dict[str, Any], source: str, target: str) -> None:
    with places[source] as old, places[target] as new:
        for number in (1, 2):
            send(old, number, 500, queue="reminders")
        assert [migrated(new, name_of(old))["moved"] for _ in range(2)] == [2, 0]
        assert (ids_in(old), ids_in(new)) == (set(), {"order-1", "order-2"})


def test_rabbitmq_to_redis_and_back(app: Celery, vhost_url: str, store_redis: PrivateRedis) -> None:
    send(app, 1, 500, priority=3)
    send(app, 2, 4)
    send(app, 3, 600, queue="reminders")
    before = {message.headers["id"]: message for message in in_levels(app)}
    with an_app(store_redis.url, namespace="celery_delay") as redis_app:
        assert migrated(redis_app, vhost_url)["moved"] == 3
        assert in_levels(app) == []
        found = {(task.id, task.queue, task.args) for task in Delay(redis_app).ls()}
        queues = {"order-1": "orders", "order-2": "orders", "order-3": "reminders"}
        assert found == {(*each, "('ada',)") for each in queues.items()}
        assert migrated(app, store_redis.url)["moved"] == 3
        assert Delay(redis_app).count() == 0
    after = {message.headers["id"]: message for message in in_levels(app)}
    for task_id in before.keys() & after.keys():
        was, now = before[task_id], after[task_id]
        assert (now.body, due_of(now)) == (was.body, due_of(was))
        assert now.properties["priority"] == was.properties["priority"]
        for each in (was, now):
            each.headers.pop(HEADER)
        assert headers_of(now) == headers_of(was)
    with arriving(app) as inbox:
        (arrival,) = inbox.wait_for(1)
    assert arrival.lateness_seconds >= -EARLY_SECONDS
    info = arrival.message.delivery_info
    assert (info["exchange"], info["routing_key"]) == ("shop", "orders.#")


def hold_in(store: Any, hold: Hold) -> None:
    """Write the first waiting row as a worker writes it that holds the task."""
    (row,) = store.rows_after(None, limit=1)
    waits = StoreEntry.decoded(row.entry)
    headers = {**waits.headers, HELD: Held(hold.name, hold.by, waits.due_us).header}
    properties = {**waits.properties, "application_headers": headers}
    held = replace(waits, due_us=hold.due_us(waits.due_us), properties=properties)
    store.add([Row.of(held)])


def test_a_held_task_moves_from_store_to_store_and_redis_and_stays_held(
    app: Celery, tmp_path: Path, store_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a broker that only delays it cannot move: it would wait for ever."""
    monkeypatch.setattr(holds, "TAKEN_UP_SECONDS", 0)
    one, two = (f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two"))
    places = [("memory://", one), (store_redis.url, None), ("memory://", two)]
    with ExitStack() as stack:
        first, *others = (
            stack.enter_context(an_app(url, **({"store": store} if store else {})))
            for url, store in places
        )
        hold = Delay(first).hold("shop.remind")
        send(first, 1, 600)
        ask_broker(first, lambda channel, _: hold_in(channel.needed_store, hold))
        refused = migrated(app, one, status=1)["sources"][0]["refused"]
        assert list(refused) == [HELD_STAYS]
        for other, source in zip(others, (one, store_redis.url), strict=True):
            assert migrated(other, source)["moved"] == 1
            (task,) = Delay(other).ls()
            assert task.held is not None
            assert (task.held.hold, task.held.by) == (hold.name, hold.by)
            assert Delay(other).next_due() is None
        assert [(each.name, each.mode) for each in Delay(other).holds()] == [(hold.name, "ended")]
        assert Delay(other).release(hold.name) == 1
        (task,) = Delay(other).ls()
        assert task.due <= datetime.now(UTC)


@pytest.fixture(params=["sqlite", "redis"])
def a_store(request: pytest.FixtureRequest, tmp_path: Path, store_redis: PrivateRedis) -> str:
    return f"sqlite:///{tmp_path}/s.db" if request.param == "sqlite" else store_redis.url


def test_tasks_of_an_app_that_moved_to_another_virtual_host_are_named_and_moved(
    vhost_url: str, other_url: str, a_store: str
) -> None:
    old = vhost_name(vhost_url)
    with an_app(vhost_url, store=a_store) as app:
        command(app, "declare")
        send(app, 1, 500)
        send(app, 2, 600, queue="reminders")
        assert "none runs" not in command(app, "doctor").output
    with an_app(other_url, store=a_store) as moved:
        assert Delay(moved).count() == 0
        with moved.connection_for_write() as connection:
            part = connection.default_channel.worker_part(installation_of(moved).settings())
            assert next(iter(part.dangers())).check == "virtual hosts"
        told = " ".join(command(moved, "doctor").output.split())
        assert f"2 task(s) in {a_store} wait for workers of the virtual host '{old}'" in told
        assert f"delay migrate --from store --vhost {old}`" in told
        done = command(moved, "migrate", "--from", "store", "--yes")
        assert f"expected --vhost: {a_store} holds tasks of other" in done.output
        assert (done.exit_code, f"2 of '{old}'" in done.output) == (1, True)
        for count in (2, 0):
            assert migrated(moved, "store", more=("--vhost", old))["moved"] == count
        queues = {task.id: task.queue for task in Delay(moved).ls()}
        assert queues == {"order-1": "", "order-2": "reminders"}
        assert "none runs" not in command(moved, "doctor").output


def test_a_redis_that_was_the_broker_and_is_now_the_store_gives_its_tasks_away(
    vhost_url: str, store_redis: PrivateRedis
) -> None:
    with an_app(store_redis.url) as old:
        send(old, 1, 500, queue="reminders")
    with an_app(vhost_url, store=store_redis.url) as app:
        assert migrated(app, store_redis.url)["moved"] == 1
        assert [task.id for task in Delay(app).ls()] == ["order-1"]


def test_an_old_redis_is_read_with_all_transport_options_of_the_app(
    store_redis: PrivateRedis,
) -> None:
    """Celery's own example of priorities sets ``sep``, which is part of the names of lists."""
    server = store_redis.url.removesuffix("/0")
    options = {"sep": ":", "priority_steps": [0, 2, 7], "queue_order_strategy": "priority"}
    options["global_keyprefix"] = "shop:"
    with (
        closing(install(plain_app(f"{server}/1"))) as old,
        closing(install(plain_app(f"{server}/2"))) as new,
    ):
        for app in (old, new):
            app.conf.broker_transport_options = options
        for number, priority in enumerate((0, 3, 9)):
            send(old, number, 500, priority=priority, queue="orders")
        assert migrated(new, str(old.conf.broker_url))["moved"] == 3
        assert [task.queue for task in Delay(new).ls()] == ["orders"] * 3
        Delay(new).run_all_now([f"order-{number}" for number in range(3)])
        with new.connection_for_read() as connection:
            client = connection.default_channel.client
            lists = ("orders", "orders:2", "orders:7")  # the client adds the prefix
            wait_until(lambda: all(client.llen(name) == 1 for name in lists))


def test_wrong_sources_are_refused_with_the_reason(
    app: Celery, vhost_url: str, store_redis: PrivateRedis
) -> None:
    for name, says in [
        ("queue:orders", "expected namespace:NAME"),
        (vhost_url, "own broker"),
        ("amqp://127.0.0.1:9//", "cannot use amqp://"),
        ("nosuch://x", "scheme"),
        ("namespace:celery_delay", "namespace:NAME"),
    ]:
        done = command(app, "migrate", "--from", name, "--yes")
        assert (done.exit_code, says in done.output) == (1, True), (name, done.output)
    with an_app(store_redis.url) as redis_app:
        done = command(redis_app, "migrate", "--from", OLD, "--yes")
        assert "about RabbitMQ" in done.output


# ---- asking, counting, interrupting ------------------------------------------------------------


def test_migrate_counts_and_asks_first(
    app: Celery, vhost_url: str, settings: dict[str, Any]
) -> None:
    with an_app(vhost_url, **settings, **EARLIER) as old:
        for number in range(3):
            send(old, number, 400)
        name = topology_of(old).name
        done = command(app, "migrate", "--from", OLD, answer="n\n")
        assert done.exit_code == 1
        assert f"{name}         3\nMove them into" in done.stderr
        assert len(in_levels(old)) == 3
        done = command(app, "migrate", "--from", OLD, "--rate", "100", answer="y\n")
        assert done.stdout.splitlines()[-1] == f"3 message(s) moved into {topology_of(app).name}"


@pytest.mark.ci
def test_ctrl_c_ends_migrate_after_the_current_message(
    vhost_url: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    Project(tmp_path).write(APP, vhost_url, **LEVELS, **settings)
    command = [sys.executable, "-m", "celery", "-A", "shop", "delay", "migrate"]
    with an_app(vhost_url, **settings, **EARLIER) as old, Connection(vhost_url) as connection:
        for number in range(9):
            send(old, number, 400, queue="reminders")
        (level,) = {message.delivery_info["exchange"] for message in in_levels(old)}

        def left() -> int:
            return depth(connection, level.removesuffix(".entry"))

        with subprocess.Popen(
            [*command, "--from", OLD, "--rate", "1", "--yes"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            wait_until(lambda: left() < 9)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        (moved,) = re.findall(r"^(\d) message\(s\) moved .*; interrupted: run it again", said, re.M)
        wait_until(lambda: left() == 9 - int(moved))


class Killed(Exception):
    """Stands for SIGKILL: nothing is acknowledged and the connection closes."""


def killed_in_the_middle(app: Celery, *names: str) -> None:
    """Move one message, and stop before the original is deleted."""
    with ExitStack() as stack:
        connection = stack.enter_context(app.connection_for_write())
        part, sources = stack.enter_context(moving(app, connection, names))
        part.prepare(list(app.amqp.queues.values()))

        def done() -> bool:
            raise Killed

        (source,) = (each for each in sources if each.count())
        source.done = done  # type: ignore[method-assign]
        with pytest.raises(Killed):
            move(
                source, part, Account("", 0), pace=None, stopped=bool, on_each=bool, on_doubt=print
            )


@pytest.mark.parametrize("stored", [False, True], ids=["into the broker", "into a store"])
def test_a_message_in_both_places_is_recognised_or_reported_as_doubtful(
    vhost_url: str, settings: dict[str, Any], store_redis: PrivateRedis, stored: bool
) -> None:
    more = {"store": store_redis.url} if stored else {}
    with (
        an_app(vhost_url, **settings, **EARLIER) as old,
        an_app(vhost_url, **settings, **more) as app,
    ):
        for number in (1, 2):
            send(old, number, 400)
        killed_in_the_middle(app, OLD)
        (source,) = migrated(app, OLD)["sources"]
        assert source["moved"] == 2
        if stored:
            assert source["doubtful"] == []
            assert sorted(task.id for task in Delay(app).ls()) == ["order-1", "order-2"]
        else:
            ids = sorted(message.headers["id"] for message in in_levels(app))
            assert (ids, source["doubtful"]) == (["order-1", "order-1", "order-2"], ["order-1"])


def test_from_redis_and_stores_a_message_in_both_places_is_reported(
    app: Celery, store_redis: PrivateRedis, tmp_path: Path
) -> None:
    store = f"sqla+sqlite:///{tmp_path}/delays.db"
    with an_app(store_redis.url) as redis_app, an_app(store) as store_app:
        for number, other in enumerate((redis_app, store_app)):
            send(other, number, 400, queue="reminders")
            send(other, 7, 500, queue="reminders")
            killed_in_the_middle(app, other.conf.broker_url)
            (source,) = migrated(app, other.conf.broker_url)["sources"]
            assert (source["moved"], source["doubtful"]) == (2, [f"order-{number}"])
            assert Delay(other).count() == 0
    ids = sorted(message.headers["id"] for message in in_levels(app))
    assert ids == [f"order-{number}" for number in (0, 0, 1, 1, 7, 7)]


def test_a_message_due_beyond_the_levels_is_refused_and_stays(
    app: Celery, store_redis: PrivateRedis
) -> None:
    with an_app(store_redis.url, levels=20) as old:
        send(old, 1, 10_000)
        send(old, 2, 100)
        (source,) = migrated(app, store_redis.url, status=1)["sources"]
        assert source["moved"] == 1
        assert "longest delay" in next(iter(source["refused"]))
        assert Delay(old).ids() == ["order-1"]


# ---- keys, and places in the queues of rates ---------------------------------------------------


def keyed_calls(app: Celery) -> list[tuple[str, Any]]:
    """Keyed calls after which a task waits, with their kinds."""
    delay, remind = Delay(app), app.signature("shop.remind", queue="reminders")
    return [
        ("unique", lambda: delay.unique(remind, key="ada", countdown=500)),
        ("debounce", lambda: delay.debounce(remind, key="ada", seconds=500)),
        ("trailing", lambda: delay.throttle(remind, key="ada", seconds=500, edge="trailing")),
        ("both", lambda: delay.throttle(remind, key="ada", seconds=500, edge="both")),
    ]


def ids_after(app: Celery) -> dict[str, str]:
    """The waiting task of each kind of keyed call, after calling each twice."""
    for call in dict(keyed_calls(app)).values():
        call()
    # The first call of "both" runs at once.
    return {kind: call().id for kind, call in keyed_calls(app)}


def waiting(app: Celery) -> set[str]:
    soon_us = time_ns() // 1000 + 60_000_000
    return {task.id for task in Delay(app).ls() if task.due_us > soon_us}


@pytest.mark.parametrize(("source", "target"), [("redis", "rabbitmq"), in_ci("store", "redis")])
def test_a_key_moves_with_its_task(places: dict[str, Any], source: str, target: str) -> None:
    """The next call on the new broker finds the task; on the old one the key is free."""
    with places[source] as old, places[target] as new:
        ids = ids_after(old)
        assert waiting(old) == {*ids.values()}
        told = migrated(new, name_of(old))
        assert sum(each["refused"] != {} for each in told["sources"]) == 0
        assert waiting(new) == {*ids.values()}
        assert waiting(old) == set()
        again = {kind: call().id for kind, call in keyed_calls(new)}
        assert again["unique"] == ids["unique"]
        assert not {*again.values()} & {*ids.values()} - {ids["unique"]}
        assert waiting(new) == {*again.values()}
        back = {kind: call().id for kind, call in keyed_calls(old)}
        assert not {*back.values()} & {*ids.values()}
        assert waiting(old) == {id for kind, id in back.items() if kind != "both"}


def test_into_a_broker_without_store_a_task_moves_without_its_key(
    app: Celery, store_redis: PrivateRedis
) -> None:
    with an_app(store_redis.url) as old:
        call = keyed_calls(old)[0][1]
        first = call().id
        done = command(app, "migrate", "--from", store_redis.url, answer="n\n")
        assert "tasks lose their key" in done.stderr
        assert migrated(app, store_redis.url)["moved"] == 1
        (message,) = in_levels(app)
        assert message.headers["id"] == first
        assert KEY not in message.headers  # a worker would look for a record for ever
        assert call().id != first


def test_a_keyed_task_stays_if_another_waits_for_its_key(places: dict[str, Any]) -> None:
    with places["redis"] as old, places["rabbitmq"] as new:
        first, second = (keyed_calls(each)[0][1]().id for each in (old, new))
        (source,) = migrated(new, name_of(old), status=1)["sources"]
        assert "another task with its key waits" in next(iter(source["refused"]))
        assert (waiting(old), waiting(new)) == ({first}, {second})
        assert Delay(new).cancel(second)
        assert migrated(new, name_of(old))["moved"] == 1
        assert waiting(new) == {first}


def test_a_place_in_a_rates_queue_is_kept_on_the_same_broker_only(
    vhost_url: str, settings: dict[str, Any], store_redis: PrivateRedis
) -> None:
    """On another broker the task queues for its rate again."""
    options = {"headers": {PLACE: '{"reminders": 17}'}}
    with (
        an_app(store_redis.url) as redis_app,
        an_app(vhost_url, **settings, **EARLIER) as old,
        an_app(vhost_url, **settings) as app,
    ):
        send(redis_app, 1, 500, queue="reminders", **options)
        send(old, 2, 500, queue="reminders", **options)
        assert migrated(app, OLD, store_redis.url)["moved"] == 2
        places = {each.headers["id"]: each.headers.get(PLACE) for each in in_levels(app)}
        assert places == {"order-1": None, "order-2": '{"reminders": 17}'}
