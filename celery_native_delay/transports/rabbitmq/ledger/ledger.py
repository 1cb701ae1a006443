"""A ledger of what waits in the levels, through the copy of it that a Redis keeps.

A message in a level cannot be taken back. To move one, a copy with a new delivery id is sent, and
the old delivery is declared void; to cancel one, the copy is sent at once, marked, so that a worker
announces it. The order makes it once, even if a process dies in between:

1. the new delivery is marked *pending* on the old one: void if that one comes first;
2. the copy is published and confirmed;
3. one script makes the new one count, if the old one has not been received meanwhile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum
from secrets import token_hex
from time import time_ns
from typing import Any

import amqp

from ....due_time import eta_of
from ....finding import Finding
from ....ledger.model import Waiting
from ....ledger.redis_index import IndexedLedger
from ....settings import DelaySettings
from ....urls import without_password
from .connection import explained, ledger_client
from .entry import Entry, waiting
from .scripts import MARK_GRACE_MS, REPLACE, STALE_AFTER_US, SWEEP, LedgerKeys

_SWEPT_AT_ONCE = 1000


class Standing(Enum):
    """The ledger's word on a message that waits, which it goes on waiting for."""

    KNOWN = "known"
    VOID = "void"
    """Its task was cancelled or moved."""
    UNKNOWN = "unknown"


class RabbitMQLedger(IndexedLedger):
    """On one connection; see :class:`~celery_native_delay.ledger.model.Ledger`."""

    def __init__(self, delays: Any, settings: DelaySettings) -> None:
        assert settings.ledger is not None
        self._delays = delays
        self._where = without_password(settings.ledger)
        self._meaning = settings.while_ledger_is_away
        self._keys = LedgerKeys(settings.namespace, delays.connection.virtual_host)
        super().__init__(ledger_client(settings.ledger), self._keys, waiting)
        self._replacing = self._client.register_script(REPLACE)
        self._sweep = self._client.register_script(SWEEP)

    def close(self) -> None:
        self._client.close()

    def sweep(self) -> int:
        """Remove entries whose messages are lost, being overdue for so long; their number."""
        return self._throw_away("-inf", time_ns() // 1000 - STALE_AFTER_US)

    def standing(self, member: str) -> Standing:
        """The standing of the message of *member*; nothing is changed by asking."""
        with self._explained(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.get(self._keys.marks + member.rpartition(":")[2])
            pipeline.hexists(self._keys.messages, member)
            mark, is_listed = pipeline.execute()
        if mark == b"":
            return Standing.VOID
        # One with a mark is about to take the place of another.
        return Standing.KNOWN if mark or is_listed else Standing.UNKNOWN

    def findings(self) -> list[Finding]:
        """Faults of the Redis that keeps it."""
        from ....redis_server import findings

        return list(
            findings(
                self._client,
                key=f"{self._keys.space}.trial",
                check="ledger",
                kept="what is listed, cancelled and moved",
                where=f"native_delay_ledger at {self._where}",
            )
        )

    def purge(self) -> None:
        """Forget what is not due yet; the caller empties the levels."""
        self._throw_away(time_ns() // 1000, "+inf")

    def _throw_away(self, from_us: int | str, until_us: int | str) -> int:
        swept = 0
        with self._explained():
            while True:
                arguments = [from_us, until_us, _SWEPT_AT_ONCE]
                taken = int(self._sweep(keys=list(self._keys.index), args=arguments))
                swept += taken
                if taken < _SWEPT_AT_ONCE:
                    return swept

    def _replace(
        self, member: str, entry: bytes, task: Waiting, due_us: int | None, *, cancelled: bool
    ) -> tuple[str, int] | None:
        new_due_us = time_ns() // 1000 if due_us is None else due_us
        now_ms = time_ns() // 1_000_000
        task_id, _, old_id = member.rpartition(":")
        new_id = token_hex(16)
        new_member = f"{task_id}:{new_id}"
        old_ttl_ms = max(task.due_us // 1000 - now_ms, 0) + MARK_GRACE_MS
        new_ttl_ms = max(new_due_us // 1000 - now_ms, 0) + MARK_GRACE_MS
        old_mark, new_mark = self._keys.marks + old_id, self._keys.marks + new_id
        with self._explained():
            self._client.set(new_mark, member, px=new_ttl_ms)
        moved = due_then(Entry.decoded(entry), new_due_us)
        self._delays.put_back(
            amqp.Message(moved.body, **moved.properties),
            moved.wait(new_id, new_due_us, cancelled=cancelled),
            recorded=False,
        )
        kept = b"" if cancelled else moved.encoded()
        keys = [*self._keys.index, old_mark, new_mark]
        arguments = [member, old_ttl_ms, new_member, new_due_us, kept, new_ttl_ms]
        with self._explained():
            counts = self._replacing(keys=keys, args=arguments)
        return (new_member, new_due_us) if counts else None

    def _explained(self) -> AbstractContextManager[None]:
        return explained(f"the ledger at {self._where}", f"; {self._meaning}")


def due_then(entry: Entry, due_us: int) -> Entry:
    """*entry*, due at another time; its ``expiration`` ends when it did."""
    headers = {**entry.headers, "eta": eta_of(due_us)}
    return replace(entry, properties={**entry.properties, "application_headers": headers})
