"""A store in Redis or Valkey. Lua scripts make each change atomic, by the server's clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from secrets import token_hex
from typing import Any

from ..errors import StoreUnavailable
from ..finding import Finding
from ..rates.in_records import RecordedLines
from ..rates.in_redis import RedisLines
from ..records.redis import ROWS, IndexKeys, RedisRecords
from ..records.redis_link import RedisLink, redis_client
from ..records.waiting import Replacement, WaitingTasks
from ..redis_server import findings
from ..urls import without_password
from .interface import (
    BATCH,
    LEASE_SECONDS,
    Census,
    ParkedRow,
    Refusal,
    Row,
    Store,
    Taken,
    TakenRow,
    WaitingRow,
    family_of,
)
from .redis_tasks import RedisTasks

#: Part of the names of all keys. Increase it when the data format changes.
VERSION = 1

#: Rows that one script writes, moves or removes. So many take a few milliseconds.
_AT_ONCE = 500

#: All scripts have the KEYS :attr:`IndexKeys.all`. ARGV name, due time in µs and entry of each row.
ADD = ROWS + "add(1, #ARGV - 2)"

#: ARGV token, lease in µs, µs that a row must be late, limit. Returns the time, the time of the
#: first row that waits or '', then name, entry and refusals of each row that is taken.
_TAKE = (
    ROWS
    + """
local function exact(number) return string.format('%.0f', number) end
local until_us = exact(now - ARGV[3])
local names = call('ZRANGE', due, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[4])
local from, mark = due, ''
if #names == 0 then  -- due tasks do not wait for the announcements of cancelled ones
    names = call('ZRANGE', cancelled, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[4])
    from, mark = cancelled, '!'
