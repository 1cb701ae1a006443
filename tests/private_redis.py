"""A Redis of a test's own: started in milliseconds, gone without a trace. And one with a Sentinel.

Loopback and a unix socket only, data in a temporary folder, append-only file on.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import redis
from redis.exceptions import RedisError

from tests.waiting import wait_until

IN_CI = os.environ.get("CI") == "true"

_BOOT_SECONDS = 30

_CONFIG = """\
bind 127.0.0.1
protected-mode no
dir "{folder}"
unixsocket "{folder}/redis.sock"
appendonly yes
save ""
repl-diskless-sync-delay 0
"""

_SENTINEL_CONFIG = """\
bind 127.0.0.1
protected-mode no
dir "{folder}"
port {port}
sentinel monitor {name} 127.0.0.1 {master_port} 1
sentinel down-after-milliseconds {name} 500
sentinel failover-timeout {name} 5000
"""


@contextmanager
def private_redis(
    *,
    config: str = "",
    tls: tuple[Path, Path] | None = None,
    replica_of: PrivateRedis | None = None,
) -> Iterator[PrivateRedis]:
    """Run a Redis until the block ends; *config* is more lines of redis.conf."""
    with tempfile.TemporaryDirectory(prefix="native-delay-") as folder:
        server = PrivateRedis(Path(folder), config=config, tls=tls, replica_of=replica_of)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class PrivateRedis:
    """A Redis that belongs to this process; *port* stays the same after kill() and start()."""

    def __init__(
        self,
        folder: Path,
        *,
        config: str,
        tls: tuple[Path, Path] | None,
        replica_of: PrivateRedis | None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self._certificate = tls[0] if tls else None
        self._process: subprocess.Popen[bytes] | None = None
        lines = [_CONFIG.format(folder=folder), config]
        if tls:
            lines += [f"port 0\ntls-port {self.port}\ntls-cert-file {tls[0]}"]
            lines += [f"tls-key-file {tls[1]}\ntls-ca-cert-file {tls[0]}\ntls-auth-clients no"]
        else:
            lines += [f"port {self.port}"]
        if replica_of is not None:
            lines += [f"replicaof 127.0.0.1 {replica_of.port}"]
        (folder / "redis.conf").write_text("\n".join([*lines, ""]))

    @property
    def url(self) -> str:
        """Url of database 0 over TCP, as Celery takes it."""
        if self._certificate is None:
            return f"redis://127.0.0.1:{self.port}/0"
        query = urlencode({"ssl_cert_reqs": "required", "ssl_ca_certs": self._certificate})
        return f"rediss://127.0.0.1:{self.port}/0?{query}"

    @property
    def socket_url(self) -> str:
        """The same over the unix socket."""
        return f"redis+socket://{quote(str(self.folder / 'redis.sock'))}"

    @property
    def client(self) -> Any:
        """A plain client, over the unix socket."""
        return redis.Redis(unix_socket_path=str(self.folder / "redis.sock"), socket_timeout=30)

    def start(self) -> None:
        """Start it, again on the same port and data, and wait until it has loaded them."""
        self._process = run(["redis-server", str(self.folder / "redis.conf")], self.folder)
        wait_until(lambda: answers(self.client), timeout_seconds=_BOOT_SECONDS)

    def stop(self) -> None:
        """Stop it in good order, as an administrator would; data and port stay."""
        self._end(lambda process: process.terminate())

    def kill(self) -> None:
        """SIGKILL it, as a power cut would; data and port stay."""
        self._end(lambda process: process.kill())

    def _end(self, how: Any) -> None:
        if self._process is not None:
            how(self._process)
            self._process.wait(30)
            self._process = None


@dataclass
class PrivateSentinel:
    """A master, its replica, and the Sentinel that watches them."""

    nodes: list[PrivateRedis]
    port: int
    master_name: str = "native-delay"

    @property
    def url(self) -> str:
        return f"sentinel://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.port, socket_timeout=30, decode_responses=True)

    @property
    def master(self) -> PrivateRedis:
        """The one that the Sentinel names."""
        _, port = self.client.execute_command(
            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master_name
        )
        return next(node for node in self.nodes if node.port == int(port))

    def knows_all(self) -> bool:
        """Whether it would find a replica to make master."""
        with suppress(RedisError):
            replicas = self.client.execute_command("SENTINEL", "REPLICAS", self.master_name)
            return any("master-link-status" in str(item) and "ok" in str(item) for item in replicas)
        return False

    def failover(self) -> None:
        """SIGKILL the master, and wait until the replica has taken over."""
        before = self.master
        before.kill()

        def another() -> bool:
            return self.master is not before and self.master.client.role()[0] == b"master"

        wait_until(another, timeout_seconds=40)


@contextmanager
def private_sentinel() -> Iterator[PrivateSentinel]:
    """Run a master, a replica and a Sentinel until the block ends."""
    with ExitStack() as stack:
        master = stack.enter_context(private_redis())
        replica = stack.enter_context(private_redis(replica_of=master))

        def in_step() -> bool:
            return bool(replica.client.info("replication")["master_link_status"] == "up")

        wait_until(in_step, timeout_seconds=_BOOT_SECONDS)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="native-delay-")))
        sentinel = PrivateSentinel([master, replica], free_port())
        names = {"folder": folder, "port": sentinel.port, "name": sentinel.master_name}
        text = _SENTINEL_CONFIG.format(**names, master_port=master.port)
        (folder / "sentinel.conf").write_text(text)
        process = run(["redis-server", str(folder / "sentinel.conf"), "--sentinel"], folder)
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_until(lambda: answers(sentinel.client), timeout_seconds=_BOOT_SECONDS)
        wait_until(sentinel.knows_all, timeout_seconds=_BOOT_SECONDS)
        yield sentinel


def self_signed_certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key for 127.0.0.1, in PEM."""
    certificate, key = folder / "server.crt", folder / "server.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def require_redis_server() -> None:
    """Without a redis-server skip at home, fail in CI."""
    if shutil.which("redis-server") is None:
        reason = "redis-server is not installed: apt install redis-server"
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)


def run(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False


def free_port() -> int:
    """A port of 127.0.0.1 below those that Linux and macOS give to clients."""
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
