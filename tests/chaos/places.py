"""The brokers under test: how to start each one, its workers, and its possible faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from celery_native_delay.testing import (
    BrokerFailed,
    BrokerMissing,
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
)
from tests.brokers import MORTAL, ON_RABBITMQS, SYSTEM_RABBITMQ
from tests.chaos.schedule import FaultKind
from tests.cluster import PrivateRabbitMQCluster, private_rabbitmq_cluster
from tests.hanging import hung
from tests.postgresql import PrivatePostgreSQL, end_backends, private_postgresql
from tests.rabbitmqs import require_rabbitmq
from tests.sentinel import PrivateSentinel, private_sentinel
from tests.waiting import wait_until

Strike = Callable[[int], AbstractContextManager[str]]
"""One fault: takes the number of its target, yields the target's name, repairs at the end."""


@dataclass(frozen=True)
class Post:
    """A worker that a supervisor starts again when it ends."""

    queue: str
    installed: bool = True
    mortal: bool = True
    """True if faults may kill it: kombu's transport then requeues its messages."""


@dataclass
class Place:
    """A running broker with its URL, app configuration, workers and faults."""

    what: str
    """The broker's name and version, for the report."""
    url: str
    conf: dict[str, Any]
    posts: tuple[Post, ...] = (Post("default"), Post("default"), Post("side"), Post("invoices"))
    faults: dict[FaultKind, Strike] = field(default_factory=dict)
    schedule_queues: tuple[str, ...] = ("default", "side", "invoices")
    """The queues that schedule entries use; only workers with the package consume them."""
    once: bool = False
    """True if half of the tasks are once: all workers have the package, no fault loses claims."""


BROKERS = (
    *(str(each.id) for each in ON_RABBITMQS),
    *(f"{each.id}-postgresql" for each in ON_RABBITMQS),
    "redis",
    "postgresql",
)


@contextmanager
def place(broker: str, folder: Path) -> Iterator[Place]:
    """Start one of BROKERS until the block ends; *folder* is empty.

    Raises BrokerMissing if the broker is not installed.
    """
    with ExitStack() as stack:
        match broker.split("-"):
            case ["rabbitmq", version, *kind]:
                store: PrivateRedis | PrivatePostgreSQL
                if kind:
                    store = stack.enter_context(private_postgresql())
                    store_url = store.new_database()
                else:
                    store = stack.enter_context(private_redis())
                    store_url = store.url
                installed = require_rabbitmq(None if version == SYSTEM_RABBITMQ else version)
                cluster, can_be_cut = _cluster(stack, installed.version)
                yield _on_rabbitmq(cluster, store, store_url, can_be_cut=can_be_cut)
            case ["redis"]:
                yield _on_redis(stack.enter_context(private_sentinel(replicas=2)))
            case ["postgresql"]:
                yield _on_postgresql(stack.enter_context(private_postgresql()), folder)
            case _:
                raise LookupError(broker)


# ---- RabbitMQ ----------------------------------------------------------------------------------


def _cluster(stack: ExitStack, version: str) -> tuple[PrivateRabbitMQCluster, bool]:
    """A cluster of three nodes, and True if this machine can cut the network between them."""
    try:
        running = private_rabbitmq_cluster(version=version, partitions=True, **MORTAL)
        return stack.enter_context(running), True
    except BrokerMissing:
        return stack.enter_context(private_rabbitmq_cluster(version=version, **MORTAL)), False


def _on_rabbitmq(
    cluster: PrivateRabbitMQCluster,
    store: PrivateRedis | PrivatePostgreSQL,
    store_url: str,
    *,
    can_be_cut: bool,
) -> Place:
    """RabbitMQ with a store in Redis or PostgreSQL, in which all delayed tasks wait."""
    url = cluster.new_vhost()
    conf = {
        "queue_type": "quorum",
        "native_delay_store": store_url,
        "native_delay_once": ["careful_once"],
        "native_delay_levels": 13,
        "tests_lease_seconds": 20,
    }
    nodes = len(cluster.nodes)

    def on_node(do: Callable[[PrivateRabbitMQ], object]) -> Strike:
        return partial(_on_node, cluster, do)

    faults: dict[FaultKind, Strike] = {
        FaultKind("node-killed", 1, 8, nodes): on_node(PrivateRabbitMQ.kill),
        FaultKind("node-paused", 2, 12, nodes): on_node(PrivateRabbitMQ.pause),
        FaultKind("rolling-restart", 0, 1): lambda _: _rolled(cluster),
        FaultKind("connections-dropped", 0, 0.5): partial(_dropped, lambda: _close_all(cluster)),
        FaultKind("store-killed", 0.5, 3): partial(_down, store.kill, store.start, "the store"),
        FaultKind("store-restarted", 0, 1): partial(_down, store.stop, store.start, "the store"),
        FaultKind("store-hung", 1, 12): lambda _: _hung(store, "the store"),
    }
    if can_be_cut:
        faults[FaultKind("partition", 8, 20, nodes)] = on_node(cluster.partition)
    kept = "Redis" if isinstance(store, PrivateRedis) else "PostgreSQL"
    what = f"RabbitMQ {cluster.version}, 3 nodes, store in {kept}"
    return Place(what, url, conf, faults=faults, once=True)


@contextmanager
def _on_node(
    cluster: PrivateRabbitMQCluster, do: Callable[[PrivateRabbitMQ], object], number: int
) -> Iterator[str]:
    node = cluster.nodes[number]
    do(node)
    yield node.name
    cluster.heal()


