"""Exported definitions: frozen in a golden file, and equal to the plan of declarations.

``python -m tests.unit.test_export`` writes the golden file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kombu import Exchange as KombuExchange
from kombu import Queue as KombuQueue
from kombu import binding

from celery_native_delay import DelaySettings
from celery_native_delay.transports.rabbitmq.blueprint import blueprint, export
from celery_native_delay.transports.rabbitmq.topology import (
    Binding,
    Declaration,
    Exchange,
    Queue,
    Topology,
)

GOLDEN = Path(__file__).parent / "golden" / "export.json"

SMALL: dict[str, Any] = {"levels": 6, "fused_bits": 3, "landing": ("billing",)}

SHOP = KombuExchange("shop", type="topic")

QUEUES = [
    KombuQueue("celery", KombuExchange("celery"), routing_key="celery"),
    KombuQueue("orders", SHOP, routing_key="orders.#", queue_arguments={"x-queue-type": "quorum"}),
    KombuQueue(
        "parcels",
        [binding(SHOP, "*.parcel"), binding(KombuExchange("billing"), 'a "${quoted}" key%')],
        no_declare=True,
    ),
    KombuQueue("news", KombuExchange("news", type="fanout")),
    KombuQueue(
        "matched",
        KombuExchange("matching", type="headers"),
        binding_arguments={"x-match": "all", "kind": "parcel"},
    ),
    KombuQueue("few", max_length=2, queue_arguments={"x-overflow": "reject-publish"}),
    KombuQueue("passing", KombuExchange("passing", auto_delete=True), auto_delete=True),
]
"""Queues on every kind of exchange; one rejects, one is declared by others, one deletes itself."""


def exported(**how: Any) -> str:
    return export(DelaySettings(**SMALL), QUEUES, "shop/eu", **how).text


def declarations(text: str, *, vhost: str) -> list[Declaration]:
    """The declarations of a file of definitions for one virtual host."""
    found = json.loads(text)
    items = [item for kind in ("exchanges", "queues", "bindings") for item in found[kind]]
    assert {item["vhost"] for item in items} == {vhost}
    return list(map(_declaration, items))


def _declaration(item: dict[str, Any]) -> Declaration:
    if "source" in item:
        return Binding(
            item["source"],
            item["destination"],
            item["routing_key"],
            item["destination_type"] == "exchange",
            item["arguments"],
        )
    assert item["durable"] is True
    assert item["auto_delete"] is False
    if "type" in item:
        return Exchange(item["name"], item["type"], item["arguments"])
    return Queue(item["name"], item["arguments"])


def in_order(found: Iterable[Declaration]) -> list[Declaration]:
    """The declarations in the order of their texts, to compare them."""
    return sorted(found, key=repr)


def test_an_export_is_frozen() -> None:
    """Users have exports under version control and must apply each difference."""
    assert exported() == GOLDEN.read_text()


def test_an_export_has_the_declarations_of_the_plan() -> None:
    plan = blueprint(Topology(DelaySettings(**SMALL)), QUEUES)
    found = declarations(exported(), vhost="shop/eu")
    assert in_order(found) == in_order(plan.declarations())


def test_an_export_without_the_users_queues_still_binds_to_them() -> None:
    plan = blueprint(Topology(DelaySettings(**SMALL)), QUEUES)
    found = declarations(exported(own_queues=False), vhost="shop/eu")
    assert in_order(found) == in_order(plan.delays())


# ---- the plan ----------------------------------------------------------------------------------


def plan_of(*queues: KombuQueue, **changes: Any) -> Any:
    return blueprint(Topology(DelaySettings(levels=2, **changes)), queues)


def test_temporary_queues_and_exchanges_are_left_out_and_named() -> None:
    exchange = KombuExchange("shop", type="topic")
    plan = plan_of(
        KombuQueue("lasting", exchange, routing_key="#"),
        KombuQueue("passing", exchange, routing_key="#", auto_delete=True),
        KombuQueue("mine", exchange, routing_key="#", exclusive=True),
        KombuQueue("forgotten", KombuExchange("lost", durable=False), durable=False),
    )
    assert plan.left_out == (
        "queue 'forgotten'",
        "exchange 'lost'",
        "queue 'mine'",
        "queue 'passing'",
    )
    assert plan.own == (
        Exchange("shop", "topic"),
        Queue("lasting"),
        Binding("shop", "lasting", "#"),
    )
    bound = {each.destination for each in plan.surroundings if isinstance(each, Binding)}
    assert bound == {"lasting"}


def test_a_landing_exchange_gets_a_landing_queue_and_its_marker() -> None:
    plan = plan_of(landing=("theirs",))
    topology = plan.topology
    names = {each.name for each in plan.surroundings if not isinstance(each, Binding)}
    assert names == {topology.landing_queue("theirs"), topology.landing_marker("theirs")}


def test_queue_arguments_are_kombus() -> None:
    plan = plan_of(KombuQueue("few", expires=1.5, max_priority=3, message_ttl=2))
    assert plan.own == (
        Queue("few", {"x-expires": 1500, "x-max-priority": 3, "x-message-ttl": 2000}),
    )


if __name__ == "__main__":
    GOLDEN.write_text(exported())
