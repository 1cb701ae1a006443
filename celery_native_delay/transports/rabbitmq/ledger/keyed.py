"""Records of keys in the Redis that keeps a ledger, for messages that wait in RabbitMQ.

A message in a level cannot be taken back, and two servers know of no common transaction. So:

1. as the record is read, the delivery to come is marked: void, if a worker gets it before its key
   knows it;
2. it is published and confirmed;
3. one script, if all is as it was read, writes the record, makes the new delivery count, and
   declares those void that it takes the place of. If not, the new one stays void.

A process that dies in between has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any

from ....errors import LedgerUnavailable, NativeDelayError
from ....keyed.record import Record
from ....keyed.records import KeyRecords
from ....keyed.rules import Seen, Step
from ....settings import DelaySettings
from ....urls import without_password
from ...per_process import PerProcess
from .connection import explained, ledger_client
from .scripts import MARK_GRACE_MS, READ_KEY, WRITE_KEY, LedgerKeys

#: Publishes a delivery, given when it is due and its id; returns member and entry for the ledger.
Put = Callable[[int, str], tuple[str, bytes]]


class LedgerKeyRecords(KeyRecords):
    """Records of one namespace of one virtual host, for any thread; raises LedgerUnavailable."""

    def __init__(self, url: str, namespace: str, vhost: str, longest_seconds: float) -> None:
        """*longest_seconds* is the longest wait of a message."""
        self._client = ledger_client(url)
        whose = f"the ledger at {without_password(url)}, which keeps the records of keys,"
        self._explained = partial(explained, whose)
        self._keys = LedgerKeys(namespace, vhost)
        self._mark_ms = round(longest_seconds * 1000) + MARK_GRACE_MS
        self._read = self._client.register_script(READ_KEY)
        self._write = self._client.register_script(WRITE_KEY)

    def read(self, name: str, *, to_send: bool = False) -> Seen:
        sends = token_hex(16) if to_send else None
        keys = [self._keys.record(name), self._keys.ids, f"{self._keys.marks}{sends or ''}"]
        with self._explained():
            now_us, text, members = self._read(keys=keys, args=[self._mark_ms if to_send else ""])
        if not text:
            return Seen(now_us, None, sends=sends)
        record = Record.decoded(text)
        found = (member for member in members if member.decode().rpartition(":")[0] == record.id)
        return Seen(now_us, record, tuple(found), sends)

    def write(self, name: str, seen: Seen, step: Step, put: Put | None) -> bool:
        record = "" if step.record is None else step.record.encoded()
        before = "" if seen.record is None else seen.record.encoded()
        kept_ms = max(step.kept_us - seen.now_us, 0) // 1000 + 1
        message: tuple[Any, ...] = ("", "", "")
        if step.due_us is not None:
            assert put is not None
            assert seen.sends is not None
            try:
                member, entry = put(step.due_us, seen.sends)
            except NativeDelayError:
                self.leave(seen)
                raise
            except Exception:
                # It may be in a level all the same.
                left_ms = max(step.due_us - seen.now_us, 0) // 1000 + MARK_GRACE_MS
                with suppress(LedgerUnavailable), self._explained():
                    self._client.pexpire(f"{self._keys.marks}{seen.sends}", left_ms)
                raise
            message = (member, step.due_us, entry)
        gone = seen.waiting if step.replaces else ()
        mark = f"{self._keys.marks}{seen.sends or ''}"
        keys = [*self._keys.index, self._keys.record(name), mark]
        arguments = [before, record, kept_ms, *message, self._keys.marks, *gone]
        with self._explained():
            return bool(self._write(keys=keys, args=arguments))

    def leave(self, seen: Seen) -> None:
        if seen.sends is not None:
            with self._explained():
                self._client.delete(f"{self._keys.marks}{seen.sends}")


_records: PerProcess[tuple[str, str, str, float], LedgerKeyRecords] = PerProcess()


def ledger_key_records(settings: DelaySettings, vhost: str) -> LedgerKeyRecords:
    """The process's records, on the Redis that *settings* name as a ledger."""
    assert settings.ledger_url is not None
    key = settings.ledger_url, settings.namespace, vhost, settings.longest_delay_seconds
    return _records.get(key, lambda: LedgerKeyRecords(*key))
