"""The delay levels of RabbitMQ: every name, TTL, routing key and binding.

Rule 1: every name, argument and binding pattern on the broker is decided here.
Rule 2: no I/O, no clock; nothing imported but the standard library.
Rule 3: a change in what ``plan()`` yields is a new VERSION, never an edit: brokers in production
hold these declarations (tests/unit/golden).

A delay is a number of units of the resolution, written in binary: one word of the routing key for
each bit, most significant first. Above the fused bits a level is one bit, with one queue, whose
TTL is that bit's worth. Below, a level is four bits (the lowest: three), with one queue for each of
their values but 0: all messages pass the low bits, each queue passes only so many at a time, and
four bits cost one hop (``DelaySettings.fused_bits``). A message enters at the queue of its highest
level that is not zero and is dead-lettered to the exchange of the next lower one; from there
straight to the next queue that it waits in. The last is the delivery exchange, where the words
behind the bits, the address (``address.py``), lead to the destination queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...settings import DelaySettings, lowest_bit
from .address import SHORTSTR_BYTES, hashed_address, message_address, queue_address, short_word

VERSION = "v1"

_OURS = re.compile(rf"[A-Za-z0-9._-]+\.{VERSION}\.(parked$|\d+x\d+ms\.)")

#: A poison message is counted at every return to a quorum queue and dropped beyond the limit,
#: which RabbitMQ 4 sets to 20. Before 4.0 a negative limit means 0, so: a very high one.
#: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling
_NO_DELIVERY_LIMIT = 1_000_000


@dataclass(frozen=True)
class Exchange:
    """A durable exchange to declare."""

    name: str
    type: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    """A durable queue to declare."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Binding:
    """A binding to make; *destination* is an exchange when *to_exchange* is set."""

    source: str
    destination: str
    routing_key: str
    to_exchange: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Unbinding:
    """A binding of a queue that must not be there; it need not ever have been."""

    source: str
    destination: str
    routing_key: str


Declaration = Exchange | Queue | Binding
Change = Declaration | Unbinding


@dataclass(frozen=True)
class Hop:
    """One wait of a message: a level queue and its TTL in milliseconds."""

    queue: str
    ttl_ms: int

    @cached_property
    def entry(self) -> str:
        """The fanout exchange in front of the queue."""
        return f"{self.queue}.entry"


@dataclass(frozen=True)
class Level:
    """Bits of a delay that a message waits for at once: *width* of them from *lowest* on."""

    lowest: int
    width: int

    @property
    def steps(self) -> range:
        """The units of each of the level's queues."""
        unit = 1 << self.lowest
        return range(unit, unit << self.width, unit)


def is_delay_name(name: str) -> bool:
    """True if a queue or exchange of this name is one of ours, in any namespace."""
    return _OURS.match(name) is not None


