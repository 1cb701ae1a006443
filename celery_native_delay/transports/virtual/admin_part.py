"""Shared code of the ``delay`` commands for Redis and databases."""

from __future__ import annotations

import json
from typing import Any

from ..interface import Backlog, ParkedTask
from ..status import Status
from .wrapping import unwrapped


class AdminPart:
    """The Redis and database operations that the ``delay`` commands need."""

    name: str
    _store: Any

    def status(self) -> Status:
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        census = self._store.census()
        waiting = census.waiting
        return Backlog(waiting, census.parked, (), True, census.until_first_us, waiting)

    def purge(self) -> int:
        return int(self._store.purge(parked=False))

    def purge_parked(self) -> int:
        return int(self._store.purge(parked=True))


def parked_task(envelope: str | bytes) -> ParkedTask:
    """Decode an undeliverable task; *envelope* is kombu's message as JSON."""
    message = json.loads(envelope)
    return ParkedTask.of(*unwrapped(message.get("headers"), message["properties"]))
