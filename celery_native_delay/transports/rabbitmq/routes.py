"""Decide how due messages reach the queues of a user's exchange.

Either this package copies the exchange's bindings to the delivery exchange, or a landing queue
dead-letters due messages to the user's exchange.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from time import monotonic

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed

from ...errors import CannotDelay
from .address import message_address
from .declaring import WRONG_ARGUMENT, Declarer, not_declared, refusals_explained
from .mirror import (
    BUILTIN_TYPES,
    HASHING_TYPES,
    MIRRORED_TYPES,
    Mirror,
    landing_declarations,
    remember,
)

logger = logging.getLogger(__name__)

#: Seconds for which a connection remembers the type and the marker exchanges of an exchange.
ROUTE_SECONDS = 60.0

#: Exchange types that are tried in turn. Any other type counts as "", and gets a landing queue. A
#: plugin's type is not tried: if the plugin is off, that closes the connection.
ASKED_TYPES = ("direct", "topic", "fanout", "headers")


@dataclass(frozen=True)
class _KnownExchange:
    """Cached facts about an exchange of the user."""

    #: True if messages need a landing queue, which dead-letters due messages to the exchange.
    needs_landing: bool
    #: True if consumers have copied the bindings of the exchange.
    mirrored: bool
    #: The expiry of the facts, in seconds of the monotonic clock.
    until: float


class Routes:
    """Decides and caches how delayed messages reach the user's exchanges."""

    def __init__(self, mirror: Mirror, declarer: Declarer) -> None:
        self._topology = declarer.topology
        self._mirror = mirror
        self._declarer = declarer
        self._known: dict[str, _KnownExchange] = {}
        self._reached: dict[tuple[str, str], None] = {}
        self._landings: dict[str, bool] = {}
        self._version = mirror.version

    def prepare(self, exchange: str, routing_key: str) -> bool:
        """Prepare the way of due messages; return True if it leads through a landing queue.

        A landing queue dead-letters due messages to *exchange*.
        """
        if not exchange:
            return False
        if self._version != self._mirror.version:
            self.forget()
        known = self._known.get(exchange)
        if known is None or known.until < monotonic():
            if known is not None:
                self._look_again(exchange)
            known = self._ask_about(exchange)
            remember(self._known, exchange, known)
        if (exchange, routing_key) in self._reached:
            return False
        if known.needs_landing or self._is_too_long(exchange, routing_key):
            self._require_landing(exchange)
            return True
        if self._mirror.reaches(exchange, routing_key):
            remember(self._reached, (exchange, routing_key), None)
            return False
        return not known.mirrored and self._declare_landing(exchange)

    def forget(self) -> None:
        """Clear the cache, because an exchange may have changed."""
        self._version = self._mirror.version
        self._known.clear()
        self._reached.clear()
        self._landings.clear()

    def exists(self, exchange: str) -> bool:
        try:
            self.type_of(exchange)
        except NotFound:
            return False
        return True

    def type_of(self, exchange: str) -> str:
        """Return the type of *exchange*, from the cache or the broker."""
        kind = self._mirror.types.get(exchange)
        if kind is None:
            kind = self._ask_type(exchange)
        self._mirror.remember_type(exchange, kind)
        return kind

    def _look_again(self, exchange: str) -> None:
        kind = self.type_of(exchange)
        if kind in ASKED_TYPES and exchange not in BUILTIN_TYPES:
            self._mirror.remember_type(exchange, self._ask_type(exchange, likely=kind))
        for reached in [reached for reached in self._reached if reached[0] == exchange]:
            del self._reached[reached]

    def _ask_about(self, exchange: str) -> _KnownExchange:
        until = monotonic() + ROUTE_SECONDS
        self._declarer.check_name(exchange)
        kind = self.type_of(exchange)
        if kind in HASHING_TYPES:
            raise CannotDelay(
                f"a delayed message cannot go to exchange {exchange!r} of type {kind}, which "
                f"hashes its routing key: delay it to a queue, or to a topic exchange"
            )
        topology = self._topology
        listed = exchange in topology.settings.landing
        if listed or kind not in MIRRORED_TYPES:
            return _KnownExchange(needs_landing=True, mirrored=False, until=until)
        if self._declarer.has_exchange(topology.landing_marker(exchange), if_refused=False):
            return _KnownExchange(needs_landing=True, mirrored=False, until=until)
        # A user who may not ask for the exchange may not declare a landing queue either.
        mirrored = self._declarer.has_exchange(topology.copied_marker(exchange), if_refused=True)
        return _KnownExchange(needs_landing=False, mirrored=mirrored, until=until)

    def _is_too_long(self, exchange: str, routing_key: str) -> bool:
        return self._mirror.types[exchange] == "topic" and not self._topology.fits(
            message_address(exchange, routing_key)
        )

    def _require_landing(self, exchange: str) -> None:
        if self._declare_landing(exchange):
            return
        if not self._topology.settings.declare:
            del self._landings[exchange]  # to ask for it again next time
            landing = self._topology.landing_queue(exchange)
            raise not_declared(f"{landing}, the landing queue of exchange {exchange!r}, is missing")
        with refusals_explained(self._topology):
            self._declarer.apply(landing_declarations(self._topology, exchange))

    def _declare_landing(self, exchange: str) -> bool:
        if exchange in self._landings:
            return self._landings[exchange]
        landing = self._topology.landing_queue(exchange)
        if not self._topology.settings.declare:
            there = self._declarer.has_queue(landing, if_refused=True)
        else:
            try:
                self._declarer.apply(landing_declarations(self._topology, exchange))
                there = True
            except AccessRefused:
                there = self._declarer.has_queue(landing, if_refused=False)
                if not there:
                    logger.warning(
                        "native delay: no permission to declare the landing queue of exchange %r: "
                        "its delayed messages park where workers have not copied its bindings",
                        exchange,
                    )
        remember(self._landings, exchange, there)
        return there

    def _ask_type(self, exchange: str, *, likely: str = "") -> str:
        asked = sorted(ASKED_TYPES, key=lambda kind: kind != likely)
        try:
            return next(filter(partial(self._is_of_type, exchange), asked), "")
        except AccessRefused:
            # RabbitMQ tells the type only by refusing another type, which needs the permission to
            # declare. "direct" also works for topic exchanges. For other types, a worker publishes
            # the due message again.
            return likely or "direct"

    def _is_of_type(self, exchange: str, kind: str) -> bool:
        """Return True if *exchange* has the type *kind*; raise NotFound if it does not exist."""
        # RabbitMQ compares the type only in a declaration that is not passive. This one has a wrong
        # argument, so that RabbitMQ refuses it always, and never declares the exchange.
        try:
            self._declarer.channel.exchange_declare(exchange, kind, arguments=WRONG_ARGUMENT)
        except PreconditionFailed as exc:
            # The text names the first argument that differs, and the type is compared first. The
            # end of the text, with the present type, may be cut off.
            text = (exc.reply_text or "")[:255]
            if "inequivalent" not in text:
                raise NotFound(f"no exchange {exchange!r}") from exc
            return "arg 'type'" not in text
        return True
