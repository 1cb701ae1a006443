"""What the command line does on Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...finding import WRONG, Finding
from ...redis_server import clocks
from ..interface import Backlog, ParkedTask, Rescue
from ..virtual.status import Status, backlog_of
from ..virtual.trace import unsealed
from .envelope import opened_entry
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
    """On one channel; see :class:`~celery_native_delay.transports.interface.AdminPart`."""

    def __init__(self, channel: Any) -> None:
        self._delays = channel.delays
        self._store: Store = self._delays.store
        self.name = self._delays.keys.space
        self.parking = self._delays.keys.parked

    def declare(self, queues: Sequence[Any]) -> Ready:
        """Check the server; there is nothing to declare."""
        return Ready(self.name, str(self._delays.prepare()))

    def verify(self) -> list[Finding]:
        """Check the server and what our keys are."""
        self._delays.prepare()
        keys = self._delays.keys
        expected = dict.fromkeys((keys.due, keys.wake, keys.parked, keys.ids), "zset")
        expected |= {keys.messages: "hash", keys.promoting: "string"}
        wrong = [
            Finding(
                "keys",
                WRONG,
                f"{key}: is a {kind}, expected a {expected[key]}",
                f"delete it (DEL {key}), or choose another native_delay_namespace",
            )
            for key, kind in self._store.kinds().items()
            if kind != expected[key]
        ]
        return [*wrong, *self._delays.dangers()]

    def examine(self) -> list[Finding]:
        """See that something promotes, that no entry is lost, and what time it is there."""
        census = self._store.census()
        return [
            *_compare(self.name, census),
            *Status.of(self.name, census).findings(),
            *clocks(self._delays.clock_ahead_seconds()),
        ]

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


def _compare(name: str, census: Census) -> list[Finding]:
    surplus = census.entries - census.waiting - census.parked
    if not surplus:
        return []
    what = "without a due time" if surplus > 0 else "lost"
    problem = f"{name}: {abs(surplus)} message(s) {what}"
    way_out = "find out who else writes to these keys, or drops them; send such tasks again"
    return [Finding("keys", WRONG, problem, way_out)]


def _parked_task(entry: bytes) -> ParkedTask:
    _, envelope = opened_entry(entry)
    message = json.loads(envelope)
    return ParkedTask.of(*unsealed(message.get("headers"), message["properties"]))
