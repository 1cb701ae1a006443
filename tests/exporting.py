"""What an export says, read back as declarations; an app whose queues are of every kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

import yaml
from kombu import Exchange as KombuExchange
from kombu import Queue as KombuQueue
from kombu import binding

from celery_native_delay.transports.rabbitmq.topology import Binding, Declaration, Exchange, Queue
from tests.terraform import Resource, resources

Item: TypeAlias = dict[str, Any]

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
"""One of each kind of exchange, a queue that rejects, one that others declare, one that goes."""


def of_definitions(text: str, *, vhost: str) -> list[Declaration]:
    """The declarations of a file of definitions for one virtual host."""
    found = json.loads(text)
    items = [item for kind in ("exchanges", "queues", "bindings") for item in found[kind]]
    assert {item["vhost"] for item in items} == {vhost}
    return list(map(_declaration, items))


def of_kubernetes(text: str, *, vhost: str) -> list[Declaration]:
    """The declarations of manifests, as the messaging topology operator understands them."""
    documents = list(yaml.safe_load_all(text))
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert len(names) == len(documents)
    items = list(map(item_of_manifest, documents))
    assert {item["vhost"] for item in items} == {vhost}
    return list(map(_declaration, items))


def of_terraform(text: str, *, vhost: str) -> list[Declaration]:
    """The declarations of a module, in an order that Terraform might choose."""
    found = resources(text)
    assert {resource.values["vhost"] for resource in found} == {vhost}
    return [_declaration(item_of_resource(resource)) for resource in found]


READERS = {"definitions": of_definitions, "kubernetes": of_kubernetes, "terraform": of_terraform}
"""By the name of a format that tools read."""


def item_of_resource(resource: Resource) -> Item:
    """What the provider sends to the management API for a resource."""
    values = dict(resource.values)
    settings = values.pop("settings", {})
    arguments = settings.pop("arguments", None) or {}
    for place in (settings, values):
        if "arguments_json" in place:
            arguments = json.loads(place.pop("arguments_json"))
    values.pop("lifecycle", None)
    return values | settings | {"arguments": arguments}


def item_of_manifest(document: Item) -> Item:
    """What the operator sends to the management API for a manifest."""
    spec = dict(document["spec"])
    assert document["apiVersion"] == "rabbitmq.com/v1beta1"
    arguments = dict(spec.get("arguments", {}))
    if document["kind"] == "Queue" and "type" in spec:
        arguments["x-queue-type"] = spec.pop("type")
    renamed = {
        "autoDelete": "auto_delete",
        "destinationType": "destination_type",
        "routingKey": "routing_key",
    }
    item = {renamed.get(key, key): value for key, value in spec.items()}
    return item | {"arguments": arguments}


def _declaration(item: Item) -> Declaration:
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


def in_order(declarations: Iterable[Declaration]) -> list[Declaration]:
    """The same in an order of their names, to compare them."""
    return sorted(declarations, key=repr)
