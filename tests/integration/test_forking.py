"""Processes that fork after they have published: no child uses its parent's connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, socket

import pytest
from kombu import Connection

from tests.integration.traffic import depth
from tests.waiting import PATIENCE_SECONDS, wait_until

#: Delayed tasks of each call of ``publish`` in forking.py.
EACH = 10
QUEUE = "forked"

FORK = """
import os
from tests.integration.forking import publish

children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        publish()
        os._exit(0)
    children.append(child)
publish()
for child in children:
    assert os.waitpid(child, 0)[1] == 0
publish()
"""


@contextmanager
def process(*command: str, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python; after the block neither the process nor its children are left."""
    environment, own = {**os.environ, "FORKING_BROKER": url}, [sys.executable, *command]
    with subprocess.Popen(own, env=environment, start_new_session=True) as started:
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def assert_arrive(url: str, count: int) -> None:
    """Each task arrives, and none arrives twice."""
    with Connection(url) as connection:
        wait_until(lambda: depth(connection, QUEUE) >= count)
        assert depth(connection, QUEUE) == count


def test_forked_children_and_their_parent_publish_on_their_own_connections(vhost_url: str) -> None:
    """Siblings that read each other's publisher confirms would wait for ever."""
    with process("-W", "ignore", "-c", FORK, url=vhost_url) as parent:
        assert parent.wait(PATIENCE_SECONDS) == 0
    assert_arrive(vhost_url, EACH * (1 + 3 + 2))


def get(address: Path) -> bytes:
    """Return the first bytes of the answer to a request."""
    with socket(AF_UNIX) as client:
        client.settimeout(PATIENCE_SECONDS)
        client.connect(str(address))
        client.sendall(b"GET / HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n")
        return client.recv(12)


@pytest.mark.ci
@pytest.mark.parametrize("worker_class", ["sync", "gevent"])
def test_gunicorns_workers_publish_although_the_preloaded_app_has_published(
    worker_class: str, vhost_url: str, short_path: Path
) -> None:
    address = short_path / "web"
    serving = ["--preload", "--workers=3", "--timeout=90", "tests.integration.forking:application"]
    how = [f"--worker-class={worker_class}", f"--bind=unix:{address}"]
    with process("-m", "gunicorn", *how, *serving, url=vhost_url):
        wait_until(address.exists)
        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(get, [address] * 12))
    assert answers == [b"HTTP/1.1 200"] * 12
    assert_arrive(vhost_url, EACH * (1 + 12))
