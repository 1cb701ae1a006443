"""Stores state about waiting tasks, and a list of waiting messages, in Redis.

Lua scripts make each change atomic, and use the Redis server's clock. Increase VERSION when the
data format changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any

import redis
from kombu.utils.imports import symbol_by_name
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from ..errors import RecordsUnavailable, SettingsError
from ..finding import Finding
from ..redis_server import findings
from ..urls import redis_py_url, without_credential_provider, without_password
from .interface import (
    ANSWER_SECONDS,
    MARK_GRACE_MS,
    PATIENCE_SECONDS,
    STALE_AFTER_US,
    UNDECIDED,
    VOID,
    CompareAndSet,
    IndexEntry,
    MessageState,
    RecordName,
    Snapshot,
    delivery_of,
)
from .redis_link import NOW, RedisLink, latest
from .redis_listing import IndexKeys, RedisListing, throw_away
from .replacing import ComparedRecords, RecordedTasks, Republishes
from .waiting import Waiting, WaitingTasks

VERSION = 1

#: The kinds of stored state that :meth:`RedisRecords.latest` can list. A sorted set per kind has
#: the names of the stored states.
LISTED_KINDS = ("rate",)

#: Adds a message to the list. KEYS due, messages, ids. ARGV member, due time in µs, entry.
_NOTE = """
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
"""

_REMOVE = """
local function remove(member)
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
    redis.call('ZREM', KEYS[3], member)
end
"""

#: Removes a message from the list. KEYS due, messages, ids. ARGV member.
_FORGET = _REMOVE + "remove(ARGV[1])"

#: A worker has received a message. KEYS due, messages, ids, its mark. ARGV member. Returns 1 if the
#: worker must not run the message.
_RECEIVED = (
    _REMOVE
    + f"""
local mark = redis.call('GET', KEYS[4])
if mark == '{UNDECIDED}' then redis.call('SET', KEYS[4], '{VOID}', 'KEEPTTL') end
remove(ARGV[1])
return mark and 1 or 0
"""
)

#: Reads a record, and marks a new message as undecided. KEYS record, ids, mark, due. ARGV TTL of
#: the mark in ms, or '' for no mark. Returns the time in µs, the text of the record or '', then
#: member and due time of each message of the record's task.
_LOOK = (
    NOW
    + f"""
if ARGV[1] ~= '' then redis.call('SET', KEYS[3], '{UNDECIDED}', 'PX', ARGV[1]) end
local record = redis.call('GET', KEYS[1])
local found = {{now, record or ''}}
if not record or string.sub(record, 1, 1) ~= '{{' then return found end
local id = cjson.decode(record).id
if not id then return found end
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. id .. ':', '(' .. id .. ';')) do
    if not string.find(member, ':', #id + 2, true) then
        found[#found + 1] = {{member, redis.call('ZSCORE', KEYS[4], member)}}
    end
end
return found
"""
)

#: Makes a :class:`CompareAndSet`. KEYS due, messages, ids, record, names of the record's kind, mark
#: of the new message; on a Redis broker, whose messages have no marks, also wake and parked.
#: ARGV 1: '' without a record, its name if its kind is listed, else '-'; 2-4: text of the record as
#: it was read, new text, TTL in ms; 5-7: member, due time in µs and entry of the new message, or ''
#: three times; 8: prefix of marks; from 9 on: members that become void, or that a broker removes.
#: Returns 0 if the record, a mark or a member has changed: then the new message becomes void, and
#: nothing else is written. Commands that need memory come first.
_COMPARE_AND_SET = (
    _REMOVE
    + NOW
    + f"""
local has_record, is_new, in_broker = ARGV[1] ~= '', ARGV[5] ~= '', #KEYS > 6
local as_it_was = not has_record or (redis.call('GET', KEYS[4]) or '') == ARGV[2]
local has_mark = is_new and not in_broker
if has_mark and redis.call('GET', KEYS[6]) ~= '{UNDECIDED}' then as_it_was = false end
for at = 9, #ARGV do
    if not redis.call('ZSCORE', KEYS[3], ARGV[at]) then as_it_was = false end
end
if not as_it_was then
    if has_mark then redis.call('SET', KEYS[6], '{VOID}', 'XX', 'KEEPTTL') end
    return 0
end
if has_record and ARGV[3] == '' then
    redis.call('DEL', KEYS[4])
    redis.call('ZREM', KEYS[5], ARGV[1])
elseif has_record then
    redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[4])
    if ARGV[1] ~= '-' then
        if ARGV[2] == '' then redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now) end
        redis.call('ZADD', KEYS[5], string.format('%.0f', now + ARGV[4] * 1000), ARGV[1])
    end
