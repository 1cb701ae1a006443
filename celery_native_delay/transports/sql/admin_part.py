"""The operations of the ``delay`` commands on a database of waiting messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import delete

from ...errors import StoreUnavailable
from ...finding import UNCHECKED, WRONG, Finding, clock_finding
from ...records.database import clock_ahead_seconds
from ..interface import ParkedTask, Rescue, Told
from ..virtual.admin_part import AdminPart, parked_task, refuse_waiting
from ..virtual.status import Status
from .schema import MESSAGES, VERSION
from .store import Store
from .worker_part import rescue


class StoreAdminPart(AdminPart):
    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._store: Store = channel.delays.store
        self.name = f"{self._store.namespace} of {self._store.where}"
        self.parking = f"{MESSAGES.name} of {self._store.where}, parked"

    def declare(self, queues: Sequence[Any]) -> Told:
        self._store.records.make_tables()
        sentence = f"{self.name}: its tables are there, in version {VERSION}"
        return Told({"name": self.name, "version": VERSION}, [sentence])

    def verify(self) -> list[Finding]:
        with _told() as found:
            if self._store.is_made():
                # The statement fails if this user may not write, although no row matches.
                nothing = delete(MESSAGES).where(MESSAGES.c.id < 0)
                self._store.do(lambda connection: connection.execute(nothing))
            else:
                problem = f"{self._store.where} has none of our tables"
                way_out = (
                    "start a worker or run `celery -A PROJ delay declare`, which make them, or "
                    "correct native_delay_store, in workers and producers"
                )
                found.append(Finding("store", WRONG, problem, way_out))
        return found

    def examine(self) -> list[Finding]:
        with _told() as found:
            if self._store.is_made():
                found += Status.of(self.name, self._store.census()).findings()
                found += self._clocks()
        return found

    def _clocks(self) -> Iterator[Finding]:
        ahead_seconds = self._store.look_up(clock_ahead_seconds)
        if ahead_seconds is None:
            problem = f"the clock of {self._store.where}: it is not known how to ask for it"
            way_out = "have all machines follow one time server"
            yield Finding("clocks", UNCHECKED, problem, way_out)
            return
        effect = "one of the two makes delayed tasks early or late"
        yield from clock_finding("the database's clock", ahead_seconds, effect)

    def uninstall(self) -> list[str]:
        """Delete this namespace's rows; other namespaces may use the tables."""
        if not self._store.is_made():
            return []
        refuse_waiting(self.name, self._store.census())
        return [f"{self._store.records.clear()} row(s) of {self.name}"]

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]]:
        found = self._store.parked(limit=limit)
        return self._store.count_parked(), [parked_task(envelope) for envelope in found]

    def requeue(self) -> Rescue:
        return rescue(self._channel, self._store)


@contextmanager
def _told() -> Iterator[list[Finding]]:
    """Yield an empty list of problems; if the block raises StoreUnavailable, add a problem."""
    found: list[Finding] = []
    try:
        yield found
    except StoreUnavailable as exc:
        way_out = (
            "see that the database runs, takes this user and can be written to, or correct "
            "native_delay_store, in workers and producers"
        )
        found.append(Finding("store", WRONG, str(exc), way_out))
