"""Compute the queues, exchanges and bindings that an app needs on RabbitMQ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kombu.transport.base import to_rabbitmq_queue_arguments

from ...settings import DelaySettings
from .mirror import BUILTIN_TYPES, HASHING_TYPES, MIRRORED_TYPES, Mirror, is_internal
from .topology import Binding, Declaration, Exchange, Queue, Topology, Unbinding


@dataclass(frozen=True)
class Exported:
    """RabbitMQ definitions (JSON) with an app's queues, exchanges and bindings."""

    text: str
    #: The numbers of exchanges, queues and bindings in the text.
    counts: Mapping[str, int]
    #: The names of non-durable queues and exchanges, which the text omits.
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Blueprint:
    """The queues, exchanges and bindings that an app needs on RabbitMQ."""

    topology: Topology
    #: The queues, exchanges and bindings of the app.
    own: tuple[Declaration, ...]
    #: Landing queues, marker exchanges, and copies of the app's bindings.
    surroundings: tuple[Declaration, ...]
    left_out: tuple[str, ...]

    def delays(self) -> Iterator[Declaration]:
        """Yield only the queues, exchanges and bindings of this package."""
        yield from self.topology.plan()
        yield from self.surroundings

    def declarations(self) -> list[Declaration]:
        return [*self.own, *self.delays()]


def blueprint(topology: Topology, queues: Sequence[Any]) -> Blueprint:
    """Compute the declarations that an app with these queues needs on RabbitMQ."""
    own, left_out = _own(queues)
    mirror = Mirror(topology)
    for declaration in own:
        match declaration:
            case Exchange(name, kind, arguments):
                mirror.exchange_declared(name, kind, arguments)
            case Queue(name, arguments):
                mirror.queue_declared(name, arguments, for_replies=False)
            case Binding(source, destination, routing_key):
                mirror.queue_bound(destination, source, routing_key)
    bindings, landings = mirror.take_pending()
    named = {binding.exchange for binding in bindings}
    named |= {declaration.name for declaration in own if isinstance(declaration, Exchange)}
    unlike = (*MIRRORED_TYPES, *HASHING_TYPES)
    landing = {name for name in named if mirror.types[name] not in unlike}
    # A listed name is an exchange's, unless the app only has a queue of this name.
    theirs = {declaration.name for declaration in own if isinstance(declaration, Queue)} - named
    landing |= {name for name in topology.settings.landing if "*" not in name} - theirs
    # A producer that may not ask for an exchange's type looks for its marker exchange.
    markers = mirror.marker_declarations(bindings, sorted(landing.union(landings)), consuming=True)
    changes = chain(*markers, *map(mirror.declarations, bindings))
    surroundings = [change for change in changes if not isinstance(change, Unbinding)]
    return Blueprint(topology, tuple(own), tuple(_once(surroundings)), tuple(left_out))


def export(
    settings: DelaySettings, queues: Sequence[Any], vhost: str, *, own_queues: bool = True
) -> Exported:
    """Return the RabbitMQ definitions (JSON) that an app with the task *queues* needs.

    If *own_queues* is False, the definitions have only this package's queues and exchanges. The
    app's *queues* must then be declared elsewhere.
    """
    plan = blueprint(Topology(settings), queues)
    if not own_queues:
        plan = replace(plan, own=())
    kinds = Counter(f"{type(each).__name__.lower()}s" for each in plan.declarations())
    return Exported(definitions(plan, vhost), kinds, plan.left_out)


def definitions(plan: Blueprint, vhost: str) -> str:
    """Return JSON for ``rabbitmqctl import_definitions``, with one declaration per line."""
    items: dict[str, list[dict[str, Any]]] = {"exchanges": [], "queues": [], "bindings": []}
    lasting = {"vhost": vhost, "durable": True, "auto_delete": False}
    for declaration in plan.declarations():
        match declaration:
            case Exchange(name, kind, arguments):
                item = {"name": name, "type": kind, **lasting, "internal": False}
                items["exchanges"].append(item | {"arguments": arguments})
            case Queue(name, arguments):
                items["queues"].append({"name": name, **lasting, "arguments": arguments})
            case Binding(source, destination, routing_key, to_exchange, arguments):
                item = {
                    "source": source,
                    "vhost": vhost,
                    "destination": destination,
                    "destination_type": "exchange" if to_exchange else "queue",
                    "routing_key": routing_key,
                }
                items["bindings"].append(item | {"arguments": arguments})
    parts = (f' "{kind}": [\n{_lines(found)}\n ]' for kind, found in items.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(items: list[dict[str, Any]]) -> str:
    return ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)


def _own(queues: Sequence[Any]) -> tuple[list[Declaration], list[str]]:
    """Return the app's durable declarations, and the names of non-durable queues and exchanges."""
    exchanges: dict[str, Exchange] = {}
    lasting: list[Declaration] = []
    bindings: list[Declaration] = []
    left_out: dict[str, None] = {}
    # Queues with no_declare are included, because the exported text must declare these queues.
    for queue in sorted(queues, key=lambda queue: str(queue.name)):
        lasts = _lasts(queue) and not queue.exclusive
        if lasts:
            lasting.append(Queue(queue.name, _arguments(queue)))
        else:
            left_out[f"queue {queue.name!r}"] = None
        for exchange, routing_key, arguments in _bindings(queue):
            if exchange.name not in BUILTIN_TYPES:
                if not _lasts(exchange):
                    left_out[f"exchange {exchange.name!r}"] = None
                    continue
                kind, given = exchange.type or "direct", exchange.arguments or {}
                exchanges[exchange.name] = Exchange(exchange.name, kind, dict(given))
            if lasts:
                bindings.append(
                    Binding(exchange.name, queue.name, routing_key, arguments=dict(arguments))
                )
    return [*exchanges.values(), *lasting, *_once(bindings)], list(left_out)


def _lasts(entity: Any) -> bool:
    return entity.durable and not entity.auto_delete and not is_internal(entity.name)


def _bindings(queue: Any) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    if queue.exchange is not None and queue.exchange.name:
        yield queue.exchange, queue.routing_key or "", queue.binding_arguments or {}
    further = [each for each in queue.bindings if each.exchange and each.exchange.name]
    for each in sorted(further, key=lambda each: (each.exchange.name, each.routing_key)):
        yield each.exchange, each.routing_key or "", each.arguments or {}


def _arguments(queue: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = to_rabbitmq_queue_arguments(
        dict(queue.queue_arguments or {}),
        expires=queue.expires,
        message_ttl=queue.message_ttl,
        max_length=queue.max_length,
        max_length_bytes=queue.max_length_bytes,
        max_priority=queue.max_priority,
    )
    return arguments


def _once(declarations: list[Declaration]) -> list[Declaration]:
    return [item for place, item in enumerate(declarations) if item not in declarations[:place]]
