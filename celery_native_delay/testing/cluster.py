"""A private RabbitMQ cluster for tests of what happens when nodes or networks fail.

with private_rabbitmq_cluster() as cluster:
    app = Celery(broker=cluster.new_vhost())
    cluster.nodes[0].kill()
    cluster.heal()
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic, sleep
from urllib.parse import quote

from .errors import BrokerFailed
from .networks import PrivateNetwork
from .ports import claim_ports, port_of
from .rabbitmq import ClusterSeat, PrivateRabbitMQ, vhost_name
from .rabbitmq_installation import require_rabbitmq

_PATIENCE_SECONDS = 90
"""Joining takes 1-3 s, a mended partition 5-15 s; a busy machine may need several times that."""

_CONFIG = """\
cluster_formation.peer_discovery_backend = classic_config
cluster_partition_handling = pause_minority
# guest may come from the other side of the private network.
loopback_users.guest = false
{nodes}
{extra}
"""

# A node that is silent for so long (s) is down for the others; 60 by default.
_ERLANG_ARGUMENTS = "-kernel net_ticktime 8"


@contextmanager
def private_rabbitmq_cluster(
    nodes: int = 3,
    *,
    version: str | None = None,
    partitions: bool = False,
    config: str = "",
    advanced_config: str = "",
    erlang_arguments: str = "",
) -> Iterator[PrivateRabbitMQCluster]:
    """Run a RabbitMQ cluster of our own until the block ends.

    *partitions*: every node gets a network of its own, so that partition() can cut it off; needs
    root on Linux. The rest is as for private_rabbitmq(), and holds for every node.

    Raises BrokerMissing when that version is not installed or partitions are not possible here,
    BrokerFailed when the cluster does not form.
    """
    installation = require_rabbitmq(version)
    with ExitStack() as stack:
        (epmd_claim,) = (stack.enter_context(claim) for claim in claim_ports(1))
        network = stack.enter_context(PrivateNetwork(nodes)) if partitions else None
        names = [f"node{number}" for number in range(1, nodes + 1)]
        hosts = network.hosts if network else {"localhost": "127.0.0.1"}
        host_of = dict(zip(names, hosts if network else ["localhost"] * nodes, strict=True))
        formation = [
            f"cluster_formation.classic_config.nodes.{number} = {name}@{host_of[name]}"
            for number, name in enumerate(names, 1)
        ]
        cookie = secrets.token_hex(16)
        members: list[PrivateRabbitMQ] = []
        for name in names:
            seat = ClusterSeat(
                node_name=name,
                hosts=hosts,
                host=host_of[name],
                cookie=cookie,
                epmd_port=port_of(epmd_claim),
                runs_epmd=network is not None or not members,
                enter=network.enter(host_of[name]) if network else (),
            )
            node = PrivateRabbitMQ(
                installation,
                config=_CONFIG.format(nodes="\n".join(formation), extra=config),
                advanced_config=advanced_config,
                erlang_arguments=f"{_ERLANG_ARGUMENTS} {erlang_arguments}",
                seat=seat,
            )
            stack.callback(node.close)
            members.append(node)
        for node in members:
            stack.callback(node.kill)
        cluster = PrivateRabbitMQCluster(members, network)
        cluster.heal()
        yield cluster


class PrivateRabbitMQCluster:
    """RabbitMQ nodes that are one cluster; made by private_rabbitmq_cluster()."""

    nodes: list[PrivateRabbitMQ]
    """All nodes, running or not; each may be killed, paused, stopped and started on its own."""

    def __init__(self, nodes: list[PrivateRabbitMQ], network: PrivateNetwork | None) -> None:
        self.nodes = nodes
        self._network = network

    @property
    def version(self) -> str:
        """Version that the nodes report, such as "3.10.8"."""
        return self.nodes[0].version

    @property
    def url(self) -> str:
        """Url of the default virtual host through every node."""
        return ";".join(self.urls("/"))

    def urls(self, vhost: str) -> list[str]:
        """Url of a virtual host through each node; joined by ";" Celery takes the next on failure.

        *vhost* is its name, or any url of it.
        """
        name = vhost_name(vhost) if "://" in vhost else vhost
        return [node.url_of(name) for node in self.nodes]

    def new_vhost(self) -> str:
        """Create an empty virtual host on every node; return its url through all of them."""
        name = vhost_name(self._majority.new_vhost())

        def runs() -> bool:
            states = self._majority.api("GET", f"/vhosts/{name}")["cluster_state"]
            running = [node for node in self.nodes if node.pid]
            return all(states.get(node.name) == "running" for node in running)

        _wait_until(runs, f"virtual host {name} is not on every node")
        return ";".join(self.urls(name))

    def delete_vhost(self, vhost: str) -> None:
        """Delete a virtual host, by its name or any url of it, with all that is in it."""
        self._majority.delete_vhost(vhost_name(vhost) if "://" in vhost else vhost)

    def leader_of(self, queue: str, vhost: str) -> PrivateRabbitMQ:
        """The node that leads a quorum queue, as the management API showed it within a second.

        *vhost* is the virtual host's name, or any url of it.
        """
        name = vhost_name(vhost) if "://" in vhost else vhost
        path = f"/queues/{quote(name, safe='')}/{quote(queue, safe='')}"
        found: list[PrivateRabbitMQ] = []

        def known() -> bool:
            leader = self._majority.api("GET", path).get("leader")
            found[:] = [node for node in self.nodes if node.name == leader]
            return bool(found)

        _wait_until(known, f"queue {queue} has no leader")
        return found[0]

    # ---- faults ----------------------------------------------------------------------------

    def rolling_restart(self) -> None:
        """Stop and start one node after the other, as an upgrade does; wait for each to join."""
        for node in self.nodes:
            node.stop()
            node.start()
            self.wait_until_joined()

    def partition(self, *nodes: PrivateRabbitMQ) -> None:
        """Cut these nodes off from the others, both ways; clients still reach every node.

        RabbitMQ notices after 6-10 s. Raises BrokerFailed without ``partitions=True``.
        """
        if self._network is None:
            raise BrokerFailed(
                "partition() needs nodes with networks of their own: expected "
                "private_rabbitmq_cluster(partitions=True)"
            )
        for node in nodes:
            for other in self.nodes:
                if other not in nodes:
                    self._network.cut(node.ip, other.ip)

    def heal(self) -> None:
        """End every fault: mend the network, resume and start all nodes, wait until they joined.

        Nodes that are down start together: the last of them may have to wait for the first.

        Raises BrokerFailed when that takes longer than 90 s.
        """
        if self._network is not None:
            self._network.mend()
        with ThreadPoolExecutor(len(self.nodes)) as starting:
            list(starting.map(PrivateRabbitMQ.start, self.nodes))
        self.wait_until_joined()

    def wait_until_joined(self, nodes: Iterable[PrivateRabbitMQ] | None = None) -> None:
        """Wait until these nodes, by default all, see all of them run, and no queue lags behind.

        Raises BrokerFailed when that takes longer than 90 s.
        """
        expected = list(self.nodes if nodes is None else nodes)
        names = {node.name for node in expected}

        def joined() -> bool:
            return all(
                names <= {seen["name"] for seen in node.api("GET", "/nodes") if seen["running"]}
                for node in expected
            ) and (len(expected) < len(self.nodes) or not any(map(_is_critical, expected)))

        _wait_until(joined, f"{', '.join(sorted(names))} did not join")

    @property
    def _majority(self) -> PrivateRabbitMQ:
        """A node that may change what all have: more than half see each other."""
        for node in self.nodes:
            if node.pid is None:
                continue
            with suppress(OSError, BrokerFailed):
                running = [seen for seen in node.api("GET", "/nodes") if seen["running"]]
                if len(running) > len(self.nodes) // 2:
                    return node
        raise BrokerFailed(
            f"no node of the cluster answers for more than half of its {len(self.nodes)}: "
            f"start or heal() them first"
        )


def _is_critical(node: PrivateRabbitMQ) -> bool:
    """True if a quorum queue would lose its majority without this node."""
    said = node.api("GET", "/health/checks/node-is-quorum-critical")
    return bool(said["status"] != "ok")


def _wait_until(happened: Callable[[], bool], otherwise: str) -> None:
    deadline = monotonic() + _PATIENCE_SECONDS
    while True:
        # A node on its way up or down.
        with suppress(OSError, BrokerFailed):
            if happened():
                return
        if monotonic() > deadline:
            raise BrokerFailed(f"{otherwise} within {_PATIENCE_SECONDS} s")
        sleep(0.1)
