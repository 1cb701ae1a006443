"""A private Redis master with replicas and a Sentinel, for tests of failovers.

with private_sentinel() as sentinel:
    app = Celery(broker=sentinel.url)
    app.conf.broker_transport_options = {"master_name": sentinel.master_name}
    sentinel.failover()
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from redis import exceptions

from celery_native_delay.testing.processes import BrokerFailed, KeptServer, claim_ports, port_of
from celery_native_delay.testing.redis import (
    PrivateRedis,
    RedisInstallation,
    ServerName,
    answers,
    client_of,
    private_redis,
    require_redis,
)
from tests.waiting import SLOWNESS

_PATIENCE_SECONDS = 100 * SLOWNESS
"""Time for a failover: 2-4 s, many times longer on a busy machine or after a failed election."""

# A silent master is down after 30 s by default, and an attempt to promote another takes 180 s.
_CONFIG = """\
bind 127.0.0.1
protected-mode no
dir "{folder}"
set-proc-title no
port {port}
sentinel monitor {name} 127.0.0.1 {master_port} 1
sentinel down-after-milliseconds {name} 500
sentinel failover-timeout {name} 3000
"""

# Intervals of a Sentinel in ms; the defaults are 10, 1 and 2 s. Other versions are only slower.
_HASTE = ("INFO-PERIOD", "200", "PING-PERIOD", "100", "PUBLISH-PERIOD", "200")


@contextmanager
def private_sentinel(
    *, server: ServerName | None = None, replicas: int = 1
) -> Iterator[PrivateSentinel]:
    """Run a private master, its *replicas* and a Sentinel until the block ends.

    *server* is "redis", "valkey", or None for the installed one.

    Raises BrokerMissing if the server is not installed, BrokerFailed if a process does not start.
    """
    with ExitStack() as stack:
        nodes: list[PrivateRedis] = []
        for _ in range(1 + replicas):
            copies = f"replicaof 127.0.0.1 {nodes[0].port}\n" if nodes else ""
            nodes.append(stack.enter_context(private_redis(server=server, config=copies)))
        for replica in nodes[1:]:
            _wait_until(partial(_is_linked, replica))
        sentinel = PrivateSentinel(require_redis(server), nodes)
        with closing(sentinel):
            sentinel.start()
            yield sentinel


class PrivateSentinel:
    """A master, its replicas and their Sentinel, created by private_sentinel()."""

    master_name: str = "native-delay"
    """The value for "master_name" in Celery's broker_transport_options."""

    def __init__(self, installation: RedisInstallation, nodes: list[PrivateRedis]) -> None:
        self.nodes = nodes
        (self._claim,) = claim_ports(1)
        port = port_of(self._claim)
        self.url = f"sentinel://127.0.0.1:{port}/0"
        self.client = client_of(host="127.0.0.1", port=port)
        """A Redis client connected to the Sentinel."""
        folder = Path(tempfile.mkdtemp(prefix="private-sentinel-"))
        configuration = folder / "sentinel.conf"
        master = {"name": self.master_name, "master_port": nodes[0].port}
        configuration.write_text(_CONFIG.format(folder=folder, port=port, **master))
        command = [str(installation.server), str(configuration), "--sentinel"]
        self._server = KeptServer(f"{installation} Sentinel", command, home=folder)

    def start(self) -> None:
        self._server.start(partial(answers, self.client), within_seconds=_PATIENCE_SECONDS)
        with suppress(exceptions.ResponseError):
            self.client.execute_command("SENTINEL", "DEBUG", *_HASTE)
        _wait_until(self._knows_all)

    def close(self) -> None:
        self._server.end(signal.SIGKILL)
        self._server.close()
        self.client.connection_pool.disconnect()
        self._claim.close()

    @property
    def master(self) -> PrivateRedis:
        """The node that the Sentinel calls the master, running or not."""
        _, port = self.client.sentinel_get_master_addr_by_name(self.master_name)
        return next(node for node in self.nodes if node.port == int(port))

    def failover(self) -> PrivateRedis:
        """Kill the master, which stays down until heal().

        Returns the replica that replaces it once the Sentinel says so and it accepts writes.

        Raises BrokerFailed if there is no new master within 100 s.
        """
        old = self.master
        old.kill()
        _wait_until(lambda: self.master is not old)
        _wait_until(self._has_a_master)
        _wait_until(lambda: self.master.client.info("replication")["role"] == "master")
        return self.master

    def heal(self) -> None:
        """Start all stopped nodes, and wait until each could become the master.

        Raises BrokerFailed when that takes longer than 100 s.
        """
        for node in self.nodes:
            node.start()
        _wait_until(self._knows_all)

    def _has_a_master(self) -> bool:
        """True if clients find it: at the end of a failover, after its address has changed."""
        state = self.client.sentinel_masters()[self.master_name]
        return not (state["is_sdown"] or state["is_odown"])

    def _knows_all(self) -> bool:
        """True if the Sentinel knows all replicas, and each could become the master."""
        met = [
            replica
            for replica in self.client.sentinel_slaves(self.master_name)
            if not (replica["is_sdown"] or replica["is_odown"] or replica["is_disconnected"])
            and replica["role-reported"] == "slave"
            and replica["master-link-status"] == "ok"
        ]
        return len(met) == len(self.nodes) - 1


def _is_linked(replica: PrivateRedis) -> bool:
    return bool(replica.client.info("replication").get("master_link_status") == "up")


def _wait_until(happened: Callable[[], bool]) -> None:
    deadline = monotonic() + _PATIENCE_SECONDS
    while True:
        # A server on its way up or down.
        with suppress(exceptions.ConnectionError, exceptions.TimeoutError):
            if happened():
                return
        if monotonic() > deadline:
            raise BrokerFailed(f"the Sentinel did not settle within {_PATIENCE_SECONDS} s")
        sleep(0.02)
