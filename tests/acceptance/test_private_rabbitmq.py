"""Private RabbitMQ: vhosts, users, policies, restarts, errors; and nothing is left behind."""

from __future__ import annotations

import pytest
from kombu import Connection

from celery_native_delay.testing import BrokerFailed, BrokerMissing, PrivateRabbitMQ, vhost_name
from tests.brokers import on_one_version
from tests.processes import assert_nothing_left_when_killed, processes_of
from tests.rabbitmqs import private_rabbitmq
from tests.waiting import PATIENCE_SECONDS, wait_until


def test_a_node_starts_and_knows_its_version(
    rabbitmq: PrivateRabbitMQ, rabbitmq_version: str, request: pytest.FixtureRequest
) -> None:
    """The names of tests have this version, too."""
    assert rabbitmq.version == rabbitmq_version
    assert rabbitmq.version.startswith(request.node.callspec.id.removeprefix("rabbitmq-"))
    assert rabbitmq.data_dir.is_dir()
    assert rabbitmq.api("GET", "/overview")["rabbitmq_version"] == rabbitmq.version
    with Connection(rabbitmq.url) as connection:
        connection.connect()
        assert connection.connection.server_properties["version"] == rabbitmq.version


def test_a_new_vhost_is_empty_and_its_counts_are_fresh(rabbitmq: PrivateRabbitMQ) -> None:
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
def test_a_node_is_configured_keeps_durable_messages_and_leaves_nothing(
    rabbitmq_version: str,
) -> None:
    """Through kill and stop; neither a process nor a folder is left after the block."""
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
        with Connection(broker.url, transport_options={"confirm_publish": True}) as connection:
            with connection.SimpleQueue("orders") as orders:
                orders.put("kept")
        for end in (broker.kill, broker.stop):
            end()
            assert broker.pid is None
            with pytest.raises(OSError, match="refused"):
                Connection(broker.url).connect()
            broker.start()
            with Connection(broker.url) as connection, connection.SimpleQueue("orders") as orders:
                message = orders.get(timeout=PATIENCE_SECONDS)
                assert message.payload == "kept"
                message.requeue()
        folder = broker.data_dir.parent
        assert any("beam" in command for command in processes_of(folder.name))
    assert not folder.exists()
    wait_until(lambda: processes_of(folder.name) == [])


@on_one_version
@pytest.mark.ci
def test_no_process_or_folder_is_left_when_the_test_process_is_killed(
    rabbitmq_version: str,
) -> None:
    broker = f"private_rabbitmq(version={rabbitmq_version!r}, management=False)"
    assert_nothing_left_when_killed(broker, "broker.data_dir.parent", module="tests.rabbitmqs")


@on_one_version
def test_a_broker_that_cannot_start_says_why(rabbitmq_version: str) -> None:
    with (
        pytest.raises(BrokerFailed, match="no_such_setting"),
        private_rabbitmq(version=rabbitmq_version, config="no_such_setting = 1"),
    ):
        pass


def test_a_version_that_is_not_installed_says_what_to_install() -> None:
    with (
        pytest.raises(BrokerMissing, match=r"RabbitMQ 2\.7 is not installed: run"),
        private_rabbitmq(version="2.7"),
    ):
        pass
