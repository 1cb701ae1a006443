"""What the command line does with a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..contract import Backlog, ParkedTask, Rescue, Verification
from ..virtual.trace import unsealed
from .schema import MESSAGES, VERSION
from .store import Census, Store
from .worker_part import rescue

#: Longer overdue, in seconds, and nobody seems to dispatch.
_PATIENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Ready:
    """The tables are there."""

    name: str
    version: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return [f"{self.name}: its tables are there, in version {self.version}"]


@dataclass(frozen=True)
class Status:
    """What waits in a store; times in seconds."""

    name: str
    waiting: int
    next_due_within_seconds: float | None
    overdue: int
    overdue_seconds: float
    parked: int

    @classmethod
    def of(cls, name: str, census: Census) -> Status:
        until_us = census.until_first_us
        is_late = until_us is not None and until_us < 0
        return cls(
            name,
            census.waiting,
            None if until_us is None else max(until_us, 0) / 1_000_000,
            census.overdue,
            -(until_us or 0) / 1_000_000 if is_late else 0.0,
            census.parked,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, table: Callable[..., str]) -> list[str]:
        due = self.next_due_within_seconds
        late = f", the first for {self.overdue_seconds:g} s" if self.overdue else ""
        return [
            f"waiting   {self.waiting}",
            f"next due  {'-' if due is None else f'within {due:g} s'}",
            f"overdue   {self.overdue}{late}",
            f"parked    {self.parked}",
        ]


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
        census = self._store.census()
        late_seconds = -(census.until_first_us or 0) / 1_000_000
        differences = []
        if late_seconds > _PATIENCE_SECONDS:
            differences.append(
                f"{self.name}: {census.overdue} message(s) overdue, the first for "
                f"{late_seconds:.0f} s: no installed worker and no "
                f"`celery -A PROJ delay promote` is running"
            )
        return Verification(differences, [], [])

    def status(self) -> Status:
        """Count what waits and what is parked."""
        self._store.prepare()
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        """The same as numbers; the store itself is the ledger."""
        self._store.prepare()
        census = self._store.census()
        return Backlog(
            census.waiting,
            census.parked,
            ledger_answers=True,
            until_first_us=census.until_first_us,
            in_ledger=census.waiting,
        )

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
