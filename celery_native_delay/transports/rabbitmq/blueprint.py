"""Compute the queues, exchanges and bindings that an app's delays need on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from .mirror import BUILTIN_TYPES, HASHING_TYPES, MIRRORED_TYPES, Mirror, is_internal
from .topology import Declaration, Topology, Unbinding


def blueprint(topology: Topology, queues: Sequence[Any]) -> list[Declaration]:
    """Compute this package's declarations for an app with these queues, which are kombu's."""
    mirror = Mirror(topology)
    note_queues(mirror, topology, queues)
    bindings, landings = mirror.take_pending()
    # A producer that may not ask for an exchange's type looks for its marker exchange.
    markers = mirror.marker_declarations(bindings, landings, consuming=True)
    changes = chain(topology.plan(), *markers, *map(mirror.declarations, bindings))
    found = [change for change in changes if not isinstance(change, Unbinding)]
    return [item for place, item in enumerate(found) if item not in found[:place]]


def note_queues(mirror: Mirror, topology: Topology, queues: Sequence[Any]) -> None:
    """Let *mirror* remember an app's durable queues, and exchanges that need a landing queue."""
    exchanges: set[str] = set()
    for queue in queues:
        lasts = _lasts(queue) and not queue.exclusive
        if lasts:
            mirror.queue_declared(queue.name, queue.queue_arguments, for_replies=False)
        for exchange, routing_key in _bindings(queue):
            if exchange.name not in BUILTIN_TYPES:
                if not _lasts(exchange):
                    continue
                kind = exchange.type or "direct"
                mirror.exchange_declared(exchange.name, kind, exchange.arguments)
            exchanges.add(exchange.name)
            if lasts:
                mirror.queue_bound(queue.name, exchange.name, routing_key)
    unlike = (*MIRRORED_TYPES, *HASHING_TYPES)
    landing = {name for name in exchanges if mirror.types[name] not in unlike}
    # A listed name is an exchange's, unless the app only has a queue of this name.
    ours = {queue.name for queue in queues} - exchanges
    landing |= {name for name in topology.settings.landing if "*" not in name} - ours
    for name in sorted(landing):
        mirror.note_landing(name)


def _lasts(entity: Any) -> bool:
    return entity.durable and not entity.auto_delete and not is_internal(entity.name)


def _bindings(queue: Any) -> Iterator[tuple[Any, str]]:
    for each in (queue, *queue.bindings):
        if each.exchange is not None and each.exchange.name:
            yield each.exchange, each.routing_key or ""
