"""The delay levels of RabbitMQ: every name, TTL, routing key and binding.

Rule 1: every name, argument and binding pattern on the broker is decided here.
Rule 2: no I/O, no clock; nothing imported but the standard library.
Rule 3: a change in what ``plan()`` yields is a new VERSION, never an edit: brokers in production
hold these declarations (tests/unit/golden).

A delay is a number of units of the resolution, in binary: one word of the routing key for each bit,
the most significant first. A high bit is a level of its own, with one queue, whose TTL is the bit's
value. Four low bits together (the lowest: three) are a level with one queue for each of their
values but 0. Every message passes the low bits, so four of them cost one hop, and 15 queues share
the load (``DelaySettings.fused_bits``).

A message enters the queue of its highest level that is not zero. When it expires, the queue
dead-letters it to the exchange of the next lower level, which routes it to the next queue that it
waits in. The last exchange is the delivery exchange. There the words behind the bits, the address
(``address.py``), lead to the destination queue.
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

#: A quorum queue drops a message that was returned more often; RabbitMQ 4 sets the limit to 20.
#: Before 4.0 a negative limit meant 0, so the limit is a very high one.
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
    """A binding of a queue to remove; it need not exist."""

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
    """A delay level: *width* bits of the delay, from *lowest* on."""

    lowest: int
    width: int

    @property
    def steps(self) -> range:
        """The delays of the level's queues, in units."""
        unit = 1 << self.lowest
        return range(unit, unit << self.width, unit)


def is_delay_name(name: str) -> bool:
    """True if this is a name of a queue or exchange of this package, in any namespace."""
    return _OURS.match(name) is not None


class Topology:
    """The delay levels for *settings*, as data."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings
        self.resolution_ms = settings.resolution_ms
        self.bit_count = settings.levels
        self.max_units = (1 << self.bit_count) - 1
        #: For each bit, the lowest bit of its level.
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
        """The exchange of a level: messages arrive there after waiting for all higher bits.

        *bit* is the lowest bit of the level.
        """
        return f"{self.name}.level-{bit:02d}"

    def level_queue(self, units: int) -> str:
        """The first level queue of a message that waits *units*, more than 0."""
        return self._first_hop(units).queue

    def landing_queue(self, exchange: str) -> str:
        """The landing queue of a user's exchange."""
        return f"{self.name}.landing-exchange.{short_word(exchange)}"

    def is_landing(self, queue: str) -> bool:
        """True if *queue* is a landing queue, of an exchange or of a queue."""
        return queue.startswith(f"{self.name}.landing-")

    def landing_marker(self, exchange: str) -> str:
        """The marker exchange: if it exists, messages to *exchange* use its landing queue."""
        return f"{self.name}.lands.{short_word(exchange)}"

    def copied_marker(self, exchange: str) -> str:
        """The marker exchange: if it exists, consumers of *exchange* copy their bindings."""
        return f"{self.name}.mirrored.{short_word(exchange)}"

    def queue_landing_queue(self, queue: str) -> str:
        """The landing queue of a user's queue whose x-overflow may reject messages."""
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
        """The exchange that a delayed message is published to, in front of its first level queue.

        It is a fanout exchange for each level queue. A topic exchange would compare all words of
        the key: a quarter of the time of a confirmed publish on RabbitMQ 3.10.
        """
        return self._first_hop(units).entry if units else self.delivery_exchange

    def first_ttl_ms(self, units: int, *, remaining_us: int) -> int:
        """The expiration in front of the first queue: its TTL, less the rounding up to *units*.

        RabbitMQ takes the lower of the queue's TTL and the message's, and removes the latter at the
        first hop. The two differ by less than a unit. So a message waits less than a unit for one
        before it in the queue, and never longer than without an expiration.
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
        """The level queues that a message waits in, in order; their TTLs add up to its delay.

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
        """The binding key on the delivery exchange for *address*, with any delay before it.

        It has one ``*`` for each bit. A ``#`` would match longer addresses with the same ending,
        and RabbitMQ would try every suffix (rabbit_db_topic_exchange.erl).
        """
        return "*." * self.bit_count + address

    def collides(self, routing_key: str) -> bool:
        """True if a user's routing key could be taken for one of ours.

        Messages for a landing queue keep their own key, and have ours in the header BCC. The level
        and delivery exchanges route by both.
        """
        words = routing_key.split(".")
        if len(words) < self.bit_count:
            return False
        return not {"0", "1"}.isdisjoint(words[: self.bit_count]) or any(
            word.startswith("%") for word in words[self.bit_count : self.bit_count + 1]
        )

    # --- declarations --------------------------------------------------------------------

    def plan(self) -> Iterator[Declaration]:
        """Every declaration of the levels, in an order that the broker accepts."""
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
        # Without an alternate exchange, 32 messages for which no queue is bound block a level:
        # at-least-once dead-lettering retries each of them, and has room for 32.
        # https://github.com/Particular/NServiceBus.RabbitMQ/issues/1407
        parks = {"alternate-exchange": self.parking_exchange}
        yield Exchange(self.delivery_exchange, "topic", parks)
        # The top level needs no exchange: messages only enter its queues directly.
        for level in self.levels[:-1]:
            yield Exchange(self.level_exchange(level.lowest), "topic", parks)
        below = self.delivery_exchange
        for level in self.levels:
            for units in level.steps:
                hop = self._first_hop(units)
                # No alternate exchange: a message has an expiration until its first hop, and would
                # expire in the parking queue. Publishers use mandatory instead.
                yield Exchange(hop.entry, "fanout")
                yield Queue(hop.queue, self._level_arguments(hop.ttl_ms, below))
                yield Binding(hop.entry, hop.queue, "")
            below = self.level_exchange(level.lowest)
        yield from self._bindings()
        yield Exchange(self.ready_exchange, "fanout")

    def landing(self, exchange: str) -> Queue:
        """The landing queue of *exchange*: it dead-letters each message to *exchange* at once.

        The message keeps its own routing key. If *exchange* has no queue for it, the message blocks
        this queue and not a delay level.
        """
        return Queue(self.landing_queue(exchange), _landing_arguments(exchange))

    def queue_landing(self, queue: str) -> Queue:
        """The landing queue in front of *queue*: messages that *queue* rejects wait in it."""
        arguments = _landing_arguments(self.delivery_exchange)
        arguments["x-dead-letter-routing-key"] = self.routing_key(0, queue_address(queue))
        return Queue(self.queue_landing_queue(queue), arguments)

    def _out_of_reach(self, units: int) -> ValueError:
        return ValueError(f"expected 0 to {self.max_units} units, got {units}")

    def _first_hop(self, units: int) -> Hop:
        """The first level queue for *units*, more than 0: that of their highest level."""
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
        # Expired messages leave a queue only from its head, so all messages of a queue must have
        # the same TTL, up to the unit that first_ttl_ms() subtracts. https://www.rabbitmq.com/docs/ttl
        arguments = {
            "x-queue-type": self.settings.queue_type,
            "x-message-ttl": ttl_ms,
            "x-dead-letter-exchange": dead_letter_exchange,
        }
        if self.settings.queue_type == "quorum":
            # Without the locator one node would lead all queues; 3.10 refuses it on classic ones.
            # Without reject-publish, RabbitMQ uses at-most-once instead of at-least-once.
            # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
            arguments |= {
                "x-queue-leader-locator": "balanced",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        return arguments

    def _bindings(self) -> Iterator[Binding]:
        """The bindings from each level's exchange to its queues, all lower ones, and delivery."""
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
        """A topic pattern: *value* in the bits of *level*, *zeros* zeros before, any other bits."""
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