@contextmanager
def _rolled(cluster: PrivateRabbitMQCluster) -> Iterator[str]:
    cluster.rolling_restart()
    yield "all nodes"


def _close_all(cluster: PrivateRabbitMQCluster) -> None:
    node = cluster.nodes[0]
    for connection in node.api("GET", "/connections"):
        with suppress(BrokerFailed):  # the connection has ended by itself
            node.api("DELETE", f"/connections/{quote(connection['name'], safe='')}")


# ---- Redis -------------------------------------------------------------------------------------


def _on_redis(sentinel: PrivateSentinel) -> Place:
    """Three Redis nodes and a Sentinel.

    Replication is asynchronous, and a replaced master confirms writes until a Sentinel tells it. A
    master loses its confirmed writes if it hangs longer than the Sentinel waits (3 s here), or if
    SENTINEL FAILOVER replaces it while it runs, which no fault does. A cleanly stopped master waits
    for its replicas first.
    """
    # A busy machine may keep a master silent for the half second that others are content with.
    sentinel.client.sentinel_set(sentinel.master_name, "down-after-milliseconds", 3000)
    conf = {
        "broker_transport_options": {
            "master_name": sentinel.master_name,
            # Unacknowledged messages of a killed worker come back after 5 s.
            "visibility_timeout": 5,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            # One that is killed while it looks for that keeps all from it, for 300 s by default.
            "unacked_mutex_expire": 5,
        }
    }

    def disconnect_all() -> None:
        for kind in ("normal", "pubsub"):
            sentinel.master.client.client_kill_filter(_type=kind, skipme=True)

    faults: dict[FaultKind, Strike] = {
        FaultKind("master-killed", 0.5, 4): lambda _: _failed_over(sentinel, PrivateRedis.kill),
        FaultKind("master-stopped", 0.5, 4): lambda _: _failed_over(sentinel, PrivateRedis.stop),
        FaultKind("master-paused", 0.3, 1): lambda _: _hung(sentinel.master, "the master"),
        FaultKind("replica-killed", 0.5, 4, targets=2): partial(_replica_killed, sentinel),
        FaultKind("connections-dropped", 0, 0.5): partial(_dropped, disconnect_all),
    }
    version = sentinel.nodes[0].client.info("server")["redis_version"]
    return Place(f"Redis {version}, Sentinel, 3 nodes", sentinel.url, conf, faults=faults)


@contextmanager
def _failed_over(sentinel: PrivateSentinel, end: Callable[[PrivateRedis], None]) -> Iterator[str]:
    """Stop the master; start it again when a replica has become the master."""
    master = sentinel.master
    end(master)

    # Before the Sentinel switches, redis-py would connect to a restarted old master, and lose
    # the writes that it confirms.
    def switched() -> bool:
        seen = sentinel.client.sentinel_master(sentinel.master_name)
        return seen["port"] != master.port and seen["flags"] == "master"

    wait_until(switched)
    yield f"port {master.port}"
    sentinel.heal()


@contextmanager
def _replica_killed(sentinel: PrivateSentinel, number: int) -> Iterator[str]:
    replica = [node for node in sentinel.nodes if node is not sentinel.master][number]
    replica.kill()
    yield f"port {replica.port}"
    sentinel.heal()


# ---- PostgreSQL --------------------------------------------------------------------------------


def _on_postgresql(server: PrivatePostgreSQL, folder: Path) -> Place:
    """A PostgreSQL store for kombu's filesystem transport, which loses a killed worker's messages.

    So faults kill only workers that dispatch, never the workers that run tasks.
    """
    for name in ("queues", "control"):
        (folder / name).mkdir()
    url = server.new_database()
    conf = {
        "native_delay_store": url,
        "broker_transport_options": {
            "data_folder_in": str(folder / "queues"),
            "data_folder_out": str(folder / "queues"),
            "control_folder": str(folder / "control"),
            "polling_interval": 0.1,
        },
    }
    dispatchers = (Post("news"), Post("news"))
    consumers = tuple(
        Post(queue, installed=False, mortal=False) for queue in ("default", "side", "invoices")
    )
    name = "the database"
    faults: dict[FaultKind, Strike] = {
        FaultKind("database-killed", 0.5, 5): partial(_down, server.kill, server.start, name),
        FaultKind("database-restarted", 0, 1): partial(_down, server.stop, server.start, name),
        FaultKind("database-paused", 1, 4): lambda _: _hung(server, name),
        FaultKind("connections-dropped", 0, 0.5): partial(_dropped, lambda: end_backends(url)),
    }
    return Place(
        f"{server.version}, a store beside filesystem://",
        f"filesystem://{folder}",
        conf,
        posts=(*dispatchers, *consumers, Post("orders", mortal=False)),
        faults=faults,
        schedule_queues=("orders",),
    )


# ---- any ---------------------------------------------------------------------------------------


@contextmanager
def _down(
    end: Callable[[], None], start: Callable[[], None], name: str, _number: int
) -> Iterator[str]:
    end()
    yield name
    start()


@contextmanager
def _hung(server: PrivateRedis | PrivatePostgreSQL, name: str) -> Iterator[str]:
    with hung(server):
        yield name


@contextmanager
def _dropped(drop: Callable[[], None], _number: int) -> Iterator[str]:
    drop()
    yield "all"
