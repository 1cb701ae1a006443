"""The user's bindings, and their copies on the delivery exchange.

The mirror notes what the user declares and binds on a connection. The next delayed publish or
consume binds the same queues to the delivery exchange. Other connections bind nothing.
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

#: Types of exchanges whose bindings the delivery exchange, a topic, can copy.
MIRRORED_TYPES = ("direct", "topic")

#: Types that choose a queue by a hash of each routing key; a landing message has two keys.
HASHING_TYPES = ("x-consistent-hash", "x-modulus-hash")

#: Celery's and kombu's own queues: remote control, its replies, events. Never delayed.
_INTERNAL = re.compile(r"(^|\.)(pidbox|celeryev)($|\.)")


def is_internal(name: str) -> bool:
    """True if a queue or exchange of this name is Celery's or kombu's own."""
    return _INTERNAL.search(name) is not None


class Mirrored(NamedTuple):
    """A binding of the user's that the delivery exchange is to copy."""

    queue: str
    exchange: str
    routing_key: str


class Mirror:
    """The user's declarations on one connection, and those still to be copied."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.types: dict[str, str] = dict(BUILTIN_TYPES)
        #: Changes with each declaration, binding and deletion of the user's.
        self.version = 0
        #: All bindings of the user's on this connection.
        self.known: dict[Mirrored, None] = {}
        #: Bindings still to be copied, and exchanges whose landing queues are still to be declared.
        self.pending: dict[Mirrored, None] = {}
        self.pending_landings: dict[str, None] = {}
        #: Queues declared on this connection, and whether their x-overflow rejects messages.
        self.rejects: dict[str, bool] = {}
        self._landings: dict[str, None] = {}

    # --- what the user does --------------------------------------------------------------

    def exchange_declared(self, exchange: str, kind: str, arguments: dict[str, Any] | None) -> None:
        """The user declared an exchange.

        If it has an alternate exchange, its delayed messages go through a landing queue.
        """
        self.types[exchange] = kind
        self.version += 1
        if arguments and "alternate-exchange" in arguments:
            self._note_landing(exchange)

    def exchange_bound(self, source: str) -> None:
        """The user bound an exchange to *source*.

        The bindings behind it cannot be copied: delayed messages go through a landing queue.
        """
        if not is_internal(source):
            self._note_landing(source)

    def exchange_deleted(self, exchange: str) -> list[Binding]:
        """The user deleted *exchange*; return the copies of its bindings, to be removed."""
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
        """The user declared a queue; *short_lived*: it is exclusive or auto-delete."""
        overflow = str((arguments or {}).get("x-overflow", ""))
        self.rejects[queue] = overflow.startswith("reject-publish")
        if not short_lived:
            self.queue_bound(queue, "", queue)

    def queue_bound(self, queue: str, exchange: str, routing_key: str) -> None:
        """The user bound a queue; Celery's and kombu's own are ignored."""
        if not queue or is_internal(exchange) or is_internal(queue):
            return
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known[mirrored] = self.pending[mirrored] = None
        self.version += 1

    def queue_bound_once(self, queue: str) -> None:
        """A delayed message goes to *queue* by its name: bind it, if that was not done before."""
        if Mirrored(queue, "", queue) not in self.known:
            self.queue_bound(queue, "", queue)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> Mirrored:
        """The user unbound a queue; return the binding, whose copy is to be removed."""
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known.pop(mirrored, None)
        self.version += 1
        self.pending.pop(mirrored, None)
        return mirrored

    def queue_deleted(self, queue: str) -> None:
        """The user deleted a queue, and so its bindings."""
        self.rejects.pop(queue, None)
        for mirrored in [m for m in self.known if m.queue == queue]:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)

    # --- what is still to be declared ------------------------------------------------------

    def reaches(self, exchange: str, routing_key: str) -> bool:
        """True if a binding known on this connection routes *routing_key*."""
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
        """True if bindings or landing queues are still to be declared."""
        return bool(self.pending or self.pending_landings)

    def take_pending(self) -> tuple[list[Mirrored], list[str]]:
        """Return pending bindings, and exchanges with a pending landing queue; clear both."""
        pending = list(self.pending), list(self.pending_landings)
        self.pending, self.pending_landings = {}, {}
        return pending

    def keep_pending(self, bindings: list[Mirrored]) -> None:
        """Make *bindings* pending again: they could not be copied."""
        self.pending = dict.fromkeys(bindings) | self.pending

    def forget_mirrored(self) -> None:
        """Make all known bindings pending again: the broker may have lost their copies."""
        self.pending, self.pending_landings = dict(self.known), dict(self._landings)

    def declarations(self, mirrored: Mirrored) -> Iterator[Change]:
        """The declarations that copy one binding, in an order that the broker accepts.

        There are none for an exchange of a type that cannot be copied. Its type must be known.
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
        """Landing queues and marker exchanges for *bindings* and *landings*, grouped by exchange.

        Publishers look for the markers. With *consuming* there is a marker for each exchange whose
        consumers copy their bindings.
        """
        groups = [list(marked_landing(self._topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in bindings if binding.exchange})
            groups += [[Exchange(self._topology.copied_marker(name), "fanout")] for name in named]
        return groups

    def binding_of(self, mirrored: Mirrored) -> Binding | None:
        """The copy of a user's binding on the delivery exchange.

        None if the exchange's type cannot be copied, or the topic pattern is too long.
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

    def _note_landing(self, exchange: str) -> None:
        self._landings[exchange] = self.pending_landings[exchange] = None


def landing_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The landing queue of *exchange* and its binding."""
    landing = topology.landing(exchange)
    pattern = topology.delivery_pattern(landing_address(exchange))
    yield landing
    yield Binding(topology.delivery_exchange, landing.name, pattern)


def marked_landing(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """The landing queue of *exchange*, and the marker exchange that tells publishers to use it."""
    yield from landing_declarations(topology, exchange)
    yield Exchange(topology.landing_marker(exchange), "fanout")
