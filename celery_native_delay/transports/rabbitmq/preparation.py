"""Declare the delay queues (queues with a TTL), and copy the user's bindings."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from time import monotonic

from amqp.exceptions import AccessRefused, ChannelError, NotFound

from ...errors import NativeDelayError, NotPermitted
from .declaring import Declarer, check_broker, not_declared, refusals_explained
from .mirror import Mirror, Mirrored, remember
from .routes import Routes
from .topology import Unbinding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The result of :meth:`Preparation.prepare`."""

    #: True if this call declared the delay queues.
    declared: bool
    #: The number of copied bindings.
    mirrored: int
    seconds: float


class Preparation:
    """Declares the queues and bindings for delayed messages, once per connection."""

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
        self._has_logged = False
        #: True after the delay levels were found or declared.
        self.is_ready = False

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        """Declare missing delay queues; bind the user's queues to the exchange for due messages.

        *redeclare* also declares existing delay queues. *consuming* also declares the marker
        exchanges that tell producers which bindings are copied.
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
        """Copy a queue's bindings to the delivery exchange; errors are logged, not raised."""
        if queue not in self._mirror.lands:
            # Another process has declared the queue.
            self._mirror.queue_bound_once(queue)
        if not self._mirror.is_pending:
            return
        try:
            self.prepare(consuming=True)
        except (NativeDelayError, ChannelError) as exc:
            level = logging.DEBUG if self._has_logged else logging.ERROR
            self._has_logged = True
            logger.log(level, "native delay: delayed messages may park (no binding): %s", exc)

    def _is_there(self, *, redeclare: bool) -> bool:
        """Return False if this app must declare the delay queues.

        The app must declare the queues if queues are missing, or if *redeclare* is True. The only
        exception: with ``native_delay_declare`` off, raise NotDeclared if queues are missing.
        """
        if self._declares:
            return not redeclare and self._is_complete()
        if not self._is_complete():
            mark = self._topology.ready_exchange
            raise not_declared(f"exchange {mark} is missing, the last one to be declared")
        return True

    def _is_complete(self) -> bool:
        """Return True if the broker has all delay queues for the app's settings."""
        # This exchange is declared last.
        return self._declarer.has_exchange(self._topology.ready_exchange, if_refused=True)

    def _mirror_pending(self, consuming: bool) -> int:
        bindings, landings = self._mirror.take_pending()
        if not self._declares:
            return 0
        mirrored = [binding for binding in bindings if self._routes.exists(binding.exchange)]
        self._look_for_diverted({binding.queue for binding in mirrored})
        groups = self._mirror.marker_declarations(mirrored, landings, consuming=consuming)
        bound = [declaration for b in mirrored for declaration in self._mirror.declarations(b)]
        try:
            self._declarer.apply([*chain.from_iterable(groups), *bound])
        except ChannelError:
            # One missing queue must not prevent the bindings of the others.
            for group in groups:
                with suppress(AccessRefused, NotFound):
                    self._declarer.apply(group)
            self._mirror_each(mirrored)
        self._routes.forget()
        return len(mirrored)

    def _look_for_diverted(self, queues: set[str]) -> None:
        """Look for landing queues that other processes have put in front of *queues*.

        Another process may know more of a queue: its arguments, or a policy.
        """
        unsure = {queue for queue in queues if not self._mirror.needs_landing(queue)}
        marker = self._topology.diverted_marker
        any_diverted = bool(unsure) and self._declarer.has_exchange(marker, if_refused=True)
        for queue in unsure:
            landing = self._topology.queue_landing_queue(queue)
            found = any_diverted and self._declarer.has_queue(landing, if_refused=False)
            remember(self._mirror.lands, queue, found)

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
            self._mirror.pending = dict.fromkeys(refused) | self._mirror.pending
            raise next(iter(refused.values()))

    def declare_again(self) -> None:
        """Declare everything again, because the broker lost queues."""
        self.is_ready = False
        self._mirror.forget_mirrored()
        self._routes.forget()
        self.prepare(redeclare=True)

    def exchange_deleted(self, exchange: str) -> None:
        """Remove this package's copies of the deleted exchange's bindings."""
        self._unbind(self._mirror.exchange_deleted(exchange))

    def queue_unbound(self, queue: str, exchange: str, routing_key: str) -> None:
        """Remove this package's copy of a binding that the user removed."""
        binding = self._mirror.queue_unbound(queue, exchange, routing_key)
        ignored = self._mirror.ignores(queue) or self._mirror.ignores(exchange)
        if self._declares and not ignored and self._routes.exists(exchange):
            self._unbind(self._mirror.unbindings_of(binding))

    def _unbind(self, gone: list[Unbinding]) -> None:
        try:
            if self._declares and gone and self._is_complete():
                self._declarer.apply(gone)
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", gone, exc)
