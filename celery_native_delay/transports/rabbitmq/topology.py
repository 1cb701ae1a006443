"""Compute the names and arguments of the queues in which delayed messages wait on RabbitMQ.

A delay is a binary number of units of 125 ms. The lowest 15 bits form groups: bits 0-2, 3-6, 7-10
and 11-14. A group has one queue with
a TTL for each nonzero value of its bits. Each higher bit has one queue with a TTL. So a message
waits at most once per group and once per higher bit.

Example: a delay of 10 units is 8 + 2 units. Bit 3 (8 units) and bit 1 (2 units) belong to different
groups. So a message waits 8 units in one queue, then 2 units in another queue.

The routing key begins with one word per bit, the highest bit first. The other words encode the
destination (exchange and routing key). When a TTL ends, the queue dead-letters the message to a
topic exchange. The bindings of this exchange match the bits of the remaining delay, and lead to the
next queue. If no delay remains, a binding leads to the delivery exchange. The delivery exchange
routes the due message to the user's queues by the encoded destination.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from ...due_time import milliseconds_up
from ...settings import TTL_EXTRA_MS, DelaySettings, lowest_bit
from .address import SHORTSTR_BYTES, hashed_address, message_address, queue_address, short_word

#: Only this module decides names, arguments and binding keys on the broker. The module does no I/O,
#: reads no clock, and imports only the standard library. A change to ``plan()`` needs a new
#: VERSION, because production brokers hold the old declarations (tests/unit/golden).
VERSION = "v1"

#: What follows the version in the names of queues and exchanges.
_PARTS = r"(parked$|\d+x\d+ms\.)"
_OURS = re.compile(rf"[A-Za-z0-9._-]+\.{VERSION}\.{_PARTS}")

#: A quorum queue drops a message that was returned more often than its delivery limit. RabbitMQ 4
#: has a limit of 20. Before 4.0 a negative limit meant 0, so this limit is a very high number.
#: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling
_NO_DELIVERY_LIMIT = 1_000_000


@dataclass(frozen=True)
class Exchange:
    name: str
    type: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Queue:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Binding:
    """A binding to declare on the broker."""

    source: str
    destination: str
    routing_key: str
    to_exchange: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Unbinding:
    """A binding to remove from the broker."""

    source: str
    destination: str
    routing_key: str


Declaration = Exchange | Queue | Binding
Change = Declaration | Unbinding


@dataclass(frozen=True)
class Hop:
    """A delay queue: its name, and the milliseconds by which it delays a message."""

    queue: str
    delay_ms: int

    @cached_property
    def ttl_ms(self) -> int:
        """Return the TTL of the queue in milliseconds, which is slightly longer than the delay."""
        return self.delay_ms + TTL_EXTRA_MS

    @cached_property
    def entry(self) -> str:
        """Return the name of the fanout exchange to which the delay queue is bound."""
        return f"{self.queue}.entry"


@dataclass(frozen=True)
class Level:
    """The delay queues for one or more adjacent bits of a delay in binary notation."""

    #: The number of the lowest bit.
    lowest: int
    #: The number of bits.
    width: int

    @property
    def steps(self) -> range:
        """Return the delays of the level's queues, in units of 125 ms."""
        unit = 1 << self.lowest
        return range(unit, unit << self.width, unit)


@lru_cache(maxsize=1024)  # a worker asks for each queue that a message has passed
def is_delay_name(name: str) -> bool:
    """Return True if a queue or exchange name belongs to this package."""
    return _OURS.match(name) is not None


