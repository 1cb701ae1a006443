"""A Redis as the store beside another broker, in each way in which its URL can name it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from string import hexdigits
from time import monotonic
from urllib.parse import urlsplit

import pytest
from celery import Celery
from redis import CredentialProvider

from celery_native_delay import Delay, StoreUnavailable, install
from celery_native_delay.app.doctor import examine
from celery_native_delay.finding import WRONG
from celery_native_delay.rates.line import Asked
from celery_native_delay.rates.rate import Rate
from celery_native_delay.records.waiting import Replacement
from celery_native_delay.redis_server import RIGHTS
from celery_native_delay.store import redis as redis_store
from celery_native_delay.store.opened import store_at
from celery_native_delay.testing import PrivateRedis, private_redis, require_redis
from pytest_celery_native_delay import installed
from tests.brokers import self_signed_certificate
from tests.conformance.brokers import options_of, running_broker, settings_of
from tests.conformance.test_stores import HOUR_US, Broker, add, dispatched, listed, tasks
from tests.conformance.traffic import SETTINGS, attended, delaying
from tests.hanging import hung
from tests.proxy import Proxy, connected
from tests.sentinel import private_sentinel
from tests.traffic import JOBS, inbox, send_task
from tests.waiting import SLOWNESS, wait_until

GUIDE = Path(__file__).parents[2] / "docs" / "brokers" / "stores.md"
NAMESPACE = str(SETTINGS["namespace"])
USER, PASSWORD = "shop", "käse/@:"
LOGIN = "shop:k%C3%A4se%2F%40%3A@"


class Credentials(CredentialProvider):
    """Gives the user with few rights to each new connection."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, PASSWORD


def grant(server: PrivateRedis, *rights: str) -> None:
    login = ["on", f">{PASSWORD}", f"~{NAMESPACE}.*", f"~{NAMESPACE}:*"]
    server.client.execute_command("ACL", "SETUSER", USER, "reset", *login, *rights)


@contextmanager
def redis_at(way: str, folder: Path) -> Iterator[str]:
    """The URL of a Redis that only this test uses, reached in this way."""
    installed(require_redis, "redis")
    tls = self_signed_certificate(folder) if way == "tls" else None
    with private_redis(server="redis", tls=tls) as server:
        grant(server, *RIGHTS.split())
        assert server.url.startswith("rediss://" if tls else "redis://")
        yield {
            "acl": server.url.replace("//", f"//{LOGIN}"),
            "provider": f"{server.url}?credential_provider={__name__}:Credentials",
            "tls": server.url,
        }[way]


@contextmanager
def app_beside(store: str) -> Iterator[Celery]:
    """An app whose broker is a folder, and whose tasks wait in *store*."""
    with running_broker("filesystem", pytest.fail) as broker:
        url = broker.new_space()
        Path(urlsplit(url).path, "store").write_text(store)
        app = Celery("shop", broker=url, set_as_current=False)
        app.conf.broker_transport_options = options_of(url)
        with install(app, namespace=NAMESPACE, **settings_of(url)):
            yield app


@pytest.mark.parametrize("way", ["acl", "provider", "tls"])
def test_tasks_wait_change_and_are_dispatched(way: str, tmp_path: Path) -> None:
    """A user with no other rights than the guide names can do all of it."""
    with redis_at(way, tmp_path) as store, app_beside(store) as app:
        delay = Delay(app)
        for number in range(3):
            send_task(app, number, countdown=3600)
        delay.debounce(app.signature("shop.remind", queue=JOBS), key="seen", seconds=3600)
        assert delay.cancel("order-1")
        assert len(delay.ids()) == delay.count() == 3
        url = str(app.conf.broker_url)
        with attended(url), delaying(url) as connection, inbox(connection, JOBS) as received:
            assert not [each for each in examine(app) if each.level == WRONG]
            assert all(delay.run_all_now(delay.ids()))
            received.wait_for(4)  # the cancelled one, too, marked
        assert delay.count() == 0


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_a_missing_right_is_named(own_redis: PrivateRedis) -> None:
    assert f"~celery_delay.* ~celery_delay:* {RIGHTS}\n" in GUIDE.read_text()
    grant(own_redis, *RIGHTS.replace("+time", "").split())
    url = own_redis.url.replace("//", f"//{LOGIN}")
    with closing(store_at(url, NAMESPACE, timeout_seconds=5)) as store:
        assert all(f"grant its user {RIGHTS}" in each.remedy for each in store.findings())
        assert len(store.findings()) == 2


@pytest.mark.ci
def test_a_failover_loses_no_task_whose_apply_async_returned() -> None:
    """A publish raises meanwhile, or succeeds. The first host of the URL is no Sentinel."""
    with private_sentinel(server="redis") as sentinel:
        host = urlsplit(sentinel.url).netloc
        store = f"sentinel://127.0.0.1:1,{host}/{sentinel.master_name}/0"
        with app_beside(store) as app, ThreadPoolExecutor(1) as beside:
            delay, url = Delay(app), str(app.conf.broker_url)
            sent: list[str] = []

            def sends() -> bool:
                try:
                    sent.append(send_task(app, len(sent), countdown=3600))
                except StoreUnavailable:
                    return False
                return True

            with attended(url), delaying(url) as connection, inbox(connection, JOBS) as received:
                while len(sent) < 10:
                    assert sends()
                # Replication is asynchronous, and WAIT waits for what this client has written.
                sentinel.master.client.set("written", 1)
                assert sentinel.master.client.wait(1, 10_000) == 1
                old = sentinel.master
                promoted = beside.submit(sentinel.failover)
                wait_until(lambda: old.pid is None)
                for _ in range(3):
                    wait_until(sends, timeout_seconds=100 * SLOWNESS)
                assert promoted.result() is not old
                assert set(delay.ids()) == set(sent)
                assert all(delay.run_all_now(sent))
                came = received.wait_for(len(sent))
                assert {each.message.headers["id"] for each in came} == set(sent)


