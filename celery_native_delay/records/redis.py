"""Stores state about waiting tasks in the Redis in which the tasks wait.

Lua scripts make each change atomic, and use the Redis server's clock. Each waiting message has a
content and a name, ``<task id>:<delivery id>``. If the Redis is the broker, the name is
``<task id>:<digest>``, with a digest of the delivery tag and the destination.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from secrets import token_hex
from time import time_ns
from typing import Any

from .interface import (
    Change,
    Decide,
    Publish,
    RecordName,
    Records,
    Snapshot,
    T,
    tried_again,
)
from .redis_link import NOW

#: The kinds of stored state that :meth:`RedisRecords.latest` can list. A sorted set per kind has
#: the names of the stored states.
LISTED_KINDS = ("rate", "run")


class IndexKeys:
    """The names of the Redis keys that hold the waiting messages of one namespace.

    Each sorted set and each hash has the names of messages.
    """

    def __init__(self, space: str) -> None:
        """Set the beginning of all these Redis keys, such as ``shop.records.v1``."""
        self.space = space
        #: A sorted set of all waiting messages, scored by due time in microseconds.
        self.due = f"{space}.due"
        #: A hash with the contents of all messages.
        self.messages = f"{space}.messages"
        #: A sorted set of all waiting messages, all with score 0, so that Redis sorts them by task
        #: id.
        self.ids = f"{space}.ids"
        #: Sorted sets: taken messages by the end of their lease, parked ones by the next attempt.
        #: On a Redis broker none is taken, and a parked one has the time of its last attempt.
        self.taken, self.parked = f"{space}.taken", f"{space}.parked"
        #: Hashes: the token of the dispatcher that took the message, after "!" if it is cancelled;
        #: and the refusals.
        self.tokens, self.refusals = f"{space}.tokens", f"{space}.refusals"
        #: A sorted set of cancelled messages of a store, which are published at once.
        self.cancelled = f"{space}.cancelled"
        #: A sorted set that gets a member when a message becomes the first to be due. Workers of a
        #: Redis broker wait for it with BZPOPMIN.
        self.wake = f"{space}.wake"
        #: The KEYS of all scripts that begin with :data:`ROWS`; further keys may follow.
        self.all = (
            *(self.due, self.messages, self.ids, self.taken, self.tokens, self.parked),
            *(self.refusals, self.cancelled, self.wake),
        )

    def record(self, name: RecordName) -> str:
        """Return the Redis key that holds the stored state *name*."""
        return f"{self.space}.{name.kind}.{name.name}"

    def names(self, kind: str) -> str:
        """Return the Redis key of a sorted set that lists the stored states of *kind*.

        The members are the names of the states, scored by expiry time.
        """
        return f"{self.space}.{kind}s"


#: The beginning of the scripts that write messages. ``add`` reads name, due time in µs and content
#: of each message from ARGV.
#:
#: A script that has written may write on although maxmemory is reached. So ``add``, which fills
#: Redis, begins with a command that needs memory; other scripts begin with one that needs none.
ROWS = (
    """
local due, messages, ids, taken = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tokens, parked, refusals, cancelled, wake = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local call = redis.call

local function unmark(names)
    call('ZREM', taken, unpack(names))
    call('HDEL', tokens, unpack(names))
    call('ZREM', parked, unpack(names))
    call('HDEL', refusals, unpack(names))
    call('ZREM', cancelled, unpack(names))
end

local function forget(names)
    call('ZREM', due, unpack(names))
    call('ZREM', ids, unpack(names))
    call('HDEL', messages, unpack(names))
    unmark(names)
end

local function tell(names)
    local first = call('ZRANGE', due, 0, 0, 'WITHSCORES')
    for _, name in ipairs(names) do
        if name == first[1] then call('ZADD', wake, first[2], 'earlier') end
    end
end

