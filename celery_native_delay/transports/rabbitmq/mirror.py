"""Copy the user's bindings onto the delivery exchange (which routes due messages to their queues).

The mirror notes what the user declares and binds on one connection. The next delayed publish or
consume on this connection copies the bindings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .address import landing_address, queue_address, topic_binding_address, topic_matches
from .topology import Binding, Change, Declaration, Exchange, Topology, Unbinding

#: The types of the exchanges that every virtual host of RabbitMQ has.
BUILTIN_TYPES = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}

#: Types of exchanges whose bindings the delivery exchange (a topic exchange) can copy.
MIRRORED_TYPES = ("direct", "topic")

#: Types that choose a queue by a hash of the routing key. Messages of landing queues have two keys.
HASHING_TYPES = ("x-consistent-hash", "x-modulus-hash")

#: Celery's and kombu's own queues (remote control, replies, events), whose messages never wait.
_INTERNAL = re.compile(r"(^|\.)(pidbox|celeryev)($|\.)")


def is_internal(name: str) -> bool:
    """Return True if the queue or exchange *name* is one of Celery's or kombu's own."""
    return _INTERNAL.search(name) is not None


class Mirrored(NamedTuple):
    """A user's binding, to copy onto the delivery exchange (which routes due messages)."""

    queue: str
    exchange: str
    routing_key: str


