"""The delay levels of RabbitMQ (queues with a TTL): every name, TTL, routing key and binding.

Rule 1: this module decides every name, argument and binding pattern on the broker. Rule 2: this
module does no I/O, reads no clock, and imports only the standard library. Rule 3: a change in what
``plan()`` yields needs a new VERSION, because brokers in production hold these declarations
(tests/unit/golden).

A delay is a number of units of the resolution, in binary. The routing key has one word for each
bit, the most significant bit first. A high bit is a level with one queue, whose TTL is the bit's
value. The lowest four bits together (or the lowest three) are one level, with one queue for each of
their values except 0. Every message passes the low bits. So four low bits cost one queue per
message, and 15 queues share the load (``DelaySettings.fused_bits``).

A message enters the queue of its highest level that is not zero. When the message expires, the
queue dead-letters it to the exchange of the next lower level. That exchange routes the message to
the next queue in which the message waits. The last exchange is the delivery exchange. There the
words behind the bits, the address (``address.py``), lead to the destination queue.
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
    """A binding to make, from *source* to a queue, or to an exchange if *to_exchange* is True."""

    source: str
    destination: str
    routing_key: str
    to_exchange: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Unbinding:
    """A binding of a queue to remove; the binding need not exist."""

    source: str
    destination: str
    routing_key: str


Declaration = Exchange | Queue | Binding
Change = Declaration | Unbinding


@dataclass(frozen=True)
class Hop:
    """One wait of a message in a delay level (a queue with a TTL)."""

    queue: str
    ttl_ms: int

    @cached_property
    def entry(self) -> str:
        """Return the name of the fanout exchange in front of the queue."""
        return f"{self.queue}.entry"


@dataclass(frozen=True)
class Level:
    """One or more queues with a TTL, for the *width* bits of a delay from bit *lowest* on."""

    lowest: int
    width: int

    @property
    def steps(self) -> range:
        """Return the TTLs of the level's queues, in units of the resolution."""
        unit = 1 << self.lowest
        return range(unit, unit << self.width, unit)


def is_delay_name(name: str) -> bool:
    """Return True if *name* is a queue or exchange of this package, in any namespace."""
    return _OURS.match(name) is not None


