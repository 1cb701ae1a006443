"""The base of the command line's part on Redis and on stores."""

from __future__ import annotations

import json
from typing import Any

from ..interface import Backlog, ParkedTask
from .status import Status
from .wrapping import unwrapped


class AdminPart:
    """The numbers that the command line asks for, from a *_store*."""

    name: str
    _store: Any

    def status(self) -> Status:
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        """The store's own numbers: it needs no records."""
        census = self._store.census()
        waiting = census.waiting
        return Backlog(waiting, census.parked, (), True, census.until_first_us, waiting)

    def purge(self) -> int:
        return int(self._store.purge(parked=False))

    def purge_parked(self) -> int:
        return int(self._store.purge(parked=True))


def parked_task(envelope: str | bytes) -> ParkedTask:
    """The parked task in an *envelope*."""
    message = json.loads(envelope)
    return ParkedTask.of(*unwrapped(message.get("headers"), message["properties"]))
