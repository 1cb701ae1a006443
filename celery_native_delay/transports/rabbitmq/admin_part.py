"""RabbitMQ's part of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from time import time_ns
from typing import Any

from amqp.exceptions import NotFound, ResourceLocked

from ...errors import (
    LedgerUnavailable,
    NativeDelayError,
    UnsupportedBroker,
)
from ...finding import WRONG, Finding
from ...settings import DelaySettings
from ...urls import without_password
from ..interface import Backlog, ParkedTask, Rescue, Told
from .declaring import not_declared, permissions_explained
from .inspection import examine, verify
from .management import ManagementAPI, management_of
from .parking import count, peek, purge, rescue
from .pruning import Pruning
from .status import LedgerStatus, Status, levels, status


class RabbitMQAdminPart:
    """RabbitMQ's :class:`~celery_native_delay.transports.interface.AdminPart`, on one channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        self.name: str = self._topology.name
        self.parking: str = self._topology.parking_queue
        self._queues: Sequence[Any] = ()

    def expect(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def declare(self, queues: Sequence[Any]) -> Told:
        """Declare the levels even where they seem complete, and *queues*, to bind them."""
        if not self._settings.declare:
            raise not_declared("nothing is declared by this app")
        with permissions_explained(self._topology):
            for queue in queues:
                queue(self._channel).declare()
            prepared = self._delays.prepare(redeclare=True, consuming=True)
        milliseconds = prepared.seconds * 1000
        sentence = f"{self.name} and {prepared.mirrored} binding(s) in {milliseconds:.0f} ms"
        return Told({"name": self.name} | asdict(prepared), [f"declared {sentence}"])

    def verify(self) -> list[Finding]:
        with permissions_explained(self._topology):
            return verify(self._delays, self._api(), self._queues)

    def examine(self) -> list[Finding]:
        with permissions_explained(self._topology):
            return [*examine(self._delays, self._api()), *self._ledger()]

    def _ledger(self) -> list[Finding]:
        try:
            ledger = self._channel.ledger(self._settings)
            if ledger is None:
                return []
            with closing(ledger):
                return ledger.findings()  # type: ignore[no-any-return]
        except (LedgerUnavailable, UnsupportedBroker) as exc:
            way_out = "have it answer, or unset native_delay_ledger in workers and producers"
            return [Finding("ledger", WRONG, str(exc), way_out)]

    def status(self) -> Status:
        with permissions_explained(self._topology):
            return status(self._delays, self._api())

    def status_with_ledger(self) -> Status:
        found = self.status()
        if self._settings.ledger is None:
            return found
        return replace(found, ledger=self._ledger_status())

    def backlog(self) -> Backlog:
        """Numbers over AMQP alone; due times from the ledger."""
        with permissions_explained(self._topology):
            found, parked = tuple(levels(self._delays)), count(self._delays)
        waiting = sum(level.waiting for level in found)
        ledger = self._channel.ledger(self._settings)
        if ledger is None:
            return Backlog(waiting, parked, found)
        with closing(ledger):
            try:
                span, known = ledger.span(), ledger.count()
            except LedgerUnavailable:
                return Backlog(waiting, parked, found, ledger_answers=False)
        first_us = None if span is None else span[0] - time_ns() // 1000
        return Backlog(waiting, parked, found, True, first_us, known)

    def purge(self) -> int:
        """Empty every level queue; what landing queues hold stays."""
        with permissions_explained(self._topology):
            ledger = self._channel.ledger(self._settings)
            if ledger is not None:
                with closing(ledger):
                    ledger.purge()
            return sum(self._purged(hop.queue) for hop in self._topology.level_queues)

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        with permissions_explained(self._topology):
            total = count(self._delays)
            try:
                found = peek(self._delays, limit=limit)
            except ResourceLocked:
                return None
        return total, [ParkedTask.of(item.message.headers or {}, item.delayed) for item in found]

    def requeue(self) -> Rescue | None:
        with permissions_explained(self._topology):
            return rescue(self._delays)

    def purge_parked(self) -> int:
        """Empty the parking queue; the ledger forgets what was there."""
        with permissions_explained(self._topology):
            if self._settings.ledger is not None:
                return purge(self._delays)
            return self._purged(self.parking)

    def pruning(self) -> Pruning:
        return Pruning(self._delays, self._api(), self._settings)

    def _ledger_status(self) -> LedgerStatus:
        where = without_password(str(self._settings.ledger))
        try:
            with closing(self._channel.ledger(self._settings)) as ledger:
                return LedgerStatus.of(ledger, where, now_us=time_ns() // 1000)
        except NativeDelayError as exc:
            return LedgerStatus(where, error=str(exc))

    def _purged(self, queue: str) -> int:
        try:
            return int(self._delays.declarer.channel.queue_purge(queue))
        except NotFound:
            return 0

    def _api(self) -> ManagementAPI:
        return management_of(self._delays.connection.client, self._settings)