def test_a_row_that_was_taken_is_listed_again_whatever_the_token_of_its_dispatcher(
    store_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hexadecimal digit is the mark of a cancelled row, which would never be listed."""
    with closing(store_at(store_redis.url, NAMESPACE, timeout_seconds=5)) as store:
        for number, digit in enumerate(hexdigits):
            monkeypatch.setattr(redis_store, "token_hex", lambda size, digit=digit: digit * 32)
            add(store, number, wait_us=-1)
            store.settle(store.take(), (), ())
            assert listed(store) == [f"order-{number}"]
            store.purge(parked=False)


def test_a_full_redis_takes_no_task_and_lets_waiting_ones_go(own_redis: PrivateRedis) -> None:
    """Otherwise nothing would ever make room in it."""
    with closing(store_at(own_redis.url, NAMESPACE, timeout_seconds=5)) as store:
        add(store, 1, 2, wait_us=-1)
        add(store, 3, 4)
        asked = [Asked("shop.remind", None, Rate.of("1/h"))]
        lines = store.lines()
        assert not lines.ask(asked).wait_us
        own_redis.client.config_set("maxmemory", 1)
        assert lines.ask(asked).wait_us
        lines.close()
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            add(store, 5)
        assert any("maxmemory" in each.problem for each in store.findings())
        assert store.leads("a")
        assert tasks(store).cancel(["order-3"])[0]
        broker = Broker()
        broker.refuses.add("order-2")
        assert dispatched(store, broker) == ["order-1", "order-3"]
        assert tasks(store).move(["order-2"], lambda task: None)[0]
        assert dispatched(store) == ["order-2"]
        assert listed(store) == ["order-4"]


def test_a_row_leaves_nothing_when_it_is_removed_in_any_way(empty_redis: PrivateRedis) -> None:
    """And a row whose entry another program has deleted does not stop what reads the others."""
    with closing(store_at(empty_redis.url, "tests", timeout_seconds=10)) as found:
        assert isinstance(found, redis_store.RedisStore)
        store, broker = found, Broker()
        broker.refuses |= {"order-1", "order-2", "order-3"}
        add(store, 1, 2, 3, wait_us=-1)
        assert not dispatched(store, broker)
        assert empty_redis.client.hlen(store.keys.refusals) == 3
        first, second, third = store.rows_after(None, limit=9)
        empty_redis.client.hdel(store.keys.messages, first.key)
        assert store.rows_after(None, limit=9) == [second, third]
        assert store.remove(second.key, second.entry)
        assert store.purge(parked=False) == 2
        assert not empty_redis.client.exists(*store.keys.all[:-1])


def test_calls_that_were_given_up_leave_their_rows_as_they_are(empty_redis: PrivateRedis) -> None:
    """A row that a frozen Redis has taken too late is taken again at once, and not cancelled."""
    with (
        closing(store_at(empty_redis.url, "tests", timeout_seconds=20)) as patient,
        closing(store_at(empty_redis.url, "tests", timeout_seconds=0.4)) as brief,
    ):
        assert isinstance(brief, redis_store.RedisStore)
        add(patient, 1, wait_us=-1)
        (row,) = patient.rows_after(None, limit=9)
        wait_until(lambda: taken_by(brief, late_us=HOUR_US) == [])  # it is connected
        with hung(empty_redis), pytest.raises(StoreUnavailable):
            brief.take()
        wait_until(lambda: patient.census().taken == 1)
        add(patient, 2)
        wait_until(lambda: taken_by(brief) == [row.key])
        (row,) = patient.rows_after(None, limit=9)
        change = [Replacement(row.key.decode(), row.entry, row.next_us, "")]
        for patience_us, changed in ((-HOUR_US, set()), (HOUR_US, {change[0].name})):
            brief.patience_us = patience_us
            assert brief.replace(change, cancelled=True) == changed


def taken_by(store: redis_store.RedisStore, *, late_us: int = 0) -> list[object] | None:
    with suppress(StoreUnavailable):
        return [row.key for row in store.take(late_us=late_us).rows]
    return None


def test_sentinels_that_are_away_cost_no_more_than_the_timeout() -> None:
    store = store_at("sentinel://127.0.0.1:1,127.0.0.1:2/shop/0", "tests", timeout_seconds=5)
    began = monotonic()
    with closing(store), pytest.raises(StoreUnavailable, match="no Sentinel that answers"):
        store.census()
    assert monotonic() - began < 5


def test_a_connection_to_a_server_that_became_a_replica_is_replaced(short_path: Path) -> None:
    """A provider's address leads to the new primary; the old one keeps its connections open."""
    installed(require_redis, "redis")
    with ExitStack() as stack:
        old, new = (stack.enter_context(private_redis(server="redis")) for _ in range(2))
        primary = [old]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(short_path / "redis.sock"))
        listener.listen(10)
        proxy = Proxy(listener, lambda: connected(primary[0].socket))
        stack.callback(proxy.close)
        url = f"redis+socket://{short_path}/redis.sock"
        store = stack.enter_context(closing(store_at(url, "tests", timeout_seconds=10)))
        store.prepare()
        primary[:] = [new]
        old.client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
        store.prepare()
        assert new.client.smembers(store.keys.family) == {b"tests"}