end
local first = call('ZRANGE', due, 0, 0, 'WITHSCORES')[2] or ''
local found = {exact(now), first}
for _, name in ipairs(names) do
    call('ZREM', from, name)
    call('ZREM', ids, name)
    local entry = call('HGET', messages, name)
    if entry then
        call('ZADD', taken, exact(now + ARGV[2]), name)
        call('HSET', tokens, name, mark .. ARGV[1])
        found[#found + 1] = name
        found[#found + 1] = entry
        found[#found + 1] = call('HGET', refusals, name) or ''
    end
end
return found
"""
)

#: Lets a taken row wait, in the sorted set *waits*, by default where it was before.
_FREE = """
local function free(name, at, waits)
    local is_cancelled = string.sub(call('HGET', tokens, name) or '', 1, 1) == '!'
    waits = waits or (is_cancelled and cancelled or due)
    call('ZREM', taken, name)
    call('HDEL', tokens, name)
    call('ZADD', waits, at, name)
    if waits ~= cancelled then call('ZADD', ids, 0, name) end
end
"""

#: ARGV token, number of published rows, their names, then for each row that goes on to wait:
#: name, pause in µs, 1 if parked, its refusals as text. Rows with another token stay as they are.
_SETTLE = (
    ROWS
    + _FREE
    + """
local published = tonumber(ARGV[2])
local function is_mine(name)
    local token = call('HGET', tokens, name)
    return token == ARGV[1] or token == '!' .. ARGV[1]
end
for at = 3, published + 2 do
    if is_mine(ARGV[at]) then
        call('HDEL', messages, ARGV[at])
        call('HDEL', tokens, ARGV[at])
        call('ZREM', taken, ARGV[at])
        call('HDEL', refusals, ARGV[at])
    end
end
for at = published + 3, #ARGV, 4 do
    local name = ARGV[at]
    if is_mine(name) then
        free(name, string.format('%.0f', now + ARGV[at + 1]), ARGV[at + 2] == '1' and parked)
        if ARGV[at + 3] ~= '' then call('HSET', refusals, name, ARGV[at + 3]) end
    end
end
"""
)

#: ARGV token. Lets the rows that were taken with it wait again.
_GIVE_BACK = (
    ROWS
    + _FREE
    + """
local held = call('HGETALL', tokens)
for at = 1, #held, 2 do
    if held[at + 1] == ARGV[1] or held[at + 1] == '!' .. ARGV[1] then
        free(held[at], string.format('%.0f', now))
    end
end
"""
)

#: ARGV 1 to release all parked rows, limit. Returns the number of rows that wait again.
_RELEASE = (
    ROWS
    + _FREE
    + """
local at = string.format('%.0f', now)
local released = 0
for _, from in ipairs({taken, parked}) do
    local until_us = from == parked and ARGV[1] == '1' and '+inf' or at
    for _, name in ipairs(call('ZRANGE', from, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[2])) do
        free(name, at)
        call('ZREM', parked, name)
        released = released + 1
    end
end
return released
"""
)

#: ARGV the time at which the caller gives up or '', 1 if the rows are cancelled ones of a store,
#: then of each row: name, entry as it was, new due time, new entry or '' to remove the row. Returns
#: the names of the changed rows: not of those that were taken or changed meanwhile.
_REPLACE = (
    ROWS
    + """
local done = {}
if ARGV[1] ~= '' and now > tonumber(ARGV[1]) then return done end
for at = 3, #ARGV, 4 do
    local name, new = ARGV[at], ARGV[at + 3]
    if call('HGET', messages, name) == ARGV[at + 1] and call('ZSCORE', ids, name) then
        done[#done + 1] = name
        if new == '' then
            forget({name})
        else
            unmark({name})
            call('HSET', messages, name, new)
            if ARGV[2] == '1' then
                call('ZREM', due, name)
                call('ZREM', ids, name)
                call('ZADD', cancelled, ARGV[at + 2], name)
            else
                call('ZADD', due, ARGV[at + 2], name)
                tell({name})
            end
        end
    end
end
return done
"""
)

#: ARGV lowest due time in µs, limit. Returns the due time, the name and the entry of each row; the
#: entry is '' if it is lost.
_ROWS_AFTER = (
    ROWS
    + """
local found = {}
local names = call('ZRANGE', due, ARGV[1], '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[2])
for _, name in ipairs(names) do
    found[#found + 1] = call('ZSCORE', due, name)
    found[#found + 1] = name
    found[#found + 1] = call('HGET', messages, name) or ''
end
return found
"""
)

#: Returns the time, the numbers of waiting, taken, parked and overdue rows, the first due time, and
#: the number of entries without a row. Rows whose lease has ended wait. It is a script because
#: Redis refuses even reading transactions while maxmemory is reached.
_CENSUS = (
    ROWS
    + """
local at = string.format('%.0f', now)
local first = call('ZRANGE', due, 0, 0, 'WITHSCORES')[2] or ''
local waits, held, refused = call('ZCARD', due), call('ZCARD', taken), call('ZCARD', parked)
local rows = waits + held + refused + call('ZCARD', cancelled)
local lapsed = call('ZCOUNT', taken, '-inf', at)
local late = call('ZCOUNT', due, '-inf', at) + lapsed
if lapsed > 0 and late == lapsed then first = call('ZRANGE', taken, 0, 0, 'WITHSCORES')[2] end
return {
    at, waits + lapsed, held - lapsed, refused, late, first, call('HLEN', messages) - rows,
}
"""
)

#: ARGV 1 for parked rows, else waiting ones; limit. Deletes rows, and returns their number.
_PURGE = (
    ROWS
    + """
local names = call('ZRANGE', ARGV[1] == '1' and parked or due, 0, ARGV[2] - 1)
if #names > 0 then forget(names) end
return #names
"""
)


class RedisStoreKeys(IndexKeys):
    """The names of the Redis keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(f"{namespace}.store.v{VERSION}")
        #: A set of the namespaces of all virtual hosts.
        self.family = f"{family_of(namespace)}.stores.v{VERSION}"


class RedisRows(ABC):
    """The waiting messages of one namespace, in a store or in a Redis broker."""

    client: Any
    """A plain ``redis.Redis`` that returns bytes."""

    link: Any
    """An object with the calls ``run(script, keys, *arguments)`` and ``ask(*command)``."""

    keys: IndexKeys

    what: str
    """The name of this object in errors."""

    patience_us: int | None = None
    """Microseconds until the caller of a script gives up; None if callers wait."""

    @cached_property
    def state(self) -> RedisRecords:
        return RedisRecords(self.link, self.keys, lambda due_us: self.note_added(due_us))

    @abstractmethod
    def note_added(self, due_us: int) -> None:
        """Called with the due time of each new row."""

    @abstractmethod
    def _is_dispatched(self) -> bool:
        """Return True if a process publishes due messages."""

    def _run(self, script: str, *arguments: Any) -> Any:
        return self.link.run(script, self.keys.all, *arguments)

    def add(self, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            self._run(ADD, *chain.from_iterable((row.name, row.due_us, row.entry) for row in some))
        self.note_added(min(row.due_us for row in rows))

    def replace(self, new: Sequence[Replacement], *, cancelled: bool) -> Collection[str]:
        """Change or remove waiting rows; return the names of those that were.

        The others are taken, or their entry is another one now. *cancelled* is True if a store
        publishes the rows at once, and lists them no more. Redis changes nothing after the caller
        gave up.
        """
        until = "" if self.patience_us is None else self.now_us() + self.patience_us
        done = self._run(_REPLACE, until, int(cancelled), *chain.from_iterable(new))
        names = {name.decode() for name in done}
        if names:
            self.note_added(min(one.due_us for one in new if one.name in names))
        return names

    def remove(self, key: Any, entry: str) -> bool:
        return bool(self._run(_REPLACE, "", 0, key, entry, "", ""))

    def purge(self, *, parked: bool) -> int:
        purged = 0
        while some := int(self._run(_PURGE, int(parked), _AT_ONCE)):
            purged += some
        return purged

    # --- seen ----------------------------------------------------------------------------

    def census(self) -> Census:
        return self.census_and_surplus()[0]

    def census_and_surplus(self) -> tuple[Census, int]:
        """Return the census, and the number of entries without a row; negative if some are lost."""
        at_us, waiting, taken, parked, overdue, first, surplus = self._run(_CENSUS)
        until_us = _time(first) - int(at_us) if first else None
        return Census(waiting, taken, parked, overdue, until_us, self._is_dispatched()), surplus

    def parked_entries(self, limit: int) -> list[tuple[str, str]]:
        """Return entry and reason of up to *limit* parked rows, the longest parked ones first."""
        names = self.link.ask("ZRANGE", self.keys.parked, 0, limit - 1) if limit else []
        if not names:
            return []
        entries = self.link.ask("HMGET", self.keys.messages, *names)
        told = self.link.ask("HMGET", self.keys.refusals, *names)
        return [
            (entry.decode(), (why or b"").decode().partition(" ")[2])
            for entry, why in zip(entries, told, strict=True)
            if entry is not None
        ]

    def rows_after(self, row: WaitingRow | None, *, limit: int) -> list[WaitingRow]:
        last = (0, b"") if row is None else (row.next_us, row.key)
        # Rows of the same due time as the last one come again, and are left out.
        while True:
            found = self._run(_ROWS_AFTER, last[0], limit)
            triples = zip(map(_time, found[::3]), found[1::3], found[2::3], strict=True)
            rows = [
                WaitingRow(name, next_us, entry.decode())
                for next_us, name, entry in triples
                if (next_us, name) > last and entry
            ]
            if rows or len(found) < 3 * limit:
                return rows
            limit *= 2

    def now_us(self) -> int:
        seconds, microseconds = self.link.ask("TIME")
        return int(seconds) * 1_000_000 + int(microseconds)


class RedisStore(RedisRows, Store):
    """The waiting tasks of one namespace in Redis or Valkey."""

    look_seconds = 0.1
    keys: RedisStoreKeys

    def __init__(self, url: str, namespace: str, *, timeout_seconds: float) -> None:
        Store.__init__(self)
        self.url = url
        self.where = without_password(url)
        self.what = f"the store at {self.where}"
        self._use(namespace)
        #: The token of a call of :meth:`take` that Redis has not answered.
        self._in_doubt: str | None = None
        # The limit of a call is for connecting and for the answer.
        self.client = redis_client(url, timeout_seconds=timeout_seconds / 2)
        self.patience_us = round(timeout_seconds / 2 * 1_000_000)
        pool = self.client.connection_pool
        self.link = RedisLink(pool, self.what, timeout_seconds=timeout_seconds / 2)

    def lines(self) -> RecordedLines:
        return RedisLines(self.client.connection_pool, self.keys, self.where)

    def tasks(self, delays: Any) -> WaitingTasks:
        return RedisTasks(self, delays)

    def _use(self, namespace: str) -> None:
        self.namespace = namespace
        self.keys = RedisStoreKeys(namespace)

    def _namespaces(self) -> list[str]:
        return sorted(name.decode() for name in self.link.ask("SMEMBERS", self.keys.family))

    def prepare(self) -> None:
        self.link.ask("SADD", self.keys.family, self.namespace)

    def close(self) -> None:
        self.link.close()
        self.client.close()

    def note_added(self, due_us: int) -> None:
        self.on_add(due_us)

    def _is_dispatched(self) -> bool:
        return Store._is_dispatched(self)

    # --- out -----------------------------------------------------------------------------

    def take(self, *, late_us: int = 0) -> Taken:
        if self._in_doubt is not None:
            self._run(_GIVE_BACK, self._in_doubt)
            self._in_doubt = None
        token = token_hex(16)
        lease_us = round(LEASE_SECONDS * 1_000_000)
        try:
            at_us, first_us, *found = self._run(_TAKE, token, lease_us, late_us, BATCH)
        except StoreUnavailable:  # Redis may have taken rows
            self._in_doubt = token
            raise
        triples = zip(found[::3], found[1::3], found[2::3], strict=True)
        rows = [TakenRow(name, entry.decode(), _count_of(told)) for name, entry, told in triples]
        return Taken(token, rows, int(at_us), _time(first_us) if first_us else None)

    def settle(
        self, taken: Taken, published: Sequence[TakenRow], refused: Sequence[Refusal]
    ) -> None:
        settled = {row.key for row in published} | {each.row.key for each in refused}
        names = [row.key for row in published]
        again: list[Any] = []
        for each in refused:
            told = f"{each.row.refusals + 1} {each.reason}"
            again += [each.row.key, each.pause_us, int(each.parks), told]
        for row in taken.rows:
            if row.key not in settled:
                again += [row.key, 0, 0, ""]
        self._run(_SETTLE, taken.token, len(names), *names, *again)

    def release(self, *, parked: bool = False) -> int:
        released = 0
        while some := int(self._run(_RELEASE, int(parked), _AT_ONCE)):
            released += some
        return released

    # --- seen ----------------------------------------------------------------------------

    def parked(self, limit: int) -> list[ParkedRow]:
        return ParkedRow.all_of(self.parked_entries(limit))

    def clear(self) -> int:
        self.link.ask("SREM", self.keys.family, self.namespace)
        return self.state.clear()

    def findings(self) -> list[Finding]:
        where = f"native_delay_store at {self.where}"
        with closing(redis_client(self.url)) as client:
            return list(findings(client, key=f"{self.keys.space}.trial", where=where))


def _count_of(told: bytes) -> int:
    return int(told.partition(b" ")[0] or 0)


def _time(score: bytes) -> int:
    return int(float(score))
