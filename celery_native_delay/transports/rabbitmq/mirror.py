"""The user's own declarations, mirrored onto the delivery exchange.

What the user declares and binds on a connection is noted here and bound to the delivery exchange
before the first delayed publish or the first consume that follows; a connection that does neither
pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .address import (
    landing_address,
    message_address,
    queue_address,
    topic_binding_address,
    topic_matches,
)
from .topology import Binding, Change, Declaration, Exchange, Topology, Unbinding

#: Exchanges that every RabbitMQ vhost has.
BUILTIN_TYPES = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}

#: Types whose bindings the delivery exchange can repeat word for word.
MIRRORED_TYPES = ("direct", "topic")

#: Celery's and kombu's own traffic: remote control, its replies, events. Never delayed.
_INTERNAL = re.compile(r"(^|\.)(pidbox|celeryev)($|\.)")


def is_internal(name: str) -> bool:
    """Whether a queue or exchange of this name is Celery's or kombu's own."""
    return _INTERNAL.search(name) is not None


@dataclass(frozen=True)
class Mirrored:
    """A binding of the user's that is to be repeated on the delivery exchange."""

    queue: str
    exchange: str
    routing_key: str


class Mirror:
    """What one connection's user has declared, and what of it is not yet mirrored."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.types: dict[str, str] = dict(BUILTIN_TYPES)
        #: Changes with everything the user declares, binds or deletes.
        self.version = 0
        self._known: dict[Mirrored, None] = {}
        self._pending: dict[Mirrored, None] = {}
        #: Queues whose arguments were seen, and whether they reject what does not fit.
        self._rejects: dict[str, bool] = {}
        self._landings: dict[str, None] = {}
        self._pending_landings: dict[str, None] = {}

    # --- what the user does --------------------------------------------------------------

    def exchange_declared(self, exchange: str, kind: str, arguments: dict[str, Any] | None) -> None:
        self.types[exchange] = kind
        self.version += 1
        if arguments and "alternate-exchange" in arguments:
            self._lands(exchange)

    def exchange_bound(self, source: str) -> None:
        """An exchange was bound to *source*: what lies behind it cannot be mirrored."""
        if not is_internal(source):
            self._lands(source)

    def exchange_deleted(self, exchange: str) -> list[Binding]:
        """The broker unbound what was bound to *exchange*; what mirrors it, as far as was seen."""
        known = [mirrored for mirrored in self._known if mirrored.exchange == exchange]
        mirrors = map(self.binding_of, known) if exchange in self.types else ()
        gone = [binding for binding in mirrors if binding is not None]
        for mirrored in known:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)
        self.types.pop(exchange, None)
        self.version += 1
        self._landings.pop(exchange, None)
        self._pending_landings.pop(exchange, None)
        return gone

    def queue_declared(
        self, queue: str, arguments: dict[str, Any] | None, *, short_lived: bool
    ) -> None:
        """*short_lived*: exclusive or auto-delete, as reply queues are."""
        overflow = str((arguments or {}).get("x-overflow", ""))
        self.arguments_seen(queue, rejects=overflow.startswith("reject-publish"))
        if not short_lived:
            self.queue_bound(queue, "", queue)

    def arguments_seen(self, queue: str, *, rejects: bool) -> None:
        """*queue* has arguments; *rejects*: it refuses what does not fit."""
        self._rejects[queue] = rejects

    def rejects(self, queue: str) -> bool:
        """Whether *queue* is known to refuse what does not fit."""
        return self._rejects.get(queue, False)

    def is_stranger(self, queue: str) -> bool:
        """Whether nothing is known yet about the arguments of *queue*."""
        return queue not in self._rejects

    def queue_bound(self, queue: str, exchange: str, routing_key: str) -> None:
        if not queue or is_internal(exchange) or is_internal(queue):
            return
        mirrored = Mirrored(queue, exchange, routing_key)
        self._known[mirrored] = self._pending[mirrored] = None
        self.version += 1

    def queue_bound_once(self, queue: str) -> None:
        """*queue* is to be reached by its name, unless it was seen to already."""
        if Mirrored(queue, "", queue) not in self._known:
            self.queue_bound(queue, "", queue)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> Mirrored:
        mirrored = Mirrored(queue, exchange, routing_key)
        self._known.pop(mirrored, None)
        self.version += 1
        self._pending.pop(mirrored, None)
        return mirrored

    def queue_deleted(self, queue: str) -> None:
        self._rejects.pop(queue, None)
        for mirrored in [m for m in self._known if m.queue == queue]:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)

    # --- what is to be done about it -----------------------------------------------------

    def reaches(self, exchange: str, routing_key: str) -> bool:
        """Whether a binding that was seen on this connection routes *routing_key*."""
        is_topic = self.types.get(exchange) == "topic"
        return any(
            topic_matches(known.routing_key, routing_key)
            if is_topic
            else known.routing_key == routing_key
            for known in self._known
            if known.exchange == exchange
        )

    @property
    def known_count(self) -> int:
        """How many bindings have been seen on this connection."""
        return len(self._known)

    @property
    def is_pending(self) -> bool:
        return bool(self._pending or self._pending_landings)

    def take_pending(self) -> tuple[list[Mirrored], list[str]]:
        """Bindings and landing exchanges not mirrored yet; the caller now sees to them."""
        pending = list(self._pending), list(self._pending_landings)
        self._pending, self._pending_landings = {}, {}
        return pending

    def not_mirrored(self, bindings: list[Mirrored]) -> None:
        """These could not be seen to: they stay pending."""
        self._pending = dict.fromkeys(bindings) | self._pending

    def forget_mirrored(self) -> None:
        """The broker lost our bindings: all that is known is pending again."""
        self._pending, self._pending_landings = dict(self._known), dict(self._landings)

    def declarations(self, mirrored: Mirrored) -> Iterator[Change]:
        """What mirrors one binding, in an order the broker accepts; none for other types.

        The type of the binding's exchange must be in :attr:`types`.
        """
        if self.types[mirrored.exchange] not in MIRRORED_TYPES:
            return
        binding = self.binding_of(mirrored)
        if binding is None:
            yield from must_land_declarations(self._topology, mirrored.exchange)
            return
        if self.rejects(mirrored.queue):
            yield from self._behind_landing(mirrored.queue)
        else:
            # It may have rejected before it was deleted by hand and declared anew.
            stale = self._topology.queue_landing_queue(mirrored.queue)
            yield Unbinding(binding.source, stale, binding.routing_key)
        yield binding

    def binding_of(self, mirrored: Mirrored) -> Binding | None:
        """The binding on the delivery exchange that stands for a user's own.

        None where there is none: another type of exchange, or a topic pattern that fits nowhere
        behind the bits.
        """
        topology = self._topology
        kind = self.types[mirrored.exchange]
        if kind not in MIRRORED_TYPES:
            return None
        address = self._binding_address(kind, mirrored)
        if address is None:
            return None
        queue = mirrored.queue
        destination = topology.queue_landing_queue(queue) if self.rejects(queue) else queue
        pattern = topology.delivery_pattern(address)
        return Binding(topology.delivery_exchange, destination, pattern)

    def _binding_address(self, kind: str, mirrored: Mirrored) -> str | None:
        exchange, routing_key = mirrored.exchange, mirrored.routing_key
        if kind == "topic":
            address = topic_binding_address(exchange, routing_key)
            return address if self._topology.fits(address) else None
        address = message_address(exchange, routing_key)
        return self._topology.address_or_hash(address, exchange, routing_key)

    def _behind_landing(self, queue: str) -> Iterator[Declaration]:
        landing = self._topology.queue_landing(queue)
        pattern = self._topology.delivery_pattern(queue_address(queue))
        yield landing
        yield Binding(self._topology.delivery_exchange, queue, pattern)

    def _lands(self, exchange: str) -> None:
        self._landings[exchange] = self._pending_landings[exchange] = None


def landing_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The landing queue of *exchange* and its binding."""
    landing = topology.landing(exchange)
    pattern = topology.delivery_pattern(landing_address(exchange))
    yield landing
    yield Binding(topology.delivery_exchange, landing.name, pattern)


def must_land_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The same, with a mark by which all publishers learn that they have to use it."""
    yield from landing_declarations(topology, exchange)
    yield Exchange(topology.lands_marker(exchange), "fanout")