class Topology:
    """Computes the names and declarations of the delay queues for the given settings."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings
        self.resolution_ms = settings.resolution_ms
        self.bit_count = settings.levels
        self.max_units = (1 << self.bit_count) - 1
        #: For each bit of a delay, the lowest bit of its delay level.
        self._lowest_bits = [
            lowest_bit(bit, fused_bits=settings.fused_bits) for bit in range(self.bit_count)
        ]
        self._hops: dict[int, Hop] = {}
        self.space = f"{settings.namespace}.{VERSION}"
        self.name = (
            f"{self.space}.{settings.levels}x{settings.resolution_ms}ms"
            f".f{settings.fused_bits}.quorum"
        )
        self.parking_exchange = self.parking_queue = f"{self.space}.parked"
        self.rescue_lock_queue = f"{self.space}.rescue-lock"
        self.rescue_pause_queue = f"{self.space}.rescue-pause"
        self.delivery_exchange = f"{self.name}.delivery"
        self.ready_exchange = f"{self.name}.ready"

    # --- names ---------------------------------------------------------------------------

    def is_left_over(self, queue: str) -> bool:
        """Return True for a queue of this namespace that another release or layout has declared."""
        namespace = re.escape(self.settings.namespace)
        kept = queue == self.parking_queue or queue.startswith(f"{self.name}.")
        return not kept and re.match(rf"{namespace}\.v\d+\.{_PARTS}", queue) is not None

    def level_exchange(self, bit: int) -> str:
        """Return the name of the topic exchange through which messages enter a level.

        A level is a group of adjacent bits of the delay; *bit* is the group's lowest bit. The
        exchange routes each message to a delay queue of this level. If all bits of the group are 0,
        the exchange routes the message to a lower level.
        """
        return f"{self.name}.level-{bit:02d}"

    def level_queue(self, units: int) -> str:
        """Return the name of the delay queue that a message with this delay enters first."""
        return self._first_hop(units).queue

    def landing_queue(self, exchange: str) -> str:
        """Return the name of the queue that dead-letters due messages to a user's exchange."""
        return f"{self.name}.landing-exchange.{short_word(exchange)}"

    def is_landing(self, queue: str) -> bool:
        return queue.startswith(f"{self.name}.landing-")

    def landing_marker(self, exchange: str) -> str:
        """Return the name of the marker exchange for the landing queue of *exchange*.

        A marker exchange carries no messages. Its existence tells producers that *exchange* has a
        landing queue. A landing queue dead-letters due messages to the exchange.
        """
        return f"{self.name}.lands.{short_word(exchange)}"

    def copied_marker(self, exchange: str) -> str:
        """Return the name of the marker exchange for the copied bindings of *exchange*.

        If the marker exchange exists, producers know that the delivery exchange has copies of the
        bindings of *exchange*.
        """
        return f"{self.name}.mirrored.{short_word(exchange)}"

    @cached_property
    def diverted_marker(self) -> str:
        """The name of the marker exchange that exists if any queue has a landing queue."""
        return f"{self.name}.diverted"

    def queue_landing_queue(self, queue: str) -> str:
        """Return the name of the queue that dead-letters due messages to *queue*."""
        return f"{self.name}.landing-queue.{short_word(queue)}"

    @cached_property
    def levels(self) -> list[Level]:
        bits = [*sorted(set(self._lowest_bits)), self.bit_count]
        return [Level(bit, above - bit) for bit, above in pairwise(bits)]

    @cached_property
    def level_queues(self) -> list[Hop]:
        return [self._first_hop(units) for level in self.levels for units in level.steps]

    # --- routing keys --------------------------------------------------------------------

    def entry_exchange(self, units: int) -> str:
        """Return the exchange to which a producer publishes a message with this delay."""
        # A topic exchange would compare all words of the routing key, which takes a quarter of the
        # time of a confirmed publish (RabbitMQ 3.10).
        return self._first_hop(units).entry if units else self.delivery_exchange

    def first_ttl_ms(self, units: int, *, remaining_us: int) -> int:
        """Return the milliseconds that a message waits in its first delay queue.

        *units* is the delay *remaining_us*, rounded up to units of 125 ms.
        In all its delay queues together, the message waits *remaining_us* plus 1 ms
        (TTL_EXTRA_MS). For a message that is already due, *units* is 1, and the result is 1 ms.
        """
        # The rounding is less than a unit, so an earlier message in the queue delays a later
        # message by hardly more than a unit.
        # https://www.rabbitmq.com/docs/ttl#per-message-ttl-in-publishers
        _, *later = self.path(units)
        wait_ms = milliseconds_up(remaining_us) + TTL_EXTRA_MS
        return max(1, wait_ms - sum(hop.ttl_ms for hop in later))

    def routing_key(self, units: int, address: str) -> str:
        """Return a delayed message's routing key: the bits of the delay, then the destination."""
        self._check(units)
        return ".".join((*f"{units:0{self.bit_count}b}", address))

    def path(self, units: int) -> list[Hop]:
        """Return the delay queues through which a message with this delay passes."""
        self._check(units)
        hops = []
        while units:
            hop = self._first_hop(units)
            hops.append(hop)
            units -= hop.delay_ms // self.resolution_ms
        return hops

    # --- addresses -----------------------------------------------------------------------

    def fits(self, address: str) -> bool:
        """Return True if the encoded destination *address* fits into a routing key."""
        return 2 * self.bit_count + len(address.encode()) <= SHORTSTR_BYTES

    def address(self, exchange: str, routing_key: str) -> str:
        """Encode a destination for a delayed message's routing key; hash a long destination."""
        address = message_address(exchange, routing_key)
        return address if self.fits(address) else hashed_address(exchange, routing_key)

    def delivery_pattern(self, address: str) -> str:
        """Return a binding key that matches every delay and one destination."""
        # One * for each delay bit. With a # instead, RabbitMQ would try every suffix, and would
        # also match longer addresses (rabbit_db_topic_exchange.erl).
        return "*." * self.bit_count + address

    def own_pattern(self, queue: str) -> str:
        """Return a binding key that matches the messages of the landing queue of *queue*."""
        return self.delivery_pattern(queue_address(queue))

    def collides(self, routing_key: str) -> bool:
        """Return True if a user's routing key looks like this package's routing keys."""
        # If this package's routing key is in the header BCC, RabbitMQ routes by both routing keys.
        words = routing_key.split(".")
        if len(words) < self.bit_count:
            return False
        return not {"0", "1"}.isdisjoint(words[: self.bit_count]) or any(
            word.startswith("%") for word in words[self.bit_count : self.bit_count + 1]
        )

    # --- declarations --------------------------------------------------------------------

    def plan(self) -> Iterator[Declaration]:
        """Yield the queues, exchanges and bindings for delayed messages, in declaration order."""
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
        # Without an alternate exchange, 32 messages for which no queue is bound block a delay
        # level. At-least-once dead-lettering retries each of these messages, and has room for 32.
        # https://github.com/Particular/NServiceBus.RabbitMQ/issues/1407
        parks = {"alternate-exchange": self.parking_exchange}
        yield Exchange(self.delivery_exchange, "topic", parks)
        # The top level needs no exchange, because messages only enter its queues directly.
        for level in self.levels[:-1]:
            yield Exchange(self.level_exchange(level.lowest), "topic", parks)
        below = self.delivery_exchange
        for level in self.levels:
            for units in level.steps:
                hop = self._first_hop(units)
                # No alternate exchange: a message has an expiration until it leaves its first
                # queue, and would expire in the parking queue. Publishers use mandatory instead.
                yield Exchange(hop.entry, "fanout")
                yield Queue(hop.queue, self._level_arguments(hop.ttl_ms, below))
                yield Binding(hop.entry, hop.queue, "")
            below = self.level_exchange(level.lowest)
        yield from self._bindings()
        yield Exchange(self.ready_exchange, "fanout")

    def landing(self, exchange: str) -> Queue:
        """Return the queue that dead-letters due messages to the user's *exchange*."""
        # If *exchange* has no queue for a message, the message blocks only this queue.
        return Queue(self.landing_queue(exchange), _landing_arguments(exchange))

    def queue_landing(self, queue: str) -> Queue:
        """Return the queue that dead-letters due messages to *queue*."""
        arguments = _landing_arguments(self.delivery_exchange)
        arguments["x-dead-letter-routing-key"] = self.routing_key(0, queue_address(queue))
        return Queue(self.queue_landing_queue(queue), arguments)

    def _check(self, units: int) -> None:
        if not 0 <= units <= self.max_units:
            raise ValueError(f"expected 0 to {self.max_units} units, got {units}")

    def _first_hop(self, units: int) -> Hop:
        """Return the first delay queue in which a message with this delay waits."""
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
        # Expired messages leave a queue only from its head. So all messages of a queue must have
        # nearly the same TTL (see first_ttl_ms()). https://www.rabbitmq.com/docs/ttl
        # Without the locator one node would lead all queues. Without reject-publish, RabbitMQ uses
        # at-most-once instead of at-least-once.
        # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
        return {
            "x-queue-type": "quorum",
            "x-message-ttl": ttl_ms,
            "x-dead-letter-exchange": dead_letter_exchange,
            "x-queue-leader-locator": "balanced",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }

    def _bindings(self) -> Iterator[Binding]:
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
        """Return a binding key for delays with *value* in the bits of *level*.

        *zeros* is the number of bits that must be 0, directly above *level*. All other bits may
        have any value.
        """
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
