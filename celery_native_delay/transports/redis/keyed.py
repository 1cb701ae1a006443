"""Records of keys in Redis, beside the messages that wait: one script changes both."""

from __future__ import annotations

from collections.abc import Callable
from time import time_ns
from typing import Any

from ...keyed.record import Record
from ...keyed.records import ComparedRecords
from ...keyed.rules import InBroker, Seen, Step
from ..virtual.waiting import waiting_of
from .entry import opened_entry
from .scripts import READ_KEY, WRITE_KEY
from .store import Store, refusals_explained

#: Makes the member and the entry of the message that is put in, given when it is due.
Put = Callable[[int], tuple[str, bytes]]


class RedisKeyRecords(ComparedRecords):
    """Records in one *store*; raises redis-py's errors, BrokerFull and NotPermitted."""

    needs_connection = True

    def __init__(self, store: Store) -> None:
        self._keys = store.keys
        self._client = store.client
        self._read = store.client.register_script(READ_KEY)
        self._write = store.client.register_script(WRITE_KEY)

    def read(self, name: str) -> Seen:
        keys = [self._keys.record(name), self._keys.due, self._keys.messages, self._keys.ids]
        with refusals_explained(self._keys):
            now_us, text, *found = self._read(keys=keys)
        if not text:
            return Seen(now_us, None)
        record = Record.decoded(text)
        waiting = []
        for member, due_us, entry in found:
            is_its = member.decode().rpartition(":")[0] == record.id
            if is_its and not (entry and _is_cancelled(entry)):
                waiting.append(InBroker(member, int(due_us or 0)))
        return Seen(now_us, record, tuple(waiting), text=text)

    def write(self, name: str, seen: Seen, step: Step, put: Put | None) -> bool:
        keys = self._keys
        record = "" if step.record is None else step.record.encoded()
        kept_ms = max(step.kept_us - seen.now_us, 0) // 1000 + 1
        message: tuple[Any, ...] = ("", "", "")
        if step.due_us is not None:
            assert put is not None
            member, entry = put(step.due_us)
            message = (member, step.due_us, entry)
        gone = [message.place for message in seen.waiting] if step.replaces else ()
        names = [keys.record(name), keys.due, keys.messages, keys.wake, keys.ids, keys.parked]
        with refusals_explained(keys):
            args = [seen.text or "", record, kept_ms, *message, *gone]
            return bool(self._write(keys=names, args=args))


def _is_cancelled(entry: bytes) -> bool:
    """True for a message that is on its way to be announced; looked at if its due time moved."""
    _, envelope = opened_entry(entry)
    return waiting_of(envelope, queue="", due_us=time_ns() // 1000) is None
