"""Run the ``celery delay`` commands on RabbitMQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from amqp.exceptions import NotFound, ResourceLocked

from ...errors import ManagementUnavailable
from ...finding import Finding
from ...settings import DelaySettings
from ..interface import AdminPart, Backlog, ParkedTask, Rescue, Told
from .declaring import not_declared, permissions_explained
from .inspection import examine, verify
from .management import ManagementAPI, management_of
from .parking import count, peek, rescue
from .removing import remove_all
from .status import RabbitStatus, levels, status


class RabbitMQAdminPart(AdminPart):
    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        self.name: str = self._topology.name
        self.parking: str = self._topology.parking_queue
        self._queues: Sequence[Any] = ()

    def serve(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def declare(self, queues: Sequence[Any]) -> Told:
        """Declare the app's queues and this package's delay queues."""
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
            found = self.status()
            return [*found.findings(), *examine(self._delays, self._api(), found)]

    def status(self) -> RabbitStatus:
        with permissions_explained(self._topology):
            return status(self._delays, self._api(), self._queues)

    def backlog(self) -> Backlog:
        """Count waiting messages over AMQP, without the management API."""
        with permissions_explained(self._topology):
            found, parked = tuple(levels(self._delays)), count(self._delays)
        return Backlog(sum(level.waiting for level in found), parked, found)

    def purge(self) -> int:
        with permissions_explained(self._topology):
            return sum(self._purged(hop.queue) for hop in self._topology.level_queues)

    def uninstall(self) -> list[str]:
        if not self._settings.declare:
            raise not_declared(f"this app does not delete {self._topology.space}.*")
        try:
            return [remove_all(self._delays, self._api())]
        except ManagementUnavailable as exc:
            raise ManagementUnavailable(
                f"{exc}. Or delete the queues and exchanges {self._topology.space}.* by hand: no "
                f"task waits in them"
            ) from exc

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
        with permissions_explained(self._topology):
            return self._purged(self.parking)

    def _purged(self, queue: str) -> int:
        try:
            return int(self._delays.declarer.channel.queue_purge(queue))
        except NotFound:
            return 0

    def _api(self) -> ManagementAPI:
        return management_of(self._delays.connection.client, self._settings)
