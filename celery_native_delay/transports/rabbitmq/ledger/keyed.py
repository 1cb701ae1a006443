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

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha1
from secrets import token_hex
from time import time_ns
from typing import Any

from ....errors import LedgerUnavailable, NativeDelayError
from ....keyed.record import Record
from ....keyed.records import ComparedRecords
from ....keyed.rules import InBroker, Seen, Step
from ....settings import DelaySettings
from ....urls import without_password
from ...per_process import PerProcess
from .connection import ANSWER_SECONDS, connection_maker, explained
from .scripts import MARK_GRACE_MS, READ_KEY, WRITE_KEY, LedgerKeys

#: Publishes a delivery, given its due time, its id, and how far this process's clock is ahead of
#: that of the records; returns member and entry for the ledger.
Put = Callable[[int, str, int], tuple[str, bytes]]


_SHAS = {
    script: sha1(script.encode(), usedforsecurity=False).hexdigest()
    for script in (READ_KEY, WRITE_KEY)
}


class LedgerKeyRecords(ComparedRecords):
    """Records of one namespace of one virtual host, for any thread; raises LedgerUnavailable.

    On connections of its own: through redis-py's pool and client a question takes twice as long.
    """

    def __init__(self, url: str, namespace: str, vhost: str, longest_seconds: float) -> None:
        """*longest_seconds* is the longest wait of a message."""
        self._make_connection = connection_maker(url, timeout_seconds=ANSWER_SECONDS)
        from redis.exceptions import NoScriptError, RedisError

        self._no_script = NoScriptError
        self._errors = RedisError, OSError
        self._where = without_password(url)
        self._keys = LedgerKeys(namespace, vhost)
        self._mark_ms = round(longest_seconds * 1000) + MARK_GRACE_MS
        #: Connections that are not in use.
        self._idle: list[Any] = []

    def read(self, name: str) -> Seen:
        return self._seen(name, None)

    def read_to_send(self, name: str) -> Seen:
        return self._seen(name, token_hex(16))

    def _seen(self, name: str, sends: str | None) -> Seen:
        due, _, ids = self._keys.index
        keys = [self._keys.record(name), ids, f"{self._keys.marks}{sends or ''}", due]
        mark_ms = "" if sends is None else self._mark_ms
        now_us, text, *found = self._run(READ_KEY, keys, [mark_ms])
        # Read after the answer: too far ahead by the way back, so that nothing is early.
        ahead_us = time_ns() // 1000 - now_us
        record = Record.decoded(text) if text else None
        waiting = tuple(
            InBroker(member, int(due_us or 0))
            for member, due_us in found
            if record is not None and member.decode().rpartition(":")[0] == record.id
        )
        return Seen(now_us, record, waiting, sends, text, ahead_us)

    def write(self, name: str, seen: Seen, step: Step, put: Put | None) -> bool:
        record = "" if step.record is None else step.record.encoded()
        kept_ms = max(step.kept_us - seen.now_us, 0) // 1000 + 1
        message: tuple[Any, ...] = ("", "", "")
        if step.due_us is not None:
            assert put is not None
            assert seen.sends is not None
            try:
                member, entry = put(step.due_us, seen.sends, seen.clock_ahead_us)
            except NativeDelayError:
                self.leave(seen)
                raise
            except Exception:
                # It may be in a level all the same.
                left_ms = max(step.due_us - seen.now_us, 0) // 1000 + MARK_GRACE_MS
                with suppress(LedgerUnavailable):
                    self._ask("PEXPIRE", f"{self._keys.marks}{seen.sends}", left_ms)
                raise
            message = (member, step.due_us, entry)
        gone = [message.place for message in seen.waiting] if step.replaces else ()
        mark = f"{self._keys.marks}{seen.sends or ''}"
        keys = [*self._keys.index, self._keys.record(name), mark]
        arguments = [seen.text, record, kept_ms, *message, self._keys.marks, *gone]
        return bool(self._run(WRITE_KEY, keys, arguments))

    def leave(self, seen: Seen) -> None:
        if seen.sends is not None:
            self._ask("DEL", f"{self._keys.marks}{seen.sends}")

    # --- asking --------------------------------------------------------------------------

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        """The answer of *script*, which is loaded if the server does not know it."""
        words = (len(keys), *keys, *arguments)
        with self._connected() as connection:
            try:
                connection.send_command("EVALSHA", _SHAS[script], *words)
                return connection.read_response()
            except self._no_script:
                connection.send_command("EVAL", script, *words)
                return connection.read_response()

    def _ask(self, *command: Any) -> Any:
        with self._connected() as connection:
            connection.send_command(*command)
            return connection.read_response()

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A connection for one question; what fails is told as LedgerUnavailable."""
        idle = self._idle_one()
        connection = idle or self._make_connection()
        with explained(f"the ledger at {self._where}, which keeps the records of keys,"):
            try:
                if idle is None:
                    connection.connect()
                yield connection
                self._idle.append(connection)
            except self._errors:
                connection.disconnect()
                raise

    def _idle_one(self) -> Any:
        """A connection that is not in use and was not closed by the server; None if there is none.

        Nothing can have come on it but the end.
        """
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            with suppress(*self._errors):
                if not connection.can_read():
                    return connection
            connection.disconnect()


_records: PerProcess[tuple[str, str, str, float], LedgerKeyRecords] = PerProcess()


def ledger_key_records(settings: DelaySettings, vhost: str) -> LedgerKeyRecords:
    """The process's records, on the Redis that *settings* name as a ledger."""
    assert settings.ledger_url is not None
    key = settings.ledger_url, settings.namespace, vhost, settings.longest_delay_seconds
    return _records.get(key, lambda: LedgerKeyRecords(*key))