class Mirror:
    """Notes the user's declarations on one connection, and which bindings must still be copied."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.types: dict[str, str] = dict(BUILTIN_TYPES)
        #: A counter that each declaration, binding and deletion by the user increases.
        self.version = 0
        #: All bindings that the user made on this connection.
        self.known: dict[Mirrored, None] = {}
        #: Bindings still to be copied, and exchanges whose landing queues are still to be declared.
        self.pending: dict[Mirrored, None] = {}
        self.pending_landings: dict[str, None] = {}
        #: Queues declared on this connection, and whether their x-overflow rejects messages.
        self.rejects: dict[str, bool] = {}
        self._landings: dict[str, None] = {}

    # --- what the user does --------------------------------------------------------------

    def exchange_declared(self, exchange: str, kind: str, arguments: dict[str, Any] | None) -> None:
        """Note that the user declared an exchange.

        If the exchange has an alternate exchange, its delayed messages go through a landing queue.
        A landing queue passes due messages on to the user's exchange.
        """
        self.types[exchange] = kind
        self.version += 1
        if arguments and "alternate-exchange" in arguments:
            self._note_landing(exchange)

    def exchange_bound(self, source: str) -> None:
        """Note that the user bound another exchange to *source*.

        The bindings of that other exchange cannot be copied. So delayed messages to *source* go
        through a landing queue, which passes due messages on to *source*.
        """
        if not is_internal(source):
            self._note_landing(source)

    def exchange_deleted(self, exchange: str) -> list[Binding]:
        """Note that *exchange* is deleted; return our copies of its bindings, to remove."""
        known = [mirrored for mirrored in self.known if mirrored.exchange == exchange]
        mirrors = map(self.binding_of, known) if exchange in self.types else ()
        gone = [binding for binding in mirrors if binding is not None]
        for mirrored in known:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)
        self.types.pop(exchange, None)
        self.version += 1
        self._landings.pop(exchange, None)
        self.pending_landings.pop(exchange, None)
        return gone

    def queue_declared(
        self, queue: str, arguments: dict[str, Any] | None, *, short_lived: bool
    ) -> None:
        """Note a queue; *short_lived* is True if the queue is exclusive or auto-delete."""
        overflow = str((arguments or {}).get("x-overflow", ""))
        self.rejects[queue] = overflow.startswith("reject-publish")
        if not short_lived:
            self.queue_bound(queue, "", queue)

    def queue_bound(self, queue: str, exchange: str, routing_key: str) -> None:
        """Note that the user bound a queue, unless the queue or exchange is Celery's own."""
        if not queue or is_internal(exchange) or is_internal(queue):
            return
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known[mirrored] = self.pending[mirrored] = None
        self.version += 1

    def queue_bound_once(self, queue: str) -> None:
        """Note that a delayed message goes to *queue* by name, unless that was noted before."""
        if Mirrored(queue, "", queue) not in self.known:
            self.queue_bound(queue, "", queue)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> Mirrored:
        """Note that the user unbound a queue; return the binding, whose copy must be removed."""
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known.pop(mirrored, None)
        self.version += 1
        self.pending.pop(mirrored, None)
        return mirrored

    def queue_deleted(self, queue: str) -> None:
        self.rejects.pop(queue, None)
        for mirrored in [m for m in self.known if m.queue == queue]:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)

    # --- what is still to be declared ------------------------------------------------------

    def reaches(self, exchange: str, routing_key: str) -> bool:
        """Return True if a binding that is known on this connection routes *routing_key*."""
        is_topic = self.types.get(exchange) == "topic"
        return any(
            topic_matches(known.routing_key, routing_key)
            if is_topic
            else known.routing_key == routing_key
            for known in self.known
            if known.exchange == exchange
        )

    @property
    def is_pending(self) -> bool:
        return bool(self.pending or self.pending_landings)

    def take_pending(self) -> tuple[list[Mirrored], list[str]]:
        """Return and clear the bindings to copy, and the exchanges that need a landing queue.

        A landing queue passes due messages on to the user's exchange or queue.
        """
        pending = list(self.pending), list(self.pending_landings)
        self.pending, self.pending_landings = {}, {}
        return pending

    def keep_pending(self, bindings: list[Mirrored]) -> None:
        self.pending = dict.fromkeys(bindings) | self.pending

    def forget_mirrored(self) -> None:
        """Note that all bindings must be copied again, because the broker may have lost some."""
        self.pending, self.pending_landings = dict(self.known), dict(self._landings)

    def declarations(self, mirrored: Mirrored) -> Iterator[Change]:
        """Yield the declarations that copy one binding; none if it cannot be copied.

        The type of the binding's exchange must be known.
        """
        if self.types[mirrored.exchange] not in MIRRORED_TYPES:
            return
        binding = self.binding_of(mirrored)
        if binding is None:
            yield from marked_landing(self._topology, mirrored.exchange)
            return
        topology, queue = self._topology, mirrored.queue
        if self.rejects.get(queue):
            yield topology.queue_landing(queue)
            yield Binding(binding.source, queue, topology.delivery_pattern(queue_address(queue)))
        else:
            # The queue may have had x-overflow before it was deleted and declared anew.
            yield Unbinding(
                binding.source, topology.queue_landing_queue(queue), binding.routing_key
            )
        yield binding

    def marker_declarations(
        self, bindings: list[Mirrored], landings: list[str], *, consuming: bool
    ) -> list[list[Declaration]]:
        """Return landing queues and marker exchanges, grouped by the user's exchange.

        The existence of a marker exchange tells producers how delayed messages reach the queues.
        *landings* are exchanges that need a landing queue. With *consuming*, each exchange of
        *bindings* gets a marker exchange that says: consumers copy their bindings.
        """
        groups = [list(marked_landing(self._topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in bindings if binding.exchange})
            groups += [[Exchange(self._topology.copied_marker(name), "fanout")] for name in named]
        return groups

    def binding_of(self, mirrored: Mirrored) -> Binding | None:
        """Return the copy of a user's binding; None if the binding cannot be copied."""
        topology, (queue, exchange, routing_key) = self._topology, mirrored
        kind = self.types[exchange]
        if kind not in MIRRORED_TYPES:
            return None
        if kind == "topic":
            address = topic_binding_address(exchange, routing_key)
            if not topology.fits(address):
                return None
        else:
            address = topology.address(exchange, routing_key)
        destination = topology.queue_landing_queue(queue) if self.rejects.get(queue) else queue
        return Binding(topology.delivery_exchange, destination, topology.delivery_pattern(address))

    def _note_landing(self, exchange: str) -> None:
        self._landings[exchange] = self.pending_landings[exchange] = None


def landing_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """Yield the landing queue (passes due messages on) of *exchange*, and the queue's binding."""
    landing = topology.landing(exchange)
    pattern = topology.delivery_pattern(landing_address(exchange))
    yield landing
    yield Binding(topology.delivery_exchange, landing.name, pattern)


def marked_landing(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """Yield the landing queue of *exchange*, and its marker exchange.

    A landing queue passes due messages on to the user's exchange. The existence of the marker
    exchange tells publishers to use the landing queue.
    """
    yield from landing_declarations(topology, exchange)
    yield Exchange(topology.landing_marker(exchange), "fanout")