local function add(first, last)
    local names, entries, scores, zeros = {}, {}, {}, {}
    for at = first, last, 3 do
        local next = #scores + 1
        names[#names + 1] = ARGV[at]
        entries[next], entries[next + 1] = ARGV[at], ARGV[at + 2]
        scores[next], scores[next + 1] = ARGV[at + 1], ARGV[at]
        zeros[next], zeros[next + 1] = 0, ARGV[at]
    end
    call('HSET', messages, unpack(entries))
    call('ZADD', due, unpack(scores))
    call('ZADD', ids, unpack(zeros))
    unmark(names)
    tell(names)
end
"""
    + NOW
)

#: Reads a record. KEYS record, ids, due. Returns the time in µs, the text of the record or '', then
#: member and due time of each message of the record's task.
_LOOK = (
    NOW
    + """
local record = redis.call('GET', KEYS[1])
local found = {now, record or ''}
if not record or string.sub(record, 1, 1) ~= '{' then return found end
local id = cjson.decode(record).id
if not id then return found end
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. id .. ':', '(' .. id .. ';')) do
    if not string.find(member, ':', #id + 2, true) then
        found[#found + 1] = {member, redis.call('ZSCORE', KEYS[3], member)}
    end
end
return found
"""
)

#: Changes a record and its waiting messages in one step. KEYS 10-11: record, names of the record's
#: kind. ARGV 1: name of the record if its kind is listed, else '-'; 2-4: text of the record as it
#: was read, new text, TTL in ms; 5-7: name, due time in µs and content of the new message, or ''
#: three times; from 8 on: messages to remove. Returns 0, and writes nothing, if the record or a
#: message has changed since it was read. A full Redis permits a change without a new message.
_COMPARE_AND_SET = (
    ROWS
    + """
local record, listed = KEYS[10], KEYS[11]
if (call('GET', record) or '') ~= ARGV[2] then return 0 end
local gone = {}
for at = 8, #ARGV do
    if not call('ZSCORE', ids, ARGV[at]) then return 0 end
    gone[#gone + 1] = ARGV[at]
end
if ARGV[3] == '' then
    call('DEL', record)
    call('ZREM', listed, ARGV[1])
else
    if ARGV[5] == '' then call('DEL', record) end
    call('SET', record, ARGV[3], 'PX', ARGV[4])
    if ARGV[1] ~= '-' then
        if ARGV[2] == '' then call('ZREMRANGEBYSCORE', listed, '-inf', now) end
        call('ZADD', listed, string.format('%.0f', now + ARGV[4] * 1000), ARGV[1])
    end
end
if #gone > 0 then forget(gone) end
if ARGV[5] ~= '' then add(5, 5) end
return 1
"""
)


#: KEYS the sorted set of names. ARGV limit, prefix of the records' keys. Returns the time in µs,
#: then the name and the text of each record.
_LATEST = (
    NOW
    + """
local found = {now}
for _, name in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])) do
    found[#found + 1] = name
    found[#found + 1] = redis.call('GET', ARGV[2] .. name) or ''
end
return found
"""
)


class RedisRecords(Records):
    """The state about waiting tasks in Redis.

    Args:
        link: an object with the calls ``run(script, keys, *arguments)`` and ``ask(*command)``.
        keys: the names of the keys.
        added: called with the due time of each message that a change has added.
    """

    def __init__(
        self, link: Any, keys: IndexKeys, added: Callable[[int], object] = lambda due_us: None
    ) -> None:
        self._link = link
        self.keys = keys
        self._added = added

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        if not names:
            return []
        found = self._link.ask("MGET", *map(self.keys.record, names))
        return [None if text is None else text.decode() for text in found]

    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        prefix = self.keys.record(RecordName(kind, ""))
        now_us, *found = self._link.run(_LATEST, [self.keys.names(kind)], limit, prefix)
        texts = [text.decode() for text in found]
        return now_us, [pair for pair in zip(texts[::2], texts[1::2], strict=True) if pair[1]]

    def clear(self) -> int:
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self.keys.space) + ".*"
        count, cursor = 0, b"0"
        while True:
            cursor, names = self._link.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            count += self._link.ask("UNLINK", *names) if names else 0
            if int(cursor) == 0:
                return count

    def read(self, name: RecordName) -> Snapshot:
        keys = [self.keys.record(name), self.keys.ids, self.keys.due]
        now_us, text, *found = self._link.run(_LOOK, keys)
        messages = tuple((member.decode(), int(due_us or 0)) for member, due_us in found)
        return Snapshot(now_us, text.decode() or None, messages)

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        def attempt() -> Change[T] | None:
            snapshot = self.read(name)
            # The number includes the time that the answer took, so it is too large. Tasks are late
            # by that time, and never early.
            ahead_us = time_ns() // 1000 - snapshot.now_us
            change = decide(snapshot)
            gone = [member for member, _ in snapshot.messages] if change.replaces else []
            if change.look is not None:
                texts = self._link.ask("HMGET", self.keys.messages, *gone) if gone else []
                if None in texts:  # one was taken meanwhile
                    return None
                change.look([text.decode() for text in texts])
            new = None
            if change.due_us is not None:
                assert publish is not None
                new = publish(change.due_us, token_hex(16), ahead_us)
            if new is None and change.text == snapshot.text:
                return change
            if not self._compare_and_set(name, snapshot, change, new, gone):
                return None
            if new is not None:
                self._added(new.due_us)
            return change

        return tried_again(name.name, attempt).answer

    def _compare_and_set(
        self, name: RecordName, before: Snapshot, change: Change[Any], new: Any, gone: list[str]
    ) -> bool:
        keys = self.keys
        done = self._link.run(
            _COMPARE_AND_SET,
            [*keys.all, keys.record(name), keys.names(name.kind)],
            name.name if name.kind in LISTED_KINDS else "-",
            before.text or "",
            change.text or "",
            max(change.kept_us - before.now_us, 0) // 1000 + 1,
            *(("", "", "") if new is None else (new.name, new.due_us, new.entry)),
            *gone,
        )
        return bool(done)
