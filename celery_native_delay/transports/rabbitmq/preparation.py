"""What must be on the broker before a message can wait: the levels, and the mirrored bindings."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import Any

from amqp.exceptions import AccessRefused, ChannelError, NotFound

from ...errors import NativeDelayError, NotPermitted
from ...settings import DelaySettings
from .declaring import apply, check_broker, refusals_explained
from .mirror import Mirror, Mirrored, is_internal, must_land_declarations
from .own_channel import OwnChannel
from .routes import Routes
from .topology import Exchange, Topology, Unbinding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What :meth:`Delays.prepare` did."""

    declared: bool
    mirrored: int
    seconds: float


class Preparation:
    """Declares and binds on one AMQP connection, each thing once.

    With a *refusal* nothing is prepared: whoever asks for it is told why.
    """

    def __init__(
        self, connection: Any, settings: DelaySettings, *, refusal: NativeDelayError | None = None
    ) -> None:
        self.connection = connection
        self._refusal = refusal
        self.settings = settings
        self.topology = Topology(settings)
        self.mirror = Mirror(self.topology)
        self._routes = Routes(self.topology, self.mirror, lambda: self.declarer)
        self._declarer: OwnChannel | None = None
        self._ready = False
        self._told = False

    @property
    def declarer(self) -> OwnChannel:
        """Our channel for what the broker may refuse, which closes it; never the publisher."""
        if self._declarer is None or self._declarer.connection is None:
            self._declarer = OwnChannel(self.connection, confirm=False)
        return self._declarer

    @property
    def is_prepared(self) -> bool:
        """Whether :meth:`prepare` would find nothing to do."""
        return self._ready and not self.mirror.is_pending

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        """Make sure of the delay levels and of every mirrored binding; cached.

        Args:
            redeclare: declare the levels even where they seem complete.
            consuming: the queues declared here are about to be consumed from.

        Raises:
            UnsupportedBroker, NotPermitted, TopologyMismatch: saying the way out.
        """
        if self._refusal is not None:
            raise self._refusal
        started = monotonic()
        declared = False
        if redeclare or not self._ready:
            check_broker(self.connection)
            declared = redeclare or not self._is_complete()
            if declared:
                self.declare()
            self._ready = True
        mirrored = self._mirror_pending(consuming) if self.mirror.is_pending else 0
        return Prepared(declared, mirrored, monotonic() - started)

    def declare(self) -> None:
        """Declare the levels, whether they are there or not."""
        with refusals_explained(self.topology):
            apply(self.declarer, self.topology.levels_plan())

    def prepare_ledger(self, *, redeclare: bool = False) -> None:
        """Make sure of the ledger's streams; raises as :meth:`prepare`."""
        if redeclare or not self._is_there(self.topology.ledger.ready_exchange):
            with refusals_explained(self.topology):
                apply(self.declarer, self.topology.ledger_plan())

    def prepare_to_consume(self, queue: str) -> None:
        """Mirror what was declared for a consumer; never fails, consuming must go on."""
        if self.mirror.is_stranger(queue):
            # Declared by somebody else.
            self.mirror.queue_bound_once(queue)
        if not self.mirror.is_pending:
            return
        try:
            self.prepare(consuming=True)
        except (NativeDelayError, ChannelError) as exc:
            level = logging.DEBUG if self._told else logging.ERROR
            self._told = True
            logger.log(level, "native delay: delayed messages may park, nothing is bound: %s", exc)

    def _is_complete(self) -> bool:
        return self._is_there(self.topology.ready_exchange)

    def _is_there(self, exchange: str) -> bool:
        """Whether the last exchange of a plan is.

        RabbitMQ 4.3 asks for the configure permission even here; who lacks it relies on
        somebody else's declaring, and a publish finds out.
        """
        try:
            self.declarer.exchange_declare(exchange, "fanout", passive=True)
        except NotFound:
            return False
        except AccessRefused:
            return True
        return True

    def _mirror_pending(self, consuming: bool) -> int:
        bindings, landings = self.mirror.take_pending()
        mirrored = [binding for binding in bindings if self._routes.exists(binding.exchange)]
        for queue in {
            binding.queue for binding in mirrored if self.mirror.is_stranger(binding.queue)
        }:
            self.mirror.arguments_seen(queue, rejects=self._routes.queue_lands(queue))
        groups = [list(must_land_declarations(self.topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in mirrored if binding.exchange})
            groups += [[Exchange(self.topology.mirrored_marker(name), "fanout")] for name in named]
        bound = [declaration for b in mirrored for declaration in self.mirror.declarations(b)]
        try:
            apply(self.declarer, [*chain.from_iterable(groups), *bound])
        except ChannelError:
            # One queue that is gone must not keep the others from being bound.
            for group in groups:
                with suppress(AccessRefused, NotFound):
                    apply(self.declarer, group)
            self._mirror_each(mirrored)
        self._routes.forget()
        return len(mirrored)

    def _mirror_each(self, bindings: list[Mirrored]) -> None:
        refused: dict[Mirrored, NotPermitted] = {}
        for binding in bindings:
            try:
                with refusals_explained(self.topology):
                    apply(self.declarer, self.mirror.declarations(binding))
            except NotPermitted as exc:
                refused[binding] = exc
            except ChannelError as exc:
                logger.debug("not mirrored: %s: %s", binding, exc)
        if refused:
            self.mirror.not_mirrored(list(refused))
            raise next(iter(refused.values()))

    def declare_again(self) -> None:
        """The broker lost what this connection relied on."""
        self.look_again()
        self.prepare(redeclare=True)

    def look_again(self) -> None:
        """The broker may have lost what this connection relied on."""
        self._ready = False
        self.mirror.forget_mirrored()
        self._routes.forget()

    def queue_deleted(self, queue: str) -> None:
        """The user deleted *queue*: nothing may be left that takes copies for it."""
        unknown = self.mirror.is_stranger(queue) and not is_internal(queue)
        if unknown or self.mirror.rejects(queue):
            landing = self.topology.queue_landing_queue(queue)
            # Quorum queues know no if-empty; nothing rests in this one for longer than an instant.
            with suppress(ChannelError):
                if not self.declarer.queue_declare(landing, passive=True).message_count:
                    self.declarer.queue_delete(landing)
        self.mirror.queue_deleted(queue)

    def exchange_deleted(self, exchange: str) -> None:
        """The user deleted *exchange*: nothing may be left of what was bound to it here."""
        gone = self.mirror.exchange_deleted(exchange)
        try:
            if gone and self._is_complete():
                bound = [
                    (binding.source, binding.destination, binding.routing_key) for binding in gone
                ]
                apply(self.declarer, [Unbinding(*binding) for binding in bound])
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", exchange, exc)

    def unmirror(self, binding: Mirrored) -> None:
        """Take back what mirrors a binding that the user has removed."""
        try:
            if not (self._is_complete() and self._routes.exists(binding.exchange)):
                return
            mirrored = self.mirror.binding_of(binding)
            if mirrored is not None:
                self.declarer.queue_unbind(
                    mirrored.destination, mirrored.source, mirrored.routing_key
                )
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", binding, exc)
