"""All that must be on the broker before a message can wait: levels and mirrored bindings."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from time import monotonic

from amqp.exceptions import AccessRefused, ChannelError, NotFound

from ...errors import NativeDelayError, NotPermitted
from .declaring import Declarer, check_broker, not_declared, refusals_explained
from .mirror import Mirror, Mirrored, is_internal
from .routes import Routes
from .topology import Unbinding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The work that :meth:`Preparation.prepare` did."""

    declared: bool
    mirrored: int
    seconds: float


class Preparation:
    """Declaring and binding on one AMQP connection, each thing once.

    With a *refusal* nothing is prepared: every attempt raises it. Where the settings forbid to
    declare, it only looks whether all is there.
    """

    def __init__(
        self,
        mirror: Mirror,
        routes: Routes,
        declarer: Declarer,
        *,
        refusal: NativeDelayError | None = None,
    ) -> None:
        self._mirror = mirror
        self._routes = routes
        self._declarer = declarer
        self._topology = declarer.topology
        self._declares = declarer.topology.settings.declare
        self._refusal = refusal
        self._told = False
        #: True once the levels have been seen, or declared.
        self.is_ready = False

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        """Make sure of the delay levels and of every mirrored binding; cached.

        Args:
            redeclare: declare the levels even where they seem complete.
            consuming: the queues declared here are about to be consumed from.

        Raises:
            UnsupportedBroker, NotPermitted, NotDeclared, TopologyMismatch: saying the way out.
        """
        if self._refusal is not None:
            raise self._refusal
        started = monotonic()
        declared = False
        if redeclare or not self.is_ready:
            check_broker(self._declarer.connection)
            declared = not self._is_there(redeclare=redeclare)
            if declared:
                with refusals_explained(self._topology):
                    self._declarer.apply(self._topology.plan())
            self.is_ready = True
        mirrored = self._mirror_pending(consuming) if self._mirror.is_pending else 0
        return Prepared(declared, mirrored, monotonic() - started)

    def prepare_to_consume(self, queue: str) -> None:
        """Mirror what was declared for a consumer; never fails, consuming must go on."""
        if queue not in self._mirror.rejects:
            # Declared elsewhere.
            self._mirror.queue_bound_once(queue)
        if not self._mirror.is_pending:
            return
        try:
            self.prepare(consuming=True)
        except (NativeDelayError, ChannelError) as exc:
            level = logging.DEBUG if self._told else logging.ERROR
            self._told = True
            logger.log(level, "native delay: delayed messages may park, nothing is bound: %s", exc)

    def _is_there(self, *, redeclare: bool) -> bool:
        """True if all is declared; with *redeclare* never.

        Raises:
            NotDeclared: it is not, and may not be declared.
        """
        if self._declares:
            return not redeclare and self._is_complete()
        if not self._is_complete():
            mark = self._topology.ready_exchange
            raise not_declared(f"exchange {mark} is missing, which says that all is declared")
        return True

    def _is_complete(self) -> bool:
        """True if the levels are there; a user who may not look relies on another's declaring."""
        return self._declarer.has_exchange(self._topology.ready_exchange, if_refused=True)

    def _mirror_pending(self, consuming: bool) -> int:
        bindings, landings = self._mirror.take_pending()
        if not self._declares:
            return 0
        mirrored = [
            binding
            for binding in bindings
            if self._routes.exists(binding.exchange) and self._can_bind(binding.queue)
        ]
        for queue in {binding.queue for binding in mirrored} - self._mirror.rejects.keys():
            # It has a landing queue from a process that knows its arguments.
            landing = self._topology.queue_landing_queue(queue)
            self._mirror.rejects[queue] = self._declarer.has_queue(landing, if_refused=False)
        groups = self._mirror.marks(mirrored, landings, consuming=consuming)
        bound = [declaration for b in mirrored for declaration in self._mirror.declarations(b)]
        try:
            self._declarer.apply([*chain.from_iterable(groups), *bound])
        except ChannelError:
            # One queue that is gone must not keep the others from being bound.
            for group in groups:
                with suppress(AccessRefused, NotFound):
                    self._declarer.apply(group)
            self._mirror_each(mirrored)
        self._routes.forget()
        return len(mirrored)

    def _can_bind(self, queue: str) -> bool:
        """False if *queue* is missing and the broker's refusal to bind it would not fit."""
        return (
            queue in self._mirror.rejects
            or self._declarer.refusal_fits(queue)
            or self._declarer.has_queue(queue, if_refused=True)
        )

    def _mirror_each(self, bindings: list[Mirrored]) -> None:
        refused: dict[Mirrored, NotPermitted] = {}
        for binding in bindings:
            try:
                with refusals_explained(self._topology):
                    self._declarer.apply(self._mirror.declarations(binding))
            except NotPermitted as exc:
                refused[binding] = exc
            except ChannelError as exc:
                logger.debug("not mirrored: %s: %s", binding, exc)
        if refused:
            self._mirror.not_mirrored(list(refused))
            raise next(iter(refused.values()))

    def declare_again(self) -> None:
        """Declare all anew: the broker lost what this connection relied on."""
        self.look_again()
        self.prepare(redeclare=True)

    def look_again(self) -> None:
        """Look for everything once more: the broker may have lost what was there."""
        self.is_ready = False
        self._mirror.forget_mirrored()
        self._routes.forget()

    def queue_deleted(self, queue: str) -> None:
        """The user deleted *queue*: leave nothing that takes copies for it."""
        may_reject = self._mirror.rejects.get(queue, not is_internal(queue))
        if self._declares and may_reject:
            landing = self._topology.queue_landing_queue(queue)
            # Quorum queues know no if-empty; nothing rests in this one for longer than an instant.
            with suppress(ChannelError):
                if self._declarer.depth(landing) == 0:
                    self._declarer.channel.queue_delete(landing)
        self._mirror.queue_deleted(queue)

    def exchange_deleted(self, exchange: str) -> None:
        """The user deleted *exchange*: unbind what mirrored bindings to it."""
        gone = self._mirror.exchange_deleted(exchange)
        try:
            if self._declares and gone and self._is_complete():
                self._declarer.apply(
                    Unbinding(each.source, each.destination, each.routing_key) for each in gone
                )
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", exchange, exc)

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> None:
        """The user removed a binding: take back what mirrors it."""
        binding = self._mirror.queue_unbound(queue, exchange, routing_key)
        try:
            if self._declares and self._is_complete() and self._routes.exists(exchange):
                mirrored = self._mirror.binding_of(binding)
                if mirrored is not None:
                    self._declarer.channel.queue_unbind(
                        mirrored.destination, mirrored.source, mirrored.routing_key
                    )
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", binding, exc)
