"""Processes of private brokers: free ports, errors with the log, and how they end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_native_delay.testing import BrokerFailed
from celery_native_delay.testing.processes import KeptServer, claim_ports, port_of
from tests.processes import processes_of
from tests.waiting import wait_until


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
