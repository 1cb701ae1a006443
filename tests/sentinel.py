"""A private master with replicas and Sentinels, for tests of a failover.

with private_sentinel() as sentinel:
    app = Celery(broker=sentinel.url)
    app.conf.broker_transport_options = {"master_name": sentinel.master_name}
    sentinel.failover()
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote

from celery_native_delay.testing.processes import BrokerFailed, KeptServer, claim_ports, port_of
from celery_native_delay.testing.redis import (
    PrivateRedis,
    RedisInstallation,
    ServerName,
    answers,
    client_of,
    private_redis,
    quoted,
    require_redis,
)

_MASTER_NAME = "native-delay"

_PATIENCE_SECONDS = 100
"""It takes 2-4 s; when Sentinels vote for themselves, and on a busy machine, many times that."""

# Milliseconds after which a silent master is down, and that an attempt to promote another may
# take: 30 and 180 s by default.
_CONFIG = """\
bind 127.0.0.1
protected-mode no
dir "{folder}"
set-proc-title no
port {port}
sentinel monitor {name} 127.0.0.1 {master_port} {quorum}
sentinel down-after-milliseconds {name} 500
sentinel failover-timeout {name} 3000
"""


# Milliseconds between what a Sentinel asks and tells: 10, 1 and 2 s by default. Known to Redis 7
# and Valkey; without it everything is just slower.
_HASTE = ("INFO-PERIOD", "200", "PING-PERIOD", "100", "PUBLISH-PERIOD", "200")


@contextmanager
def private_sentinel(
    *,
    server: ServerName | None = None,
    replicas: int = 1,
    sentinels: int = 1,
    password: str | None = None,
    config: str = "",
) -> Iterator[PrivateSentinel]:
    """Run a master, its *replicas* and Sentinels of our own until the block ends.

    *server* is "redis", "valkey" or None for whichever is installed; *password* and *config*
    (lines of redis.conf) are those of master and replicas. Sentinels themselves ask for none.

    Raises BrokerMissing when that server or redis-py is not installed, BrokerFailed when they do
    not start.
    """
    with ExitStack() as stack:
        nodes: list[PrivateRedis] = []
        for _ in range(1 + replicas):
            copies = f"replicaof 127.0.0.1 {nodes[0].port}\n" if nodes else ""
            node = private_redis(server=server, password=password, config=copies + config)
            nodes.append(stack.enter_context(node))
        for replica in nodes[1:]:
            _wait_until(partial(_is_linked, replica))
        watchers = []
        for _ in range(sentinels):
            watcher = _Sentinel(require_redis(server), nodes[0], quorum=sentinels // 2 + 1)
            stack.callback(watcher.close)
            watcher.start()
            watchers.append(watcher)
        sentinel = PrivateSentinel(nodes, watchers)
        _wait_until(sentinel._knows_all)
        yield sentinel


class PrivateSentinel:
    """A master, its replicas and Sentinels; made by private_sentinel()."""

    master_name: str = _MASTER_NAME
    """Celery's broker_transport_options need it as "master_name"."""

    def __init__(self, nodes: list[PrivateRedis], sentinels: list[_Sentinel]) -> None:
        self.nodes = nodes
        self._sentinels = sentinels

    @property
    def url(self) -> str:
        """Url of all Sentinels, as Celery takes it, with the password of master and replicas."""
        password = self.nodes[0].password
        credentials = "" if password is None else f":{quote(password, safe='')}@"
        return ";".join(
            f"sentinel://{credentials}127.0.0.1:{sentinel.port}/0" for sentinel in self._sentinels
        )

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every Sentinel, as redis.Sentinel takes them."""
        return [("127.0.0.1", sentinel.port) for sentinel in self._sentinels]

    @property
    def master(self) -> PrivateRedis:
        """The node that the first Sentinel holds for the master, running or not."""
        port = self._sentinels[0].master_port()
        return next(node for node in self.nodes if node.port == port)

    def failover(self, *, kill: bool = True) -> PrivateRedis:
        """Make a replica the master and return it, once all Sentinels say so and it accepts writes.

        *kill*: SIGKILL the master, which then stays down until heal(); else ask a Sentinel for an
        orderly change.

        Raises BrokerFailed when there is no new master within 100 s.
        """
        old = self.master
        if kill:
            old.kill()
        else:
            self._sentinels[0].client.sentinel_failover(self.master_name)
        _wait_until(lambda: all(s.master_port() != old.port for s in self._sentinels))
        _wait_until(lambda: self.master.client.info("replication")["role"] == "master")
        return self.master

    def heal(self) -> None:
        """Start the nodes that are down, and wait until each could become the master.

        Raises BrokerFailed when that takes longer than 100 s.
        """
        for node in self.nodes:
            node.start()
        _wait_until(self._knows_all)

    def _knows_all(self) -> bool:
        """True if every Sentinel has met all replicas and all other Sentinels."""
        return all(
            sentinel.knows(replicas=len(self.nodes) - 1, others=len(self._sentinels) - 1)
            for sentinel in self._sentinels
        )


class _Sentinel:
    """One Sentinel: it keeps what it learns in its own configuration."""

    def __init__(
        self, installation: RedisInstallation, master: PrivateRedis, *, quorum: int
    ) -> None:
        (self._claim,) = claim_ports(1)
        self.port = port_of(self._claim)
        folder = Path(tempfile.mkdtemp(prefix="private-sentinel-"))
        configuration = folder / "sentinel.conf"
        lines = _CONFIG.format(
            folder=folder, port=self.port, name=_MASTER_NAME, master_port=master.port, quorum=quorum
        )
        if master.password is not None:
            lines += f"sentinel auth-pass {_MASTER_NAME} {quoted(master.password)}\n"
        configuration.write_text(lines)
        self._server = KeptServer(
            f"{installation} Sentinel",
            [str(installation.server), str(configuration), "--sentinel"],
            home=folder,
        )

    def start(self) -> None:
        self._server.start(partial(answers, self.client), within_seconds=_PATIENCE_SECONDS)
        from redis.exceptions import ResponseError

        with suppress(ResponseError):
            self.client.execute_command("SENTINEL", "DEBUG", *_HASTE)

    def close(self) -> None:
        self._server.end(signal.SIGKILL)
        self._server.close()
        self.client.connection_pool.disconnect()
        self._claim.close()

    @cached_property
    def client(self) -> Any:
        return client_of(host="127.0.0.1", port=self.port)

    def master_port(self) -> int:
        _, port = self.client.sentinel_get_master_addr_by_name(_MASTER_NAME)
        return int(port)

    def knows(self, *, replicas: int, others: int) -> bool:
        """True if it has met so many; a replica counts while it could become the master."""
        met = [
            replica
            for replica in self.client.sentinel_slaves(_MASTER_NAME)
            if not (replica["is_sdown"] or replica["is_odown"] or replica["is_disconnected"])
            and replica["role-reported"] == "slave"
            and replica["master-link-status"] == "ok"
        ]
        sentinels = self.client.sentinel_sentinels(_MASTER_NAME)
        return len(met) == replicas and len(sentinels) == others


def _is_linked(replica: PrivateRedis) -> bool:
    return bool(replica.client.info("replication").get("master_link_status") == "up")


def _wait_until(happened: Callable[[], bool]) -> None:
    from redis import exceptions

    deadline = monotonic() + _PATIENCE_SECONDS
    while True:
        # A server on its way up or down.
        with suppress(exceptions.ConnectionError, exceptions.TimeoutError):
            if happened():
                return
        if monotonic() > deadline:
            raise BrokerFailed(f"the Sentinels did not settle within {_PATIENCE_SECONDS} s")
        sleep(0.02)
