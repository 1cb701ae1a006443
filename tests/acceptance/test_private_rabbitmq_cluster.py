"""The private cluster: what it promises to tests that kill its nodes and cut its network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest
from amqp import Message
from kombu import Connection

from celery_native_delay.testing import (
    BrokerFailed,
    PrivateRabbitMQCluster,
    private_rabbitmq_cluster,
    vhost_name,
)
from tests.acceptance.worker import fleet_on
from tests.processes import assert_nothing_left_when_killed
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.ci

QUORUM = {"x-queue-type": "quorum"}
FEW_LEVELS = 6


@pytest.fixture(scope="module")
def shared_cluster(rabbitmq_version: str) -> Iterator[PrivateRabbitMQCluster]:
    """Three nodes; where only root may cut networks and this is not root, without."""
    partitions = os.geteuid() == 0
    with private_rabbitmq_cluster(version=rabbitmq_version, partitions=partitions) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: PrivateRabbitMQCluster) -> PrivateRabbitMQCluster:
    """The cluster of this version, whole."""
    shared_cluster.heal()
    return shared_cluster


def declare(url: str) -> None:
    """Declare the quorum queue `orders`."""
    with Connection(url) as connection, connection.channel() as channel:
        channel.queue_declare("orders", durable=True, auto_delete=False, arguments=QUORUM)


def put(url: str, body: str, *, confirm_seconds: float = PATIENCE_SECONDS) -> None:
    """Publish to `orders`, and wait until it is confirmed."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        message = Message(body, delivery_mode=2)
        connection.default_channel.basic_publish(
            message, routing_key="orders", confirm_timeout=confirm_seconds
        )


def get(url: str) -> str:
    """Take a message from `orders`, once one is there."""
    with Connection(url) as connection:
        channel = connection.default_channel
        message = wait_until(lambda: channel.basic_get("orders", no_ack=True))
        return str(message.body)


def test_three_nodes_are_one_cluster(cluster: PrivateRabbitMQCluster) -> None:
    names = {node.name for node in cluster.nodes}
    assert len(names) == 3
    for node in cluster.nodes:
        assert {seen["name"] for seen in node.api("GET", "/nodes")} == names
    vhost = cluster.new_vhost()
    first, second, third = cluster.urls(vhost)
    assert vhost == f"{first};{second};{third}"
    declare(first)
    put(second, "hello")
    assert get(third) == "hello"
    assert vhost_name(vhost) in cluster.nodes[1].rabbitmqctl("list_vhosts")


def test_a_confirmed_message_outlives_the_node_that_led_its_queue(
    cluster: PrivateRabbitMQCluster,
) -> None:
    """It is read through another; the killed node comes back and is a member again."""
    vhost = cluster.new_vhost()
    declare(vhost)
    put(vhost, "kept")
    leader = cluster.leader_of("orders", vhost)
    leader.kill()
    others = [node for node in cluster.nodes if node is not leader]
    wait_until(lambda: cluster.leader_of("orders", vhost) in others)
    assert get(others[0].url_of(vhost_name(vhost))) == "kept"
    put(vhost, "while it was away")

    leader.start()
    cluster.wait_until_joined()
    # Its copy counts: with it and one other the queue has a majority.
    others[0].kill()
    assert get(leader.url_of(vhost_name(vhost))) == "while it was away"


def test_a_delayed_task_outlives_a_node(cluster: PrivateRabbitMQCluster, tmp_path: Path) -> None:
    """Worker and producer go on through the nodes that are left, by a url that names all."""
    with fleet_on(
        cluster.new_vhost(),
        tmp_path,
        queue_type="quorum",
        native_delay_queue_type="quorum",
        native_delay_levels=FEW_LEVELS,
    ) as fleet:
        fleet.worker()
        app = fleet.app(broker_transport_options={"confirm_publish": True})
        due = time() + 5
        waiting = app.tasks["note"].apply_async(("x",), countdown=5).id
        cluster.nodes[0].kill()
        assert time() < due, "killed too late: the machine is too slow for this test"
        later_due = time() + 2
        later = app.tasks["note"].apply_async(("y",), countdown=2).id
        runs = fleet.record.wait_for_ids([waiting, later])
        runs[waiting][0].assert_on_time(due)
        runs[later][0].assert_on_time(later_due)


def test_a_minority_is_blocked_until_the_network_is_mended(
    cluster: PrivateRabbitMQCluster,
) -> None:
    """The majority goes on, the minority confirms nothing; healed, it holds what the others do."""
    if os.geteuid() != 0:
        pytest.skip("only root may cut a network")
    vhost = cluster.new_vhost()
    declare(vhost)
    put(vhost, "before")
    alone, *majority = cluster.nodes
    cluster.partition(alone)
    put(majority[0].url_of(vhost_name(vhost)), "meanwhile")
    with pytest.raises(OSError):
        put(alone.url_of(vhost_name(vhost)), "lost", confirm_seconds=1)
    assert cluster.leader_of("orders", vhost) in majority
    cluster.heal()
    url = alone.url_of(vhost_name(vhost))
    assert [get(url), get(url)] == ["before", "meanwhile"]


def test_a_paused_node_answers_nothing_until_it_resumes(cluster: PrivateRabbitMQCluster) -> None:
    node = cluster.nodes[2]
    node.pause()
    with socket.create_connection((node.ip, node.port), timeout=1) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        node.resume()
        connection.settimeout(PATIENCE_SECONDS)
        assert connection.recv(1)


def test_a_rolling_restart_loses_nothing(cluster: PrivateRabbitMQCluster) -> None:
    vhost = cluster.new_vhost()
    declare(vhost)
    put(vhost, "kept")
    pids = [node.pid for node in cluster.nodes]
    cluster.rolling_restart()
    assert all(node.pid not in (None, *pids) for node in cluster.nodes)
    assert get(vhost) == "kept"


def test_all_nodes_may_be_killed_at_once(cluster: PrivateRabbitMQCluster) -> None:
    """They start together: none can serve before it has met the others."""
    vhost = cluster.new_vhost()
    declare(vhost)
    put(vhost, "kept")
    for node in cluster.nodes:
        node.kill()
    with pytest.raises(BrokerFailed, match="no node .* more than half"):
        cluster.new_vhost()
    cluster.heal()
    assert get(vhost) == "kept"


def test_nothing_is_left_when_the_process_is_killed(rabbitmq_version: str) -> None:
    partitions = os.geteuid() == 0
    assert_nothing_left_when_killed(
        f"private_rabbitmq_cluster(1, version={rabbitmq_version!r}, partitions={partitions})",
        "broker.nodes[0].data_dir.parent",
    )