class Topology:
    """Every name, queue, exchange and binding of the delay levels (queues with a TTL), as data."""

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
            f".f{settings.fused_bits}.{settings.queue_type}"
        )
        self.parking_exchange = self.parking_queue = f"{self.space}.parked"
        self.rescue_lock_queue = f"{self.space}.rescue-lock"
        self.delivery_exchange = f"{self.name}.delivery"
        self.ready_exchange = f"{self.name}.ready"

    # --- names ---------------------------------------------------------------------------

    def level_exchange(self, bit: int) -> str:
        """Return the exchange that messages reach after waiting for all bits above *bit*."""
        return f"{self.name}.level-{bit:02d}"

    def level_queue(self, units: int) -> str:
        """Return the first queue in which a message with a delay of *units* (not 0) waits."""
        return self._first_hop(units).queue

    def landing_queue(self, exchange: str) -> str:
        """Return the name of the queue that passes due messages on to a user's exchange."""
        return f"{self.name}.landing-exchange.{short_word(exchange)}"

    def is_landing(self, queue: str) -> bool:
        return queue.startswith(f"{self.name}.landing-")

    def landing_marker(self, exchange: str) -> str:
        """Return a marker exchange: if it exists, messages to *exchange* use its landing queue.

        A landing queue passes due messages on to the user's exchange.
        """
        return f"{self.name}.lands.{short_word(exchange)}"

    def copied_marker(self, exchange: str) -> str:
        """Return the exchange whose existence says: consumers copy bindings of *exchange*."""
        return f"{self.name}.mirrored.{short_word(exchange)}"

    def queue_landing_queue(self, queue: str) -> str:
        """Return the landing queue of a user's queue whose x-overflow may reject messages.

        A landing queue passes due messages on to the user's queue.
        """
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
        """Return the fanout exchange to which producers publish a message that waits *units*.

        A topic exchange would compare all words of the routing key. That takes a quarter of the
        time of a confirmed publish on RabbitMQ 3.10.
        """
        return self._first_hop(units).entry if units else self.delivery_exchange

    def first_ttl_ms(self, units: int, *, remaining_us: int) -> int:
        """Return the expiration in milliseconds with which a delayed message is published.

        The expiration is the first queue's TTL, less the rounding of the delay up to *units*.
        RabbitMQ takes the lower of the queue's TTL and the message's expiration. RabbitMQ removes
        the expiration when the message leaves the first queue. TTL and expiration differ by less
        than a unit. So a message waits less than a unit for an earlier message in the queue.
        https://www.rabbitmq.com/docs/ttl#per-message-ttl-in-publishers
        """
        ttl_ms = self._first_hop(units).ttl_ms
        excess_us = units * self.resolution_ms * 1000 - remaining_us
        return max(1, -(-(ttl_ms * 1000 - excess_us) // 1000))

    def routing_key(self, units: int, address: str) -> str:
        """Return the routing key of a message that waits *units* and then goes to *address*.

        Raises ValueError if *units* is not in ``0..max_units``.
        """
        if not 0 <= units <= self.max_units:
            raise self._out_of_reach(units)
        return ".".join((*f"{units:0{self.bit_count}b}", address))

    def path(self, units: int) -> list[Hop]:
        """Return, in order, the queues in which a message with a delay of *units* waits.

        Raises ValueError if *units* is not in ``0..max_units``.
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
        """Return True if a routing key (255 bytes) can hold the delay and *address*."""
        return 2 * self.bit_count + len(address.encode()) <= SHORTSTR_BYTES

    def address(self, exchange: str, routing_key: str) -> str:
        """Return the routing key's end that names the destination, or its hash if too long."""
        address = message_address(exchange, routing_key)
        return address if self.fits(address) else hashed_address(exchange, routing_key)

    def delivery_pattern(self, address: str) -> str:
        """Return the binding key on the delivery exchange for *address*, for any delay.

        The binding key has one ``*`` for each bit of the delay. A ``#`` would match longer
        addresses with the same ending, and RabbitMQ would try every suffix
        (rabbit_db_topic_exchange.erl).
        """
        return "*." * self.bit_count + address

    def collides(self, routing_key: str) -> bool:
        """Return True if a user's routing key looks like one of our routing keys.

        Messages for a landing queue (which passes due messages on) keep their own routing key, and
        carry our routing key in the header BCC. Our exchanges route by both keys.
        """
        words = routing_key.split(".")
        if len(words) < self.bit_count:
            return False
        return not {"0", "1"}.isdisjoint(words[: self.bit_count]) or any(
            word.startswith("%") for word in words[self.bit_count : self.bit_count + 1]
        )

    # --- declarations --------------------------------------------------------------------

    def plan(self) -> Iterator[Declaration]:
        """Yield every declaration of the delay levels (queues with a TTL), in a valid order."""
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
        """Return the landing queue of *exchange*, which dead-letters due messages to *exchange*.

        The message keeps its own routing key. If *exchange* has no queue for the message, the
        message blocks only this landing queue.
        """
        return Queue(self.landing_queue(exchange), _landing_arguments(exchange))

    def queue_landing(self, queue: str) -> Queue:
        """Return the queue that passes due messages on to *queue*, and keeps rejected ones."""
        arguments = _landing_arguments(self.delivery_exchange)
        arguments["x-dead-letter-routing-key"] = self.routing_key(0, queue_address(queue))
        return Queue(self.queue_landing_queue(queue), arguments)

    def _out_of_reach(self, units: int) -> ValueError:
        return ValueError(f"expected 0 to {self.max_units} units, got {units}")

    def _first_hop(self, units: int) -> Hop:
        """Return the first delay level queue for *units* (more than 0), in their highest level."""
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
        arguments = {
            "x-queue-type": self.settings.queue_type,
            "x-message-ttl": ttl_ms,
            "x-dead-letter-exchange": dead_letter_exchange,
        }
        if self.settings.queue_type == "quorum":
            # Without the locator one node would lead all queues. Classic queues of 3.10 refuse it.
            # Without reject-publish, RabbitMQ uses at-most-once instead of at-least-once.
            # https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
            arguments |= {
                "x-queue-leader-locator": "balanced",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        return arguments

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
        """Return a topic pattern for *value* in the bits of *level*, after *zeros* zeros."""
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
