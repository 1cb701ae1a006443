"""Private RabbitMQ: vhosts, users, policies, restarts, errors; and nothing is left behind."""

from __future__ import annotations

import pytest
from kombu import Connection

from celery_native_delay.testing import BrokerFailed, BrokerMissing, PrivateRabbitMQ, vhost_name
from tests.brokers import on_one_version
from tests.processes import processes_of
from tests.rabbitmqs import private_rabbitmq
from tests.waiting import wait_until


def test_a_node_knows_its_version_and_a_new_vhost_is_empty(
    rabbitmq: PrivateRabbitMQ, rabbitmq_version: str, request: pytest.FixtureRequest
) -> None:
    """The names of tests have this version, too; counts are fresh."""
    assert rabbitmq.version == rabbitmq_version
    assert rabbitmq.version.startswith(request.node.callspec.id.removeprefix("rabbitmq-"))
    assert rabbitmq.api("GET", "/overview")["rabbitmq_version"] == rabbitmq.version
    url = rabbitmq.new_vhost()
    assert rabbitmq.queues(vhost_name(url)) == []
    with Connection(url) as connection, connection.SimpleQueue("orders") as orders:
        orders.put("hello")
        wait_until(lambda: [q.get("messages") for q in rabbitmq.queues(vhost_name(url))] == [1])
    rabbitmq.delete_vhost(vhost_name(url))
    with pytest.raises(BrokerFailed, match="404"):
        rabbitmq.queues(vhost_name(url))


@on_one_version
@pytest.mark.ci
def test_a_node_is_configured_and_leaves_nothing(rabbitmq_version: str) -> None:
    """Neither a process nor a folder is left after the block."""
    with private_rabbitmq(
        version=rabbitmq_version,
        management=False,
        config="max_message_size = 4096",
        advanced_config="[{rabbit, [{dead_letter_worker_consumer_prefetch, 64}]}].",
    ) as broker:
        names = "max_message_size, dead_letter_worker_consumer_prefetch"
        asked = f"[application:get_env(rabbit, Name) || Name <- [{names}]]."
        assert broker.rabbitmqctl("eval", asked) == "[{ok,4096},{ok,64}]\n"
        with pytest.raises(BrokerFailed, match="management=False"):
            broker.api("GET", "/overview")
        folder = broker.data_dir.parent
        assert any("beam" in command for command in processes_of(folder.name))
        broker.kill()
        assert broker.pid is None
        with pytest.raises(OSError, match="refused"):
            Connection(broker.url).connect()
    assert not folder.exists()
    wait_until(lambda: processes_of(folder.name) == [])


@on_one_version
def test_a_node_that_cannot_start_says_why(rabbitmq_version: str) -> None:
    def refused(error: type[Exception], said: str, **options: str) -> None:
        with pytest.raises(error, match=said), private_rabbitmq(**options):
            pass

    refused(BrokerMissing, r"RabbitMQ 2\.7 is not installed: run", version="2.7")
    wrong = {"version": rabbitmq_version, "config": "no_such_setting = 1"}
    refused(BrokerFailed, "no_such_setting", **wrong)
