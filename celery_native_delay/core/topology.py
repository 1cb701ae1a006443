"""The delay levels of RabbitMQ: every name, TTL, routing key and binding.

Rule 1: every name, argument and binding pattern on the broker is decided here.
Rule 2: no I/O, no clock; nothing imported but the standard library.
Rule 3: a change in what ``plan()`` yields is a new VERSION, never an edit: brokers in production
hold these declarations (tests/unit/golden).

A delay is a number of units of the resolution, written in base 2, 4 or 16. Each digit is one
word of the routing key, most significant first; a message waits once for every digit that is not
zero, in a queue whose TTL is that digit's worth. It enters at the queue of its highest one and is
dead-lettered to the exchange of the next lower level. The last is the delivery exchange, where the
words behind the digits, the address (``address.py``), lead to the destination queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .address import SHORTSTR_BYTES, hashed_address, queue_address, short_word
from .ledger_streams import LedgerStreams
from .settings import DelaySettings

VERSION = "v1"

_OURS = re.compile(rf"[A-Za-z0-9._-]+\.{VERSION}\.(parked$|\d+x\d+ms\.)")
_DIGITS = "0123456789abcdef"
_HEX_TO_BASE_4 = str.maketrans({h: f"{i // 4}{i % 4}" for i, h in enumerate(_DIGITS)})

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


def is_delay_name(name: str) -> bool:
    """Whether a queue or exchange of this name is one of ours, in any namespace."""
    return _OURS.match(name) is not None


class Topology:
    """The delay levels that *settings* ask for, as data."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings
        self.base = settings.base
        self.resolution_ms = settings.resolution_ms
        self.max_units = (1 << settings.levels) - 1
        self._hops: dict[tuple[int, int], Hop] = {}
        self._bits = settings.base.bit_length() - 1
        self.digit_count = -(-settings.levels // self._bits)
        base_word = "" if settings.base == 2 else f"b{settings.base}."
        self.space = f"{settings.namespace}.{VERSION}"
        self.name = (
            f"{self.space}.{settings.levels}x{settings.resolution_ms}ms"
            f".{base_word}{settings.queue_type}"
        )
        self.parking_exchange = self.parking_queue = f"{self.space}.parked"
        self.rescue_lock_queue = f"{self.space}.rescue-lock"
        self.delivery_exchange = f"{self.name}.delivery"
        self.ready_exchange = f"{self.name}.{settings.routing}.ready"
        self.ledger = LedgerStreams(self.name, settings)

    # --- names ---------------------------------------------------------------------------

    def level_exchange(self, place: int) -> str:
        """The exchange where messages arrive that have waited for all digits above *place*."""
        return f"{self.name}.level-{place:02d}"

    def level_queue(self, place: int, digit: int = 1) -> str:
        """The queue in which the *digit* at *place* is waited for."""
        suffix = "" if self.base == 2 else f"-{_DIGITS[digit]}"
        return f"{self.level_exchange(place)}{suffix}"

    def landing_queue(self, exchange: str) -> str:
        """The landing queue of a user's exchange."""
        return f"{self.name}.landing-exchange.{short_word(exchange)}"

    def is_landing(self, queue: str) -> bool:
        """Whether *queue* is a landing queue, of an exchange or of a queue."""
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
    def level_queues(self) -> list[Hop]:
        """Every level queue with its TTL, shortest first."""
        return [self._hop(place, digit) for place, digit in self._steps]

    # --- routing keys --------------------------------------------------------------------

    def digits(self, units: int) -> list[int]:
        """The digits of a delay, most significant first.

        Raises:
            ValueError: *units* is not in ``0..max_units``.
        """
        return [int(digit, 16) for digit in self._digit_text(units)]

    def entry_exchange(self, units: int) -> str:
        """Where a message enters: in front of the queue of its highest digit that is not zero.

        A fanout exchange for each level queue, because a topic exchange would walk all words of
        the key first: a quarter of the time that a confirmed publish takes on RabbitMQ 3.10.
        """
        if not units:
            return self.delivery_exchange
        place = (units.bit_length() - 1) // self._bits
        return self._entry(place, units >> self._bits * place)

    def first_ttl_ms(self, units: int, *, remaining_us: int) -> int | None:
        """The expiration that makes up for rounding *remaining_us* up to *units*, or None.

        RabbitMQ takes the lower of the queue's TTL and the message's, and drops the latter at the
        first hop. In one queue the two differ by less than a unit, so a message behind one that
        expires later waits less than a unit for it: never longer than without.
        https://www.rabbitmq.com/docs/ttl#per-message-ttl-in-publishers
        """
        place = (units.bit_length() - 1) // self._bits
        ttl_ms = self._hop(place, units >> self._bits * place).ttl_ms
        excess_us = units * self.resolution_ms * 1000 - remaining_us
        shortened_ms = max(1, -(-(ttl_ms * 1000 - excess_us) // 1000))
        return shortened_ms if shortened_ms < ttl_ms else None

    def routing_key(self, units: int, address: str) -> str:
        """The routing key of a message that waits *units* and then goes to *address*."""
        return f"{'.'.join(self._digit_text(units))}.{address}"

    def path(self, units: int) -> list[Hop]:
        """The waits of a message, in order; their TTLs add up to its delay."""
        digits = self.digits(units)
        return [
            self._hop(self.digit_count - 1 - index, digit)
            for index, digit in enumerate(digits)
            if digit
        ]

    # --- addresses -----------------------------------------------------------------------

    def fits(self, address: str) -> bool:
        """Whether *address* fits into a routing key behind the digits."""
        return 2 * self.digit_count + len(address.encode()) <= SHORTSTR_BYTES

    def address_or_hash(self, address: str, exchange: str, routing_key: str) -> str:
        """*address*, or its hash where it does not fit behind the digits."""
        return address if self.fits(address) else hashed_address(exchange, routing_key)

    def delivery_pattern(self, address: str) -> str:
        """The binding key on the delivery exchange for *address*: any delay, then exactly it.

        One ``*`` for each digit and no leading ``#``, which would match addresses that merely
        end alike and makes the broker try every suffix (rabbit_db_topic_exchange.erl).
        """
        return "*." * self.digit_count + address

    def collides(self, routing_key: str) -> bool:
        """Whether a user's own key, travelling beside ours, could be taken for one of ours.

        Messages for a landing queue keep their own key and carry ours as BCC; the level and
        delivery exchanges look at both.
        """
        words = routing_key.split(".")
        if len(words) < self.digit_count:
            return False
        ours = set(_DIGITS[: self.base])
        return bool(ours.intersection(words[: self.digit_count])) or any(
            word.startswith("%") for word in words[self.digit_count : self.digit_count + 1]
        )

    # --- declarations --------------------------------------------------------------------

    def plan(self) -> Iterator[Declaration]:
        """Every declaration of the set, in an order the broker accepts."""
        yield from self.levels_plan()
        if self.settings.streams_ledger:
            yield from self.ledger_plan()

    def ledger_plan(self) -> Iterator[Declaration]:
        """The streams of a ledger: by themselves, as messages wait without them, too."""
        yield Exchange(self.ledger.exchange, "direct")
        for stream in self.ledger.streams:
            yield Queue(stream.name, stream.arguments)
            yield Binding(self.ledger.exchange, stream.name, stream.name)
        yield Exchange(self.ledger.ready_exchange, "fanout")

    def levels_plan(self) -> Iterator[Declaration]:
        """All that messages need to wait."""
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
        # Without an alternate exchange 32 messages that nobody is bound for stop a level for
        # everyone: at-least-once dead-lettering retries each of them and has 32 places.
        # https://github.com/Particular/NServiceBus.RabbitMQ/issues/1407
        parks = {"alternate-exchange": self.parking_exchange}
        yield Exchange(self.delivery_exchange, "topic", parks)
        for place in self._places_below_top:
            yield Exchange(self.level_exchange(place), "topic", parks)
        for place, digit in self._steps:
            hop, entry = self._hop(place, digit), self._entry(place, digit)
            # No alternate exchange: a message carries an expiration until its first hop, and
            # would expire in the parking queue. Publishing is mandatory instead.
            yield Exchange(entry, "fanout")
            yield Queue(hop.queue, self._level_arguments(hop.ttl_ms, self._below(place)))
            yield Binding(entry, hop.queue, "")
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

    # --- private -------------------------------------------------------------------------

    def _digit_text(self, units: int) -> str:
        if not 0 <= units <= self.max_units:
            raise ValueError(f"expected 0 to {self.max_units} units, got {units}")
        if self.base == 4:
            text = f"{units:x}".translate(_HEX_TO_BASE_4)
            return text.zfill(self.digit_count)[-self.digit_count :]
        return f"{units:0{self.digit_count}{'b' if self.base == 2 else 'x'}}"

    @property
    def _steps(self) -> Iterator[tuple[int, int]]:
        """Every place and digit that a delay below the longest one can hold."""
        for place in range(self.digit_count):
            yield from ((place, digit) for digit in self._digits_at(place))

    def _digits_at(self, place: int) -> range:
        return range(1, min(self.base - 1, self.max_units >> self._bits * place) + 1)

    def _hop(self, place: int, digit: int) -> Hop:
        hop = self._hops.get((place, digit))
        if hop is None:
            units = digit << self._bits * place
            hop = Hop(self.level_queue(place, digit), self.resolution_ms * units)
            self._hops[place, digit] = hop
        return hop

    @property
    def _places_below_top(self) -> range:
        """Where messages come from a higher place; nothing is above the top one."""
        return range(self.digit_count - 1)

    def _entry(self, place: int, digit: int) -> str:
        return f"{self._hop(place, digit).queue}.entry"

    def _below(self, place: int) -> str:
        return self.level_exchange(place - 1) if place else self.delivery_exchange

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
        for place in self._places_below_top:
            source = self.level_exchange(place)
            if self.settings.routing == "chain":
                yield from self._to_queues(source, place, zeros=0)
                yield self._onwards(source, self._below(place), place, zeros=1)
            else:
                for lower in range(place, -1, -1):
                    yield from self._to_queues(source, lower, zeros=place - lower)
                yield self._onwards(source, self.delivery_exchange, 0, zeros=place + 1)

    def _to_queues(self, source: str, place: int, *, zeros: int) -> Iterator[Binding]:
        for digit in self._digits_at(place):
            key = self._pattern(place, _DIGITS[digit], zeros)
            yield Binding(source, self.level_queue(place, digit), key)

    def _onwards(self, source: str, destination: str, place: int, *, zeros: int) -> Binding:
        key = self._pattern(place, "0", zeros - 1)
        return Binding(source, destination, key, to_exchange=True)

    def _pattern(self, place: int, digit: str, zeros: int) -> str:
        """*digit* at *place*, *zeros* zeros before it, anything elsewhere."""
        above = self.digit_count - 1 - place - zeros
        return ".".join(["*"] * above + ["0"] * zeros + [digit] + ["*"] * place + ["#"])


def _landing_arguments(dead_letter_exchange: str) -> dict[str, Any]:
    return {
        "x-queue-type": "quorum",
        "x-queue-leader-locator": "balanced",
        "x-message-ttl": 0,
        "x-dead-letter-exchange": dead_letter_exchange,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