class Topology:
    """The delay levels that *settings* ask for, as data."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings
        self.resolution_ms = settings.resolution_ms
        self.bit_count = settings.levels
        self.max_units = (1 << self.bit_count) - 1
        #: By bit: the lowest one of its level.
        self._lowest_bits = [
            lowest_bit(bit, fused_bits=settings.fused_bits) for bit in range(self.bit_count)
        ]
        self._hops: dict[int, Hop] = {}
        self.space = f"{settings.namespace}.{VERSION}"
        self.name = (
            f"{self.space}.{settings.levels}x{settings.resolution_ms}ms"
            f".f{settings.fused_bits}.{settings.queue_type}"
        )
        self.parking_exchange = self.parking_queue = f"{self.space}.parked"
        self.rescue_lock_queue = f"{self.space}.rescue-lock"
        self.delivery_exchange = f"{self.name}.delivery"
        self.ready_exchange = f"{self.name}.ready"

    # --- names ---------------------------------------------------------------------------

    def level_exchange(self, bit: int) -> str:
        """The exchange where messages arrive that have waited for all bits above the level.

        *bit* is the level's lowest.
        """
        return f"{self.name}.level-{bit:02d}"

    def level_queue(self, units: int) -> str:
        """The queue in which a message that waits *units*, more than 0, waits first."""
        return self._first_hop(units).queue

    def landing_queue(self, exchange: str) -> str:
        """The landing queue of a user's exchange."""
        return f"{self.name}.landing-exchange.{short_word(exchange)}"

    def is_landing(self, queue: str) -> bool:
        """True if *queue* is a landing queue, of an exchange or of a queue."""
        return queue.startswith(f"{self.name}.landing-")

    def lands_marker(self, exchange: str) -> str:
        """The exchange whose presence says: messages to *exchange* must pass its landing queue."""
        return f"{self.name}.lands.{short_word(exchange)}"

    def mirrored_marker(self, exchange: str) -> str:
        """The exchange whose presence says: consumers of *exchange* mirror their bindings."""
        return f"{self.name}.mirrored.{short_word(exchange)}"

    def queue_landing_queue(self, queue: str) -> str:
        """The landing queue of a user's queue that may reject what reaches it."""
        return f"{self.name}.landing-queue.{short_word(queue)}"

    @cached_property
    def levels(self) -> list[Level]:
        """The delay levels, lowest first."""
        bits = [*sorted(set(self._lowest_bits)), self.bit_count]
        return [Level(bit, above - bit) for bit, above in pairwise(bits)]

    @cached_property
    def level_queues(self) -> list[Hop]:
        """Every level queue with its TTL, shortest first."""
        return [self._first_hop(units) for level in self.levels for units in level.steps]

    # --- routing keys --------------------------------------------------------------------

    def entry_exchange(self, units: int) -> str:
        """The exchange where a message enters: in front of the queue that it waits in first.

        A fanout exchange for each level queue, because a topic exchange would walk all words of
        the key first: a quarter of the time that a confirmed publish takes on RabbitMQ 3.10.
        """
        return self._first_hop(units).entry if units else self.delivery_exchange

    def first_ttl_ms(self, units: int, *, remaining_us: int) -> int:
        """The expiration that makes up for rounding *remaining_us* up to *units*.

        RabbitMQ takes the lower of the queue's TTL and the message's, and drops the latter at the
        first hop. In one queue the two differ by less than a unit, so a message behind one that
        expires later waits less than a unit for it: never longer than without.
        https://www.rabbitmq.com/docs/ttl#per-message-ttl-in-publishers
        """
        ttl_ms = self._first_hop(units).ttl_ms
        excess_us = units * self.resolution_ms * 1000 - remaining_us
        return max(1, -(-(ttl_ms * 1000 - excess_us) // 1000))

    def routing_key(self, units: int, address: str) -> str:
        """The routing key of a message that waits *units* and then goes to *address*.

        Raises:
            ValueError: *units* is not in ``0..max_units``.
        """
        if not 0 <= units <= self.max_units:
            raise self._out_of_reach(units)
        return ".".join((*f"{units:0{self.bit_count}b}", address))

    def path(self, units: int) -> list[Hop]:
        """The waits of a message, in order; their TTLs add up to its delay.

        Raises:
            ValueError: *units* is not in ``0..max_units``.
        """
        if not 0 <= units <= self.max_units:
            raise self._out_of_reach(units)
        hops = []
        while units:
            hop = self._first_hop(units)
            hops.append(hop)
            units -= hop.ttl_ms // self.resolution_ms
        return hops

    # --- addresses -----------------------------------------------------------------------

    def fits(self, address: str) -> bool:
        """True if *address* fits into a routing key behind the bits."""
        return 2 * self.bit_count + len(address.encode()) <= SHORTSTR_BYTES

    def address(self, exchange: str, routing_key: str) -> str:
        """The address of a message to *exchange*, or its hash where it does not fit."""
        address = message_address(exchange, routing_key)
        return address if self.fits(address) else hashed_address(exchange, routing_key)

    def delivery_pattern(self, address: str) -> str:
        """The binding key on the delivery exchange for *address*: any delay, then exactly it.

        One ``*`` for each bit and no leading ``#``, which would match addresses that merely
        end alike and makes the broker try every suffix (rabbit_db_topic_exchange.erl).
        """
        return "*." * self.bit_count + address

    def collides(self, routing_key: str) -> bool:
        """True if a user's own key, travelling beside ours, could be taken for one of ours.

        Messages for a landing queue keep their own key and carry ours as BCC; the level and
        delivery exchanges look at both.
        """
        words = routing_key.split(".")
        if len(words) < self.bit_count:
            return False
        return not {"0", "1"}.isdisjoint(words[: self.bit_count]) or any(
            word.startswith("%") for word in words[self.bit_count : self.bit_count + 1]
        )

    # --- declarations --------------------------------------------------------------------

    def plan(self) -> Iterator[Declaration]:
        """Every declaration of the set, in an order the broker accepts."""
        yield Exchange(self.parking_exchange, "fanout")
        yield Queue(
            self.parking_queue,
            {
                "x-queue-type": "quorum",
                "x-queue-leader-locator": "balanced",
                "x-delivery-limit": _NO_DELIVERY_LIMIT,
            },
        )
        yield Binding(self.parking_exchange, self.parking_queue, "")
        # Without an alternate exchange 32 messages that no queue is bound for stop a level for
        # everyone: at-least-once dead-lettering retries each of them and has 32 places.
        # https://github.com/Particular/NServiceBus.RabbitMQ/issues/1407
        parks = {"alternate-exchange": self.parking_exchange}
        yield Exchange(self.delivery_exchange, "topic", parks)
        # Nothing is above the top level, whose queues are entered alone.
        for level in self.levels[:-1]:
            yield Exchange(self.level_exchange(level.lowest), "topic", parks)
        below = self.delivery_exchange
        for level in self.levels:
            for units in level.steps:
                hop = self._first_hop(units)
                # No alternate exchange: a message carries an expiration until its first hop, and
                # would expire in the parking queue. Publishing is mandatory instead.
                yield Exchange(hop.entry, "fanout")
                yield Queue(hop.queue, self._level_arguments(hop.ttl_ms, below))
                yield Binding(hop.entry, hop.queue, "")
            below = self.level_exchange(level.lowest)
        yield from self._bindings()
        yield Exchange(self.ready_exchange, "fanout")

    def landing(self, exchange: str) -> Queue:
        """The landing queue of *exchange*: what reaches it goes on at once.

        It keeps the message's own routing key, and an exchange that routes nowhere holds up this
        queue instead of a delay level.
        """
        return Queue(self.landing_queue(exchange), _landing_arguments(exchange))

    def queue_landing(self, queue: str) -> Queue:
        """The landing queue in front of *queue*, which holds up what *queue* rejects."""
        arguments = _landing_arguments(self.delivery_exchange)
        arguments["x-dead-letter-routing-key"] = self.routing_key(0, queue_address(queue))
        return Queue(self.queue_landing_queue(queue), arguments)

    def _out_of_reach(self, units: int) -> ValueError:
        return ValueError(f"expected 0 to {self.max_units} units, got {units}")

    def _first_hop(self, units: int) -> Hop:
        """The queue of the highest level in *units*, which are more than 0."""
        top = units.bit_length() - 1
        bit = self._lowest_bits[top]
        value = units >> bit
        hop = self._hops.get(value << bit)
        if hop is None:
            fused = f"-{value:x}" if top < self.settings.fused_bits else ""
            hop = Hop(f"{self.level_exchange(bit)}{fused}", self.resolution_ms * (value << bit))
            self._hops[value << bit] = hop
        return hop

    def _level_arguments(self, ttl_ms: int, dead_letter_exchange: str) -> dict[str, Any]:
        # Expired messages leave a queue only from its head, so a queue must hold a single TTL, up
        # to the unit that first_ttl_ms() takes off. https://www.rabbitmq.com/docs/ttl
        arguments = {
            "x-queue-type": self.settings.queue_type,
            "x-message-ttl": ttl_ms,
            "x-dead-letter-exchange": dead_letter_exchange,
        }
        if self.settings.queue_type == "quorum":
            # Without the locator one node leads them all; 3.10 refuses it on classic queues.
            # at-least-once falls back to at-most-once in silence without reject-publish.
            # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
            arguments |= {
                "x-queue-leader-locator": "balanced",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        return arguments

    def _bindings(self) -> Iterator[Binding]:
        """From each level's exchange to all queues of it and below, and on to delivery."""
        for index, level in enumerate(self.levels[:-1]):
            source = self.level_exchange(level.lowest)
            zeros = 0
            for lower in reversed(self.levels[: index + 1]):
                for units in lower.steps:
                    key = self._pattern(lower, units >> lower.lowest, zeros)
                    yield Binding(source, self.level_queue(units), key)
                zeros += lower.width
            key = self._pattern(Level(0, 0), 0, zeros)
            yield Binding(source, self.delivery_exchange, key, to_exchange=True)

    def _pattern(self, level: Level, value: int, zeros: int) -> str:
        """*value* in the bits of *level*, *zeros* zeros before it, anything elsewhere."""
        above = self.bit_count - zeros - level.width - level.lowest
        bits = f"{value:0{level.width}b}" if level.width else ""
        return ".".join(["*"] * above + ["0"] * zeros + [*bits] + ["*"] * level.lowest + ["#"])


def _landing_arguments(dead_letter_exchange: str) -> dict[str, Any]:
    return {
        "x-queue-type": "quorum",
        "x-queue-leader-locator": "balanced",
        "x-message-ttl": 0,
        "x-dead-letter-exchange": dead_letter_exchange,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
