"""What the command line does on Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..contract import Backlog, ParkedTask, Rescue, Verification
from ..virtual.status import Status, backlog_of
from ..virtual.trace import unsealed
from .envelope import opened_entry
from .server import advice, clock_danger, dangers
from .store import Census, Store
from .worker_part import rescue


@dataclass(frozen=True)
class Ready:
    """Redis needs no declarations; this says so."""

    name: str
    server: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return [f"{self.name}: nothing to declare, {self.server} can hold delayed messages"]


class RedisAdminPart:
    """On one channel; see :class:`~celery_native_delay.transports.contract.AdminPart`."""

    def __init__(self, channel: Any) -> None:
        self._delays = channel.delays
        self._store: Store = self._delays.store
        self.name = self._delays.keys.space
        self.parking = self._delays.keys.parked

    def declare(self, queues: Sequence[Any]) -> Ready:
        """Check the server; there is nothing to declare."""
        return Ready(self.name, str(self._delays.prepare()))

    def verify(self) -> Verification:
        """Check the server, our keys, and that somebody promotes."""
        self._delays.prepare()
        server = self._delays.look()
        keys = self._delays.keys
        expected = dict.fromkeys((keys.due, keys.wake, keys.parked, keys.ids), "zset")
        expected[keys.messages] = "hash"
        differences = [
            f"{key}: is a {kind}, expected a {expected[key]}"
            for key, kind in self._store.kinds().items()
            if kind != expected[key]
        ]
        if not differences:
            differences += _compare(self.name, self._store.census())
        differences += dangers(server)
        differences += clock_danger(self._delays.clock_ahead_seconds())
        unchecked = []
        if server.policy is None or server.aof is None:
            unchecked.append("maxmemory-policy and persistence: INFO does not tell them")
        return Verification(differences, unchecked, list(advice(server)))

    def status(self) -> Status:
        """Count what waits and what is parked."""
        return Status.of(self.name, self._store.census())

    def backlog(self) -> Backlog:
        """The same as numbers; the store itself is the ledger."""
        return backlog_of(self._store.census())

    def purge(self) -> int:
        return self._store.purge()

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        entries = self._store.peek_parked(limit=limit)
        return self._store.census().parked, [_parked_task(entry) for entry in entries]

    def requeue(self) -> Rescue:
        return rescue(self._delays)

    def purge_parked(self) -> int:
        return self._store.purge_parked()


def _compare(name: str, census: Census) -> list[str]:
    differences = []
    surplus = census.entries - census.waiting - census.parked
    if surplus:
        differences.append(
            f"{name}: {abs(surplus)} message(s) {'without a due time' if surplus > 0 else 'lost'}"
        )
    return [*differences, *Status.of(name, census).differences()]


def _parked_task(entry: bytes) -> ParkedTask:
    _, envelope = opened_entry(entry)
    message = json.loads(envelope)
    return ParkedTask.of(*unsealed(message.get("headers"), message["properties"]))
