"""Route a message through a plan in memory, as RabbitMQ would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from celery_native_delay.transports.rabbitmq.address import topic_matches
from celery_native_delay.transports.rabbitmq.topology import Binding, Declaration, Exchange, Queue


@dataclass(frozen=True)
class Trip:
    """The way of a message through exchanges and queues.

    *queues* are the level queues where it waited, in order; *waited_ms* is the sum of their TTLs;
    *delivered* has the final queues, each with its number of copies.
    """

    queues: tuple[str, ...]
    waited_ms: int
    delivered: dict[str, int]


def walk(plan: Iterable[Declaration], exchange: str, routing_key: str) -> Trip:
    """Publish a message with *routing_key* to *exchange*, and follow every dead-lettering.

    Raises:
        ValueError: the message is unroutable, or passes a queue twice.
    """
    declarations = list(plan)
    kinds = {d.name: d for d in declarations if isinstance(d, Exchange)}
    queues = {d.name: d for d in declarations if isinstance(d, Queue)}
    bindings: dict[str, list[Binding]] = {}
    for declaration in declarations:
        if isinstance(declaration, Binding):
            bindings.setdefault(declaration.source, []).append(declaration)

    waits: list[str] = []
    waited_ms = 0
    delivered: dict[str, int] = {}
    arrivals = [exchange]
    while arrivals:
        reached = _route(kinds, bindings, arrivals.pop(), routing_key)
        if not reached:
            raise ValueError(f"{routing_key} is unroutable")
        for name in sorted(reached):
            arguments = queues[name].arguments if name in queues else {}
            if "x-message-ttl" not in arguments:
                delivered[name] = delivered.get(name, 0) + 1
                continue
            if name in waits:
                raise ValueError(f"{routing_key} met {name} twice")
            waits.append(name)
            waited_ms += arguments["x-message-ttl"]
            arrivals.append(arguments["x-dead-letter-exchange"])
    return Trip(tuple(waits), waited_ms, delivered)


def _route(
    kinds: dict[str, Exchange], bindings: dict[str, list[Binding]], exchange: str, key: str
) -> set[str]:
    """The queues that one publish reaches; each exchange and queue counts once.

    An exchange without a matching binding passes the message to its alternate exchange
    (rabbit_exchange.erl, route/3).
    """
    reached: set[str] = set()
    visited: set[str] = set()
    todo = [exchange]
    while todo:
        name = todo.pop()
        if name in visited:
            continue
        visited.add(name)
        kind = kinds[name]
        hits = [
            binding
            for binding in bindings.get(name, [])
            if kind.type == "fanout" or topic_matches(binding.routing_key, key)
        ]
        reached.update(hit.destination for hit in hits if not hit.to_exchange)
        todo.extend(hit.destination for hit in hits if hit.to_exchange)
        if not hits and "alternate-exchange" in kind.arguments:
            todo.append(kind.arguments["alternate-exchange"])
    return reached