end
for at = 9, #ARGV do
    if in_broker then
        redis.call('ZREM', KEYS[8], ARGV[at])
    else
        local due = redis.call('ZSCORE', KEYS[1], ARGV[at]) or 0
        local left = math.max(math.ceil((tonumber(due) - now) / 1000), 0)
        local mark = ARGV[8] .. string.match(ARGV[at], '[^:]*$')
        redis.call('SET', mark, '{VOID}', 'PX', left + {MARK_GRACE_MS})
    end
    remove(ARGV[at])
end
if is_new and ARGV[7] ~= '' then
    redis.call('HSET', KEYS[2], ARGV[5], ARGV[7])
    redis.call('ZADD', KEYS[1], ARGV[6], ARGV[5])
    redis.call('ZADD', KEYS[3], 0, ARGV[5])
    if in_broker and redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[5] then
        redis.call('ZADD', KEYS[7], ARGV[6], 'earlier')
    end
end
if has_mark then redis.call('DEL', KEYS[6]) end
return 1
"""
)


class RedisRecords(ComparedRecords):
    """The state about waiting tasks, and the list of waiting messages, in Redis."""

    _of_broker: tuple[str, ...] = ()

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.where = without_password(url)
        self.keys = IndexKeys(f"{owner}.records.v{VERSION}")
        self.missed = 0
        self.pool = redis_client(url).connection_pool
        what = f"the records at {self.where}"
        #: One link for publishes and workers, which wait 0.3 s, and one for people, who wait 5 s.
        self._quick = RedisLink(self.pool, what, timeout_seconds=PATIENCE_SECONDS)
        self._patient: Any = RedisLink(self.pool, what, timeout_seconds=ANSWER_SECONDS)

    # --- records -------------------------------------------------------------------------

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        if not names:
            return []
        found = self._patient.ask("MGET", *map(self.keys.record, names))
        return [None if text is None else text.decode() for text in found]

    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        prefix = self.keys.record(RecordName(kind, ""))
        return latest(self._patient, self.keys.names(kind), prefix, limit)

    def clear(self) -> int:
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self.keys.space) + ".*"
        count, cursor = 0, b"0"
        while True:
            cursor, names = self._patient.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            count += self._patient.ask("UNLINK", *names) if names else 0
            if int(cursor) == 0:
                return count

    def close(self) -> None:
        self._quick.close()
        self._patient.close()

    # --- publishing and receiving ----------------------------------------------------------

    def note(self, listed: IndexEntry) -> None:
        if not self._quick.post(_NOTE, self.keys.index, *listed):
            self.missed += 1

    def forget(self, member: str) -> None:
        if not self._quick.post(_FORGET, self.keys.index, member):
            self.missed += 1

    def flush(self, timeout_seconds: float | None = None) -> None:
        self._quick.flush(timeout_seconds)

    def connect(self) -> bool:
        return self._quick.connect()

    def received(self, member: str) -> bool | None:
        try:
            keys = [*self.keys.index, self.keys.marks + delivery_of(member)]
            return not self._quick.run(_RECEIVED, keys, member)
        except RecordsUnavailable:
            self.missed += 1
            return None

    # --- replacing -----------------------------------------------------------------------

    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        record = self.keys.space if name is None else self.keys.record(name)
        keys = [record, self.keys.ids, f"{self.keys.marks}{undecided or ''}", self.keys.due]
        now_us, text, *found = self._patient.run(_LOOK, keys, mark_ms if undecided else "")
        messages = tuple((member.decode(), int(due_us or 0)) for member, due_us in found)
        return Snapshot(now_us, text.decode() or None, messages)

    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        mark = self.keys.marks + delivery_id
        self._patient.ask("PEXPIRE", mark, left_ms) if left_ms else self._patient.ask("DEL", mark)

    def compare_and_set(self, step: CompareAndSet) -> bool:
        keys, name, new = self.keys, step.name, step.new
        is_listed = name is not None and name.kind in LISTED_KINDS
        touched = [
            *keys.index,
            keys.space if name is None else keys.record(name),
            keys.space if name is None else keys.names(name.kind),
            keys.marks + ("" if new is None else delivery_of(new.member)),
            *self._of_broker,
        ]
        done = self._patient.run(
            _COMPARE_AND_SET,
            touched,
            "" if name is None else (name.name if is_listed else "-"),
            step.before or "",
            step.after or "",
            step.kept_ms,
            *(new or ("", "", "")),
            keys.marks,
            *step.gone,
        )
        return bool(done)

    def state_of(self, member: str) -> MessageState:
        mark = self._patient.ask("GET", self.keys.marks + delivery_of(member))
        if mark == VOID.encode():
            return MessageState.VOID
        # A message with the mark "undecided" is about to replace another message.
        is_known = mark or self._patient.ask("HEXISTS", self.keys.messages, member)
        return MessageState.KNOWN if is_known else MessageState.UNKNOWN

    def tasks(self, republishes: Republishes) -> WaitingTasks:
        return RedisTasks(self, republishes)

    # --- upkeep --------------------------------------------------------------------------

    def sweep(self) -> int:
        until_us = time_ns() // 1000 - STALE_AFTER_US
        return throw_away(self._patient, self.keys.index, "-inf", until_us)

    def purge(self) -> None:
        throw_away(self._patient, self.keys.index, time_ns() // 1000, "+inf")

    def findings(self) -> Iterator[Finding]:
        with redis_client(self.url) as client:
            yield from findings(
                client,
                key=f"{self.keys.space}.trial",
                where=f"native_delay_records at {self.where}",
            )


class RedisTasks(RecordedTasks, RedisListing):
    def __init__(self, index: RedisRecords, republishes: Republishes) -> None:
        super().__init__(redis_client(index.url), index.keys)
        self.index: RedisRecords = index
        self._delays = republishes

    def close(self) -> None:
        self._client.close()

    def _decoded(self, member: str, entry: bytes, due_us: int) -> Waiting | None:
        return self._delays.waiting(member, entry.decode(), due_us)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self.index.flush()
        try:
            yield
        except (RedisError, OSError) as exc:
            where = f"the records at {self.index.where} are unreachable"
            raise RecordsUnavailable(f"{where}: {str(exc).rstrip('.')}") from exc


def redis_client(url: str) -> Any:
    """Make a redis-py client with a timeout of 5 s and no retries."""
    url, provider = without_credential_provider(url)
    return redis.Redis.from_url(
        redis_py_url(url),
        credential_provider=None if provider is None else _credential_provider(provider),
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def _credential_provider(name: str) -> redis.CredentialProvider:
    """Make the object that gives a user and a password for each connection, as kombu does."""
    try:
        found = symbol_by_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        found = exc
    if not isinstance(found, redis.CredentialProvider):
        raise SettingsError(
            f"expected the dotted name of a subclass of redis.CredentialProvider that can be "
            f"called without arguments, got {name!r} ({found!r}): change credential_provider in "
            f"the URL"
        )
    return found
