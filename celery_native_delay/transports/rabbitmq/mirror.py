"""The user's own declarations, mirrored onto the delivery exchange.

What the user declares and binds on a connection is noted here and bound to the delivery exchange
before the first delayed publish or the first consume that follows; a connection that does neither
pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from .address import landing_address, queue_address, topic_binding_address, topic_matches
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

#: These pick a queue by hashing each routing key; a message for a landing queue carries two.
HASHING_TYPES = ("x-consistent-hash", "x-modulus-hash")

#: Celery's and kombu's own traffic: remote control, its replies, events. Never delayed.
_INTERNAL = re.compile(r"(^|\.)(pidbox|celeryev)($|\.)")


def is_internal(name: str) -> bool:
    """True if a queue or exchange of this name is Celery's or kombu's own."""
    return _INTERNAL.search(name) is not None


class Mirrored(NamedTuple):
    """A binding of the user's that is to be repeated on the delivery exchange."""

    queue: str
    exchange: str
    routing_key: str


class Mirror:
    """The declarations of one connection's user, and which of them are not yet mirrored."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.types: dict[str, str] = dict(BUILTIN_TYPES)
        #: Changes with everything the user declares, binds or deletes.
        self.version = 0
        #: Bindings that have been seen on this connection.
        self.known: dict[Mirrored, None] = {}
        #: Those of them, and landing queues of these exchanges, that are still to be declared.
        self.pending: dict[Mirrored, None] = {}
        self.pending_landings: dict[str, None] = {}
        #: Queues whose arguments were seen, and whether they reject what does not fit.
        self.rejects: dict[str, bool] = {}
        self._landings: dict[str, None] = {}

    # --- what the user does --------------------------------------------------------------

    def exchange_declared(self, exchange: str, kind: str, arguments: dict[str, Any] | None) -> None:
        """The user declared an exchange; what it passes on to an alternate one must land."""
        self.types[exchange] = kind
        self.version += 1
        if arguments and "alternate-exchange" in arguments:
            self._lands(exchange)

    def exchange_bound(self, source: str) -> None:
        """An exchange was bound to *source*: what lies behind it cannot be mirrored."""
        if not is_internal(source):
            self._lands(source)

    def exchange_deleted(self, exchange: str) -> list[Binding]:
        """The user deleted *exchange*; bindings that mirrored what was bound to it."""
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
        """The user declared a queue; *short_lived* is exclusive or auto-delete, as replies are."""
        overflow = str((arguments or {}).get("x-overflow", ""))
        self.rejects[queue] = overflow.startswith("reject-publish")
        if not short_lived:
            self.queue_bound(queue, "", queue)

    def queue_bound(self, queue: str, exchange: str, routing_key: str) -> None:
        """The user bound a queue; nothing is done about Celery's and kombu's own."""
        if not queue or is_internal(exchange) or is_internal(queue):
            return
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known[mirrored] = self.pending[mirrored] = None
        self.version += 1

    def queue_bound_once(self, queue: str) -> None:
        """A message is to reach *queue* by its name, which may have been seen to already."""
        if Mirrored(queue, "", queue) not in self.known:
            self.queue_bound(queue, "", queue)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> Mirrored:
        """The user unbound a queue; the binding that need not be mirrored any more."""
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known.pop(mirrored, None)
        self.version += 1
        self.pending.pop(mirrored, None)
        return mirrored

    def queue_deleted(self, queue: str) -> None:
        """The user deleted a queue, and all its bindings with it."""
        self.rejects.pop(queue, None)
        for mirrored in [m for m in self.known if m.queue == queue]:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)

    # --- what is to be done about it -----------------------------------------------------

    def reaches(self, exchange: str, routing_key: str) -> bool:
        """True if a binding that was seen on this connection routes *routing_key*."""
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
        """True if something is still to be declared."""
        return bool(self.pending or self.pending_landings)

    def take_pending(self) -> tuple[list[Mirrored], list[str]]:
        """Bindings and landing exchanges not mirrored yet, which the caller now sees to."""
        pending = list(self.pending), list(self.pending_landings)
        self.pending, self.pending_landings = {}, {}
        return pending

    def not_mirrored(self, bindings: list[Mirrored]) -> None:
        """Keep pending *bindings*, which could not be seen to."""
        self.pending = dict.fromkeys(bindings) | self.pending

    def forget_mirrored(self) -> None:
        """Make all that is known pending again: the broker lost our bindings."""
        self.pending, self.pending_landings = dict(self.known), dict(self._landings)

    def declarations(self, mirrored: Mirrored) -> Iterator[Change]:
        """Declarations that mirror one binding, in an order the broker accepts.

        None of them for a type that is not mirrored, which must be in :attr:`types`.
        """
        if self.types[mirrored.exchange] not in MIRRORED_TYPES:
            return
        binding = self.binding_of(mirrored)
        if binding is None:
            yield from must_land_declarations(self._topology, mirrored.exchange)
            return
        topology, queue = self._topology, mirrored.queue
        if self.rejects.get(queue):
            yield topology.queue_landing(queue)
            yield Binding(binding.source, queue, topology.delivery_pattern(queue_address(queue)))
        else:
            # It may have rejected before it was deleted by hand and declared anew.
            yield Unbinding(
                binding.source, topology.queue_landing_queue(queue), binding.routing_key
            )
        yield binding

    def marks(
        self, bindings: list[Mirrored], landings: list[str], *, consuming: bool
    ) -> list[list[Declaration]]:
        """Declarations that tell publishers of pending *bindings* and *landings*, by exchange.

        With *consuming* also that consumers mirror their bindings.
        """
        groups = [list(must_land_declarations(self._topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in bindings if binding.exchange})
            groups += [[Exchange(self._topology.mirrored_marker(name), "fanout")] for name in named]
        return groups

    def binding_of(self, mirrored: Mirrored) -> Binding | None:
        """The binding on the delivery exchange that stands for a user's own.

        None where there is none: another type of exchange, or a topic pattern that fits nowhere
        behind the bits.
        """
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

    def _lands(self, exchange: str) -> None:
        self._landings[exchange] = self.pending_landings[exchange] = None


def landing_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The landing queue of *exchange* and its binding."""
    landing = topology.landing(exchange)
    pattern = topology.delivery_pattern(landing_address(exchange))
    yield landing
    yield Binding(topology.delivery_exchange, landing.name, pattern)


def must_land_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The landing queue of *exchange*, and a mark by which all publishers learn to use it."""
    yield from landing_declarations(topology, exchange)
    yield Exchange(topology.lands_marker(exchange), "fanout")
