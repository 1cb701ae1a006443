"""The command line's part on brokers whose messages wait in a store: what all of them share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from ..interface import Backlog, ParkedTask
from .status import Census, Status
from .wrapping import unwrapped


class AdminPart(ABC):
    """Counting for :class:`~celery_native_delay.transports.interface.AdminPart`."""

    name: str

    @abstractmethod
    def _census(self) -> Census: ...

    def status(self) -> Status:
        return Status.of(self.name, self._census())

    def backlog(self) -> Backlog:
        """The store itself is the ledger."""
        census = self._census()
        waiting = census.waiting
        return Backlog(waiting, census.parked, (), True, census.until_first_us, waiting)


def parked_task(envelope: str | bytes) -> ParkedTask:
    """The task in a parked message, as far as it tells who it is."""
    message = json.loads(envelope)
    return ParkedTask.of(*unwrapped(message.get("headers"), message["properties"]))
