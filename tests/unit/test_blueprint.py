"""The plan of what an app's delays need on RabbitMQ, without a connection."""

from __future__ import annotations

from typing import Any

from kombu import Exchange, Queue

from celery_native_delay import DelaySettings
from celery_native_delay.transports.rabbitmq.blueprint import blueprint
from celery_native_delay.transports.rabbitmq.topology import Binding, Topology

TOPOLOGY = Topology(DelaySettings(levels=2))


def beside_the_levels(*queues: Queue, **changes: Any) -> tuple[set[str], set[str]]:
    """Return what the plan declares beside the delay queues, and the queues that it binds."""
    topology = Topology(DelaySettings(levels=2, **changes))
    plan = [each for each in blueprint(topology, queues) if each not in list(topology.plan())]
    bound = {each.destination for each in plan if isinstance(each, Binding)}
    return {each.name for each in plan if not isinstance(each, Binding)}, bound


def test_only_lasting_queues_are_bound() -> None:
    exchange = Exchange("shop", type="topic")
    _, bound = beside_the_levels(
        Queue("lasting", exchange, routing_key="#"),
        Queue("passing", exchange, routing_key="#", auto_delete=True),
        Queue("mine", exchange, routing_key="#", exclusive=True),
        Queue("forgotten", Exchange("lost", durable=False), durable=False),
    )
    assert bound == {"lasting"}


def test_a_listed_exchange_gets_a_landing_queue_and_its_marker() -> None:
    names, _ = beside_the_levels(landing=("theirs",))
    assert names == {TOPOLOGY.landing_queue("theirs"), TOPOLOGY.landing_marker("theirs")}


def test_an_exchange_whose_bindings_cannot_be_copied_gets_a_landing_queue() -> None:
    names, _ = beside_the_levels(Queue("news", Exchange("news", type="fanout")))
    assert TOPOLOGY.landing_queue("news") in names


def test_a_listed_queue_gets_a_landing_queue_of_its_own_only() -> None:
    """A name is taken for an exchange's if no queue of the app has it, or an exchange does."""
    full = Queue("imports", Exchange("shop"), routing_key="imports")
    landing = TOPOLOGY.landing_queue("imports")
    names, bound = beside_the_levels(full, landing=("imports",))
    assert TOPOLOGY.queue_landing_queue("imports") in names & bound
    assert landing not in names
    also = Queue("other", Exchange("imports"), routing_key="other")
    assert landing in beside_the_levels(full, also, landing=("imports",))[0]
    assert landing not in beside_the_levels(full, also, landing=("imports*",))[0]
