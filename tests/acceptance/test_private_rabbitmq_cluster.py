"""Private RabbitMQ clusters: nodes that stop or pause, and networks that are cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest
from amqp import Message
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_native_delay.testing import vhost_name
from tests.acceptance.worker import fleet_on
from tests.brokers import on_one_version
from tests.cluster import PrivateRabbitMQCluster, private_rabbitmq_cluster, running
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.ci, on_one_version]

IS_ROOT = os.geteuid() == 0

FEW_LEVELS = 8


@pytest.fixture(scope="module")
def shared_cluster(rabbitmq_version: str) -> Iterator[PrivateRabbitMQCluster]:
    """Three nodes of this version. Their network can be cut if the machine allows it."""
    with private_rabbitmq_cluster(version=rabbitmq_version, partitions=IS_ROOT) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: PrivateRabbitMQCluster) -> PrivateRabbitMQCluster:
    """The cluster with all nodes running; a test may leave nodes stopped."""
    shared_cluster.heal()
    return shared_cluster


def declare(url: str) -> None:
    """Declare the quorum queue `orders`."""
    arguments = {"x-queue-type": "quorum"}
    with Connection(url) as connection, connection.channel() as channel:
        channel.queue_declare("orders", durable=True, auto_delete=False, arguments=arguments)


def put(url: str, body: str, *, confirm_seconds: float = PATIENCE_SECONDS) -> None:
    """Publish to `orders` and wait for the confirm."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        connection.default_channel.basic_publish(
            Message(body, delivery_mode=2), routing_key="orders", confirm_timeout=confirm_seconds
        )


def get(url: str) -> str:
    """Wait for a message in `orders` and take it."""
    with Connection(url) as connection:
        channel = connection.default_channel
        return str(wait_until(lambda: channel.basic_get("orders", no_ack=True)).body)


def test_a_delayed_task_outlives_a_node(cluster: PrivateRabbitMQCluster, tmp_path: Path) -> None:
    """The URL names all nodes, so worker and producer go on with the remaining ones."""
    with fleet_on(
        cluster.new_vhost(),
        tmp_path,
        queue_type="quorum",
        native_delay_levels=FEW_LEVELS,
        # Its queue is exclusive: RabbitMQ 4.3 keeps it locked until the node is back.
        worker_enable_remote_control=False,
    ) as fleet:
        fleet.worker()
        note = fleet.app().tasks["note"]
        due = time() + 12
        ids = [note.apply_async(("before",), countdown=12).id]
        cluster.nodes[0].kill()
        assert time() < due, "the machine was too slow: the node was to be killed before"
        ids.append(note.apply_async(("later",), countdown=1).id)
        for runs in fleet.record.wait_for_ids(ids).values():
            runs[0].assert_on_time()


@pytest.mark.skipif(not IS_ROOT, reason="only root may cut a network")
def test_a_minority_confirms_nothing_until_it_rejoins(cluster: PrivateRabbitMQCluster) -> None:
    """The majority goes on. With the network back, the minority has the same messages."""
    vhost = cluster.new_vhost()
    declare(vhost)
    put(vhost, "before")
    alone, *majority = cluster.nodes
    url = alone.url_of(vhost_name(vhost))
    cluster.partition(alone)
    wait_until(lambda: all(running(node) == {m.name for m in majority} for node in majority))
    with pytest.raises((OSError, OperationalError)):
        put(url, "lost", confirm_seconds=1)
    put(majority[0].url_of(vhost_name(vhost)), "meanwhile")
    cluster.heal()
    assert [get(url), get(url)] == ["before", "meanwhile"]
