"""Copy the user's queue bindings to this package's exchange for due messages."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from .address import landing_address, topic_binding_address, topic_matches
from .topology import Binding, Change, Declaration, Exchange, Topology, Unbinding

K = TypeVar("K")
V = TypeVar("V")

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

#: Types that choose a queue by a hash of the routing key. Delayed messages cannot go to such an
#: exchange, because a message from a landing queue has two routing keys.
HASHING_TYPES = ("x-consistent-hash", "x-modulus-hash")

#: How many bindings, queues or exchanges a connection remembers. A connection that publishes to
#: ever-new queues then needs a few megabytes. For a forgotten name, the broker is asked again.
REMEMBERED = 10_000

#: Celery's and kombu's own queues (remote control, replies, events), whose messages never wait.
_INTERNAL = re.compile(r"(^|\.)(pidbox|celeryev)($|\.)")


def is_internal(name: str) -> bool:
    """Return True for Celery's internal queues and exchanges (remote control and events)."""
    return _INTERNAL.search(name) is not None


class Mirrored(NamedTuple):
    """A binding of a queue to an exchange, made by the user."""

    queue: str
    exchange: str
    routing_key: str


class Mirror:
    """Remembers the queues, exchanges and bindings that the user declares on a connection."""

    def __init__(
        self, topology: Topology, can_name: Callable[[str], bool] = lambda name: True
    ) -> None:
        """*can_name* returns True for names of queues and exchanges that the broker can quote."""
        self._topology = topology
        self._can_name = can_name
        self.types: ChainMap[str, str] = ChainMap({}, BUILTIN_TYPES)
        #: A counter that each declaration, binding and deletion by the user increases.
        self.version = 0
        #: The last bindings that the user made on this connection.
        self.known: dict[Mirrored, None] = {}
        #: Bindings still to be copied, and exchanges whose landing queues are still to be declared.
        self.pending: dict[Mirrored, None] = {}
        self.pending_landings: dict[str, None] = {}
        #: For each known queue: True if its x-overflow rejects messages, or if the broker has a
        #: landing queue for it.
        self.lands: dict[str, bool] = {}
        self._landings: dict[str, None] = {}

    def remember_type(self, exchange: str, kind: str) -> None:
        """Remember the type of an exchange, which is then the last to be forgotten."""
        if exchange not in BUILTIN_TYPES:
            remember(self.types.maps[0], exchange, kind)

    def ignores(self, name: str) -> bool:
        """Return True if no delayed message can go to the queue or exchange *name*."""
        return is_internal(name) or not self._can_name(name)

    # --- what the user does --------------------------------------------------------------

    def exchange_declared(self, exchange: str, kind: str, arguments: dict[str, Any] | None) -> None:
        self.remember_type(exchange, kind)
        self.version += 1
        if arguments and "alternate-exchange" in arguments:
            self.note_landing(exchange)

    def exchange_bound(self, source: str) -> None:
        """Remember that the user bound another exchange to the exchange *source*."""
        # This binding cannot be copied, so delayed messages need a landing queue.
        self.note_landing(source)

    def exchange_deleted(self, exchange: str) -> list[Unbinding]:
        """Forget a deleted exchange; return the bindings to remove from the delivery exchange."""
        known = [mirrored for mirrored in self.known if mirrored.exchange == exchange]
        gone = [each for mirrored in known for each in self.unbindings_of(mirrored)]
        for mirrored in known:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)
        self.types.pop(exchange, None)
        self.version += 1
        self._landings.pop(exchange, None)
        self.pending_landings.pop(exchange, None)
        return gone

    def queue_declared(
        self, queue: str, arguments: dict[str, Any] | None, *, for_replies: bool
    ) -> None:
        """Remember a queue that the user declared.

        *for_replies* is True for a queue that gets replies, not tasks. The queue's binding to the
        default exchange is then not remembered.
        """
        overflow = str((arguments or {}).get("x-overflow", ""))
        remember(self.lands, queue, overflow.startswith("reject-publish"))
        if not for_replies:
            self.queue_bound(queue, "", queue)

    def queue_bound(self, queue: str, exchange: str, routing_key: str) -> None:
        """Remember a user's queue binding; ignore Celery's internal queues and exchanges."""
        if not queue or self.ignores(exchange) or self.ignores(queue):
            return
        mirrored = Mirrored(queue, exchange, routing_key)
        self._remember_binding(mirrored)
        self.pending[mirrored] = None
        self.version += 1

    def queue_bound_once(self, queue: str) -> None:
        """Remember the queue's binding to the default exchange, if not yet remembered."""
        mirrored = Mirrored(queue, "", queue)
        if mirrored in self.known:
            self._remember_binding(mirrored)
        else:
            self.queue_bound(*mirrored)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> Mirrored:
        """Forget and return a queue binding that the user removed."""
        mirrored = Mirrored(queue, exchange, routing_key)
        self.known.pop(mirrored, None)
        self.version += 1
        self.pending.pop(mirrored, None)
        return mirrored

    def queue_deleted(self, queue: str) -> None:
        self.lands.pop(queue, None)
        for mirrored in [m for m in self.known if m.queue == queue]:
            self.queue_unbound(mirrored.queue, mirrored.exchange, mirrored.routing_key)

    # --- what is still to be declared ------------------------------------------------------

    def reaches(self, exchange: str, routing_key: str) -> bool:
        """Return True if *exchange* routes *routing_key* to a queue that this connection bound."""
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
        """Return the bindings still to copy, and the exchanges that still need landing queues.

        The next call returns only newer bindings and exchanges.
        """
        pending = list(self.pending), list(self.pending_landings)
        self.pending, self.pending_landings = {}, {}
        return pending

    def forget_mirrored(self) -> None:
        """Let :meth:`take_pending` return all bindings again, in case the broker lost copies."""
        self.pending, self.pending_landings = dict(self.known), dict(self._landings)

    def needs_landing(self, queue: str) -> bool:
        """Return True if due messages must reach *queue* through a landing queue of its own."""
        return self.lands.get(queue, False) or self._topology.settings.lands(queue)

    def declarations(self, mirrored: Mirrored) -> Iterator[Change]:
        """Yield the declarations that make a copy of a user's binding."""
        if self.types[mirrored.exchange] not in MIRRORED_TYPES:
            return
        binding = self.binding_of(mirrored)
        if binding is None:
            yield from marked_landing(self._topology, mirrored.exchange)
            return
        if self.needs_landing(mirrored.queue):
            yield from diverted(self._topology, mirrored.queue, binding.routing_key)
        else:
            yield binding

    def marker_declarations(
        self, bindings: list[Mirrored], landings: list[str], *, consuming: bool
    ) -> list[list[Declaration]]:
        """Return the declarations of landing queues and marker exchanges, a list per exchange.

        *landings* are exchanges of the user that need a landing queue, which dead-letters due
        messages to the exchange. A marker exchange carries no messages. Its name tells producers
        that the user's exchange has a landing queue, or that its bindings are copied. The markers
        of copied *bindings* are returned only with *consuming*.
        """
        groups = [list(marked_landing(self._topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in bindings if binding.exchange})
            groups += [[Exchange(self._topology.copied_marker(name), "fanout")] for name in named]
        return groups

    def binding_of(self, mirrored: Mirrored) -> Binding | None:
        """Return this package's copy of a user's binding.

        Return None if the binding key is too long, or if this package does not copy bindings of
        this exchange type.
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
        destination = topology.queue_landing_queue(queue) if self.needs_landing(queue) else queue
        return Binding(topology.delivery_exchange, destination, topology.delivery_pattern(address))

    def unbindings_of(self, mirrored: Mirrored) -> list[Unbinding]:
        """Return what removes this package's copy of a user's binding, wherever it leads."""
        binding = self.binding_of(mirrored) if mirrored.exchange in self.types else None
        if binding is None:
            return []
        # Another process may have bound the landing queue instead since.
        ends = (mirrored.queue, self._topology.queue_landing_queue(mirrored.queue))
        return [Unbinding(binding.source, end, binding.routing_key) for end in ends]

    def note_landing(self, exchange: str) -> None:
        """Remember that due messages reach *exchange* through a landing queue."""
        if self.ignores(exchange):
            return
        self.pending_landings[exchange] = None
        if (forgotten := remember(self._landings, exchange, None)) is not None:
            self.pending_landings.pop(forgotten, None)

    def _remember_binding(self, mirrored: Mirrored) -> None:
        if (forgotten := remember(self.known, mirrored, None)) is not None:
            self.pending.pop(forgotten, None)


def remember(cache: MutableMapping[K, V], key: K, value: V) -> K | None:
    """Put *key* at the end of *cache*; forget and return the first key of a full cache."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) <= REMEMBERED:
        return None
    first = next(iter(cache))
    del cache[first]
    return first


def landing_declarations(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """Yield the queue that dead-letters due messages to *exchange*, and the queue's binding."""
    landing = topology.landing(exchange)
    pattern = topology.delivery_pattern(landing_address(exchange))
    yield landing
    yield Binding(topology.delivery_exchange, landing.name, pattern)


def diverted(topology: Topology, queue: str, pattern: str) -> Iterator[Change]:
    """Yield the changes that let due messages reach *queue* through a landing queue of its own.

    *pattern* is the binding key with which *queue* is bound to the delivery exchange.
    """
    landing, source = topology.queue_landing(queue), topology.delivery_exchange
    yield landing
    yield Exchange(topology.diverted_marker, "fanout")
    yield Binding(source, queue, topology.own_pattern(queue))
    # In this order no message comes twice. A message between the two changes parks.
    yield Unbinding(source, queue, pattern)
    yield Binding(source, landing.name, pattern)


def marked_landing(topology: Topology, exchange: str) -> Iterator[Declaration]:
    """Yield the landing queue of *exchange*, and the marker exchange by which producers find it."""
    yield from landing_declarations(topology, exchange)
    yield Exchange(topology.landing_marker(exchange), "fanout")


# ---- the plan of an app's queues ---------------------------------------------------------------


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
