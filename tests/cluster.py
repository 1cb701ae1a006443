"""A private RabbitMQ cluster, for tests of failing nodes and networks.

    with private_rabbitmq_cluster() as cluster:
        app = Celery(broker=cluster.new_vhost())
        cluster.nodes[0].kill()
        cluster.heal()

Nodes, folders and network are removed when the block or the process ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep

from celery_native_delay.testing.processes import BrokerFailed, claim_ports, port_of
from celery_native_delay.testing.rabbitmq import (
    PrivateRabbitMQ,
    RabbitMQInstallation,
    in_erlang,
    vhost_name,
)
from tests.networks import PrivateNetwork
from tests.rabbitmqs import require_rabbitmq
from tests.waiting import SLOWNESS

_PATIENCE_SECONDS = 90 * SLOWNESS
"""Time for the nodes to join: 1-10 s, several times longer on a busy machine."""

_RECOVERY_SECONDS = 30 * SLOWNESS
"""A node of RabbitMQ 3.10 that paused itself resumes within 3-6 s, and sometimes never."""

# By default the user guest may connect from 127.0.0.1 only.
_CONFIG = """\
cluster_formation.peer_discovery_backend = classic_config
cluster_partition_handling = pause_minority
loopback_users.guest = false
{members}
{extra}
"""

# Seconds of silence after which a node is down for the others: 60 by default.
_ERLANG_ARGUMENTS = "-kernel net_ticktime 8"


@contextmanager
def private_rabbitmq_cluster(
    nodes: int = 3,
    *,
    version: str | None = None,
    partitions: bool = False,
    config: str = "",
    advanced_config: str = "",
) -> Iterator[PrivateRabbitMQCluster]:
    """Run a private RabbitMQ cluster until the block ends.

    With *partitions* each node has its own address in a network of this machine, which partition()
    can cut; needs root on Linux. All other arguments are those of private_rabbitmq(), for each
    node.

    Raises BrokerMissing if that version is not installed or the machine allows no such network,
    BrokerFailed if the nodes do not form a cluster.
    """
    installation = require_rabbitmq(version)
    with ExitStack() as stack:
        network = stack.enter_context(PrivateNetwork(nodes)) if partitions else None
        hosts = network.hosts if network else {"localhost": "127.0.0.1"}
        in_order = list(hosts) if network else ["localhost"] * nodes
        host_of = {f"node{number}@{host}": host for number, host in enumerate(in_order, 1)}
        formation = "cluster_formation.classic_config.nodes"
        members = "\n".join(f"{formation}.{n} = {name}" for n, name in enumerate(host_of, 1))
        (epmd,) = claim_ports(1)
        stack.enter_context(epmd)
        cookie = secrets.token_hex(16)
        started: list[PrivateRabbitMQ] = []
        for name, host in host_of.items():
            node = _Member(
                installation,
                config=_CONFIG.format(members=members, extra=config),
                advanced_config=advanced_config,
                erlang_arguments=_ERLANG_ARGUMENTS,
                name=name,
                hosts=hosts,
                cookie=cookie,
                epmd_port=port_of(epmd),
                runs_epmd=network is not None or not started,
                enter=network.enter(host) if network else (),
            )
            stack.callback(node.close)
            started.append(node)
        for node in started:  # all of them before the first is closed
            stack.callback(node.kill)
        cluster = PrivateRabbitMQCluster(started, network)
        cluster.heal()
        yield cluster


class _Member(PrivateRabbitMQ):
    """One RabbitMQ node of a cluster."""

    def __init__(
        self,
        installation: RabbitMQInstallation,
        *,
        name: str,
        hosts: Mapping[str, str],
        cookie: str,
        epmd_port: int,
        runs_epmd: bool,
        enter: Sequence[str],
        **options: str,
    ) -> None:
        """Prepare the node *name*, such as "node1@localhost".

        *hosts* has the address of every host name that may follow the @, *enter* is a command
        prefix that runs a command in the node's network namespace. One member per host
        *runs_epmd*, which knows the ports of all nodes.
        """
        self.ip = hosts[name.partition("@")[2]]
        self._member_name, self._member_epmd_port = name, epmd_port
        self._runs_epmd, self._enter = runs_epmd, enter
        super().__init__(installation, **options)
        cookie_file = self._home / ".erlang.cookie"
        cookie_file.write_text(cookie)
        cookie_file.chmod(0o400)
        lines = [f'{{host, {in_erlang(ip)}, ["{host}"]}}.' for host, ip in hosts.items()]
        (self._home / "inetrc").write_text("\n".join([*lines, "{lookup, [file, native]}.\n"]))

    def _server_environment(self) -> dict[str, str]:
        self.name, self._epmd_port = self._member_name, self._member_epmd_port
        inetrc = "/" / self._home.relative_to(self._root) / "inetrc"
        return super()._server_environment() | {"ERL_INETRC": str(inetrc)}

    def _companion(self) -> list[str]:
        return super()._companion() if self._runs_epmd else []

    def _inside(self, *command: str) -> list[str]:
        return [*self._enter, *super()._inside(*command)]

    def _serves(self) -> bool:
        """True if the node has finished its start; its API and port are ready earlier.

        RabbitMQ 3.10 never starts a virtual host here that another node creates in that tenth of a
        second (rabbit_vhost_sup_sup.erl v3.10).
        """
        if not super()._serves():
            return False
        log = (self._home / "log" / "node.log").read_bytes()
        return log.rfind(b"Server startup complete") > log.rfind(b"Starting RabbitMQ")


class PrivateRabbitMQCluster:
    """A cluster of RabbitMQ nodes, created by private_rabbitmq_cluster()."""

    nodes: list[PrivateRabbitMQ]
    """All nodes, running or not; each has kill(), stop(), start(), pause() and resume()."""

    def __init__(self, nodes: list[PrivateRabbitMQ], network: PrivateNetwork | None) -> None:
        self.nodes = nodes
        self._network = network

    @property
    def version(self) -> str:
        """The version that the nodes report, such as "3.10.8"."""
        return self.nodes[0].version

    def new_vhost(self) -> str:
        """Create an empty virtual host; returns its URLs, one per node, separated by ";"."""
        node = self._majority()
        name = vhost_name(node.new_vhost())

        def is_everywhere() -> bool:
            states = node.api("GET", f"/vhosts/{name}")["cluster_state"]
            return all(states.get(each) == "running" for each in running(node))

        _wait_until(is_everywhere, f"expected virtual host {name} on every node, it was not there")
        return ";".join(node.url_of(name) for node in self.nodes)

    # ---- faults ----------------------------------------------------------------------------

    def rolling_restart(self) -> None:
        """Restart the nodes one by one, as an upgrade does.

        Raises BrokerFailed if a node has not joined the cluster again after 90 s.
        """
        for node in self.nodes:
            node.stop()
            node.start()
            self.wait_until_joined()

    def partition(self, node: PrivateRabbitMQ) -> None:
        """Cut a node off from all other nodes in both directions; clients still reach every node.

        Packets between the nodes are dropped silently; RabbitMQ notices after 6-10 s.

        Raises BrokerFailed if the cluster was started without ``partitions=True``.
        """
        if self._network is None:
            raise BrokerFailed("for a network that can be cut: partitions=True")
        for other in self.nodes:
            if other is not node:
                self._network.cut(node.ip, other.ip)

    def heal(self) -> None:
        """End every fault: restore the network, resume and start all nodes, wait until they joined.

        Stopped nodes start together, because often none of them can serve alone. A node that has
        not joined the others within 30 s is restarted.

        Raises BrokerFailed when that takes longer than 90 s.
        """
        if self._network is not None:
            self._network.mend()
        self._start_all()
        try:
            _wait_until(self._have_joined, "", within_seconds=_RECOVERY_SECONDS)
        except BrokerFailed:
            for node in self._strays():
                node.kill()
            self._start_all()
            self.wait_until_joined()

    def wait_until_joined(self) -> None:
        """Wait until every node sees all others run, and no queue depends on a single node.

        Raises BrokerFailed when that takes longer than 90 s.
        """
        names = ", ".join(node.name for node in self.nodes)
        _wait_until(self._have_joined, f"expected {names} as one cluster, they were not")

    def _start_all(self) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(_start, self.nodes))

    def _strays(self) -> list[PrivateRabbitMQ]:
        """The nodes that do not answer, or that see other running nodes than the majority sees.

        RabbitMQ 3.x does not recover from a partition that ended before it was noticed: the nodes
        serve, but each counts the other as down (rabbitmq-server#17319).
        """
        seen_by = {node: _seen_by(node) for node in self.nodes}
        most = max(seen_by.values(), key=len)
        if len(most) <= len(self.nodes) // 2:
            return self.nodes
        return [node for node, seen in seen_by.items() if seen != most]

    def _have_joined(self) -> bool:
        names = {node.name for node in self.nodes}
        if not all(node._serves() and running(node) == names for node in self.nodes):
            return False
        if len(names) > 2:
            for node in self.nodes:  # refused while a quorum queue needs just this node
                node.api("GET", "/health/checks/node-is-quorum-critical")
        return True

    def _majority(self) -> PrivateRabbitMQ:
        """A node that sees most nodes run, and so may change the cluster's state."""
        for node in self.nodes:
            if len(_seen_by(node)) > len(self.nodes) // 2:
                return node
        raise BrokerFailed("no node sees more than half of the nodes run: start() or heal() them")


def _start(node: PrivateRabbitMQ) -> None:
    """Start *node*, and try a second time if the first start fails.

    A new node of 3.10 sometimes ends with "incompatible_feature_flags" at its first start.
    """
    try:
        node.start()
    except BrokerFailed:
        node.start()


def running(node: PrivateRabbitMQ) -> set[str]:
    """The names of the running nodes, as *node* sees them."""
    return {seen["name"] for seen in node.api("GET", "/nodes") if seen["running"]}


def _seen_by(node: PrivateRabbitMQ) -> set[str]:
    """The names of the running nodes, as *node* sees them; empty if *node* does not answer."""
    try:
        return running(node) if node.pid else set()
    except (OSError, BrokerFailed):
        return set()


def _wait_until(
    happened: Callable[[], bool], otherwise: str, *, within_seconds: float = _PATIENCE_SECONDS
) -> None:
    deadline = monotonic() + within_seconds
    while True:
        refused = ""
        try:
            if happened():
                return
        except (OSError, BrokerFailed) as exc:  # a node on its way up or down
            refused = f": {exc}"
        if monotonic() > deadline:
            raise BrokerFailed(f"{otherwise} after {within_seconds} s{refused}")
        sleep(0.1)
