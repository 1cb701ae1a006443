"""What the command line does with a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..contract import Backlog, ParkedTask, Rescue, Verification
from ..virtual.status import Status, backlog_of
from ..virtual.trace import unsealed
from .schema import MESSAGES, VERSION
from .store import Store
from .worker_part import rescue


@dataclass(frozen=True)
class Ready:
    """The tables are there."""

    name: str
    version: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return [f"{self.name}: its tables are there, in version {self.version}"]


class StoreAdminPart:
    """On one channel; see :class:`~celery_native_delay.transports.contract.AdminPart`."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._store: Store = channel.delays.store
        self.name = f"{self._store.namespace} of {self._store.shown_url}"
        self.parking = f"{MESSAGES.name} of {self._store.shown_url}, parked"

    def declare(self, queues: Sequence[Any]) -> Ready:
        """Make the tables, if they are not there."""
        self._store.prepare()
        return Ready(self.name, VERSION)

    def verify(self) -> Verification:
        """Check the version of the tables, and that somebody dispatches."""
        self._store.prepare()
        return Verification(Status.of(self.name, self._store.census()).differences(), [], [])

    def status(self) -> Status:
        """Count what waits and what is parked."""
        self._store.prepare()
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        """The same as numbers; the store itself is the ledger."""
        self._store.prepare()
        return backlog_of(self._store.census())

    def purge(self) -> int:
        return self._store.purge(parked=False)

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        self._store.prepare()
        found = self._store.parked(limit=limit)
        return self._store.count_parked(), [_parked_task(envelope) for envelope, _ in found]

    def requeue(self) -> Rescue:
        self._store.prepare()
        return rescue(self._channel, self._store)

    def purge_parked(self) -> int:
        return self._store.purge(parked=True)


def _parked_task(envelope: str) -> ParkedTask:
    message = json.loads(envelope)
    return ParkedTask.of(*unsealed(message.get("headers"), message["properties"]))
