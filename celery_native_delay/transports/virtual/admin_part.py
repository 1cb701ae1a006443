"""The command line's part on brokers whose messages wait in a store: what all of them share."""

from __future__ import annotations

import json
from typing import Any

from ..interface import Backlog, ParkedTask
from .status import Status
from .wrapping import unwrapped


class AdminPart:
    """Numbers for :class:`~celery_native_delay.transports.interface.AdminPart`, by a *_store*."""

    name: str
    _store: Any

    def status(self) -> Status:
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        """The store itself knows what waits."""
        census = self._store.census()
        waiting = census.waiting
        return Backlog(waiting, census.parked, (), True, census.until_first_us, waiting)

    def purge(self) -> int:
        return int(self._store.purge(parked=False))

    def purge_parked(self) -> int:
        return int(self._store.purge(parked=True))


def parked_task(envelope: str | bytes) -> ParkedTask:
    """The task in a parked message, as far as it tells who it is."""
    message = json.loads(envelope)
    return ParkedTask.of(*unwrapped(message.get("headers"), message["properties"]))
