"""A store in Redis or Valkey. Lua scripts make each change atomic, by the server's clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import chain
from secrets import token_hex
from typing import Any, TypeVar

from redis.exceptions import RedisError

from ..errors import StoreUnavailable
from ..finding import Finding
from ..records.interface import Decide, IndexEntry, Publish, RecordName
from ..records.redis import RedisRecords, redis_client
from ..records.redis_link import NOW, RedisLink
from ..records.redis_listing import IndexKeys, RedisListing, throw_away
from ..records.waiting import Edit, Waiting, WaitingTasks
from ..redis_server import findings
from ..texts import storable
from ..urls import without_password
from .entry import StoreEntry, waiting_of
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

T = TypeVar("T")

#: Part of the names of all keys. Increase it when the data format changes.
VERSION = 1

#: Rows that one script writes, moves or removes. So many take a few milliseconds.
_AT_ONCE = 500

#: All scripts have the same KEYS, in the order of :attr:`Keys.all`.
#:
#: A script that has written may write on although maxmemory is reached. So :data:`_ADD`, which
#: fills Redis, begins with a command that needs memory; others begin with one that needs none.
_KEYS = """
local due, messages, ids, taken = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tokens, parked, refusals, cancelled = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local call = redis.call
"""

#: ARGV name, due time in µs and entry of each row.
_ADD = (
    _KEYS
    + """
for at = 1, #ARGV, 3 do
    call('HSET', messages, ARGV[at], ARGV[at + 2])
    call('ZADD', due, ARGV[at + 1], ARGV[at])
    call('ZADD', ids, 0, ARGV[at])
    call('ZREM', taken, ARGV[at])
    call('HDEL', tokens, ARGV[at])
    call('ZREM', parked, ARGV[at])
    call('HDEL', refusals, ARGV[at])
    call('ZREM', cancelled, ARGV[at])
end
"""
)

#: ARGV token, lease in µs, µs that a row must be late, limit. Returns the time, the time of the
#: first row that waits or '', then name, entry and refusals of each row that is taken.
_TAKE = (
    _KEYS
    + NOW
    + """
local function exact(number) return string.format('%.0f', number) end
local until_us = exact(now - ARGV[3])
local names = call('ZRANGE', cancelled, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[4])
local from, mark = cancelled, '!'
if #names == 0 then
    names = call('ZRANGE', due, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, ARGV[4])
    from, mark = due, ''
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
    _KEYS
    + NOW
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

#: ARGV 1 to release all parked rows, limit. Returns the number of rows that wait again.
_RELEASE = (
    _KEYS
    + NOW
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

#: ARGV name, entry as it was, new due time or '' for now, new entry or '' to remove the row, 1 if
#: the task is cancelled.
#: Returns the due time, or '' if the row was taken or changed meanwhile.
_REPLACE = (
    _KEYS
    + NOW
    + """
local name = ARGV[1]
if call('HGET', messages, name) ~= ARGV[2] or not call('ZSCORE', ids, name) then return '' end
local at = ARGV[3] == '' and string.format('%.0f', now) or ARGV[3]
call('ZREM', parked, name)
call('HDEL', refusals, name)
if ARGV[4] == '' then
    call('HDEL', messages, name)
    call('ZREM', due, name)
    call('ZREM', ids, name)
else
    call('HSET', messages, name, ARGV[4])
    if ARGV[5] == '1' then
        call('ZREM', due, name)
        call('ZREM', ids, name)
        call('ZADD', cancelled, at, name)
    else
        call('ZADD', due, at, name)
    end
end
return at
"""
)

#: Returns the first due time of a cancelled or else a waiting row, or ''.
_NEXT = (
    _KEYS
    + """
for _, key in ipairs({cancelled, due}) do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if first then return first end
end
return ''
"""
)

#: ARGV lowest due time in µs, limit. Returns the due time, the name and the entry of each row.
_ROWS = (
    _KEYS
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

#: Returns the time, the numbers of waiting, taken, parked and overdue rows, and the first due time.
_CENSUS = (
    _KEYS
    + NOW
    + """
local at = string.format('%.0f', now)
local first = call('ZRANGE', due, 0, 0, 'WITHSCORES')[2] or ''
return {
    at, call('ZCARD', due), call('ZCARD', taken), call('ZCARD', parked),
    call('ZCOUNT', due, '-inf', at), first,
}
"""
)


class RedisStoreKeys(IndexKeys):
    """The names of the Redis keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(f"{namespace}.store.v{VERSION}")
        #: Sorted sets of names: taken rows by the end of their lease, parked rows by next attempt.
        self.taken, self.parked = f"{self.space}.taken", f"{self.space}.parked"
        #: Hashes by name: the token of the dispatcher that took the row, after "!" if the row is
        #: cancelled; its refusals.
        self.tokens, self.refusals = f"{self.space}.tokens", f"{self.space}.refusals"
        #: A sorted set of names: cancelled rows, which are published at once.
        self.cancelled = f"{self.space}.cancelled"
        self.all = [
            *self.index,
            *(self.taken, self.tokens, self.parked, self.refusals, self.cancelled),
        ]
        #: A set of the namespaces of all virtual hosts.
        self.family = f"{family_of(namespace)}.stores.v{VERSION}"
        #: Told of an earlier row by a script that also serves Redis brokers.
        self.wake = f"{self.space}.wake"


class RedisStore(Store):
    """The waiting tasks of one namespace in Redis or Valkey."""

    look_seconds = 0.1

    def __init__(self, url: str, namespace: str, *, timeout_seconds: float) -> None:
        super().__init__()
        self.url = url
        self.where = without_password(url)
        self._use(namespace)
        # The limit of a call is for connecting and for the answer.
        self.client = redis_client(url, timeout_seconds=timeout_seconds / 2)
        self.link = RedisLink(
            self.client.connection_pool,
            f"the store at {self.where}",
            timeout_seconds=timeout_seconds / 2,
        )

    @cached_property
    def state(self) -> RedisState:
        return RedisState(self)

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

    def _run(self, script: str, *arguments: Any) -> Any:
        return self.link.run(script, self.keys.all, *arguments)

    # --- in and out ----------------------------------------------------------------------

    def add(self, rows: Sequence[Row]) -> None:
        for start in range(0, len(rows), _AT_ONCE):
            some = rows[start : start + _AT_ONCE]
            self._run(_ADD, *chain.from_iterable((row.name, row.due_us, row.entry) for row in some))
        self.on_add(min(row.due_us for row in rows))

    def next_due_us(self) -> int | None:
        first = self._run(_NEXT)
        return _time(first) if first else None

    def take(self, *, late_us: int = 0) -> Taken:
        token = token_hex(16)
        lease_us = round(LEASE_SECONDS * 1_000_000)
        at_us, first_us, *found = self._run(_TAKE, token, lease_us, late_us, BATCH)
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

    def census(self) -> Census:
        at_us, waiting, taken, parked, overdue, first = self._run(_CENSUS)
        first_us = _time(first) if first else None
        until_us = None if first_us is None else first_us - int(at_us)
        return Census(waiting, taken, parked, overdue, until_us, self._is_dispatched())

    def parked(self, limit: int) -> list[ParkedRow]:
        names = self.link.ask("ZRANGE", self.keys.parked, 0, limit - 1) if limit else []
        if not names:
            return []
        entries = self.link.ask("HMGET", self.keys.messages, *names)
        told = self.link.ask("HMGET", self.keys.refusals, *names)
        return ParkedRow.all_of(
            (entry.decode(), (why or b"").decode().partition(" ")[2])
            for entry, why in zip(entries, told, strict=True)
            if entry is not None
        )

    def rows_after(self, row: WaitingRow | None, *, limit: int) -> list[WaitingRow]:
        last = (0, b"") if row is None else (row.next_us, row.key)
        # Rows of the same due time as the last one come again, and are left out.
        while True:
            found = self._run(_ROWS, last[0], limit)
            triples = zip(map(_time, found[::3]), found[1::3], found[2::3], strict=True)
            rows = [
                WaitingRow(name, next_us, entry.decode())
                for next_us, name, entry in triples
                if (next_us, name) > last
            ]
            if rows or len(found) < 3 * limit:
                return rows
            limit *= 2

    def remove(self, key: Any, entry: str) -> bool:
        return bool(self._run(_REPLACE, key, entry, "", "", ""))

    def now_us(self) -> int:
        seconds, microseconds = self.link.ask("TIME")
        return int(seconds) * 1_000_000 + int(microseconds)

    def purge(self, *, parked: bool) -> int:
        source = self.keys.parked if parked else self.keys.due
        keys = [source, self.keys.messages, self.keys.ids]
        return throw_away(self.link, keys, "-inf", "+inf")

    def clear(self) -> int:
        self.link.ask("SREM", self.keys.family, self.namespace)
        return self.state.clear()

    def findings(self) -> list[Finding]:
        where = f"native_delay_store at {self.where}"
        with closing(redis_client(self.url)) as client:
            return list(findings(client, key=f"{self.keys.space}.trial", where=where))


class RedisState(RedisRecords):
    """The state of keys, rates and schedules; a change of a key and its row is one script."""

    def __init__(self, store: RedisStore) -> None:
        super().__init__(store.link, store.keys, (store.keys.wake, store.keys.parked))
        self._store = store

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        if publish is None:
            return super().change(name, decide)
        added: list[int] = []

        def entry_of(due_us: int, delivery_id: str, clock_ahead_us: int) -> IndexEntry:
            row: Row = publish(due_us, delivery_id, clock_ahead_us)
            added[:] = [row.due_us]
            return IndexEntry(row.name, row.due_us, row.entry)

        answer = super().change(name, decide, entry_of)
        for due_us in added:
            self._store.on_add(due_us)
        return answer


class RedisTasks(RedisListing):
    """Lists, cancels and reschedules the waiting tasks in Redis."""

    def __init__(self, store: RedisStore, delays: Any) -> None:
        super().__init__(store.client, store.keys)
        self._store = store
        self._delays = delays

    def _decoded(self, member: str, entry: bytes, due_us: int) -> Waiting | None:
        return waiting_of(entry.decode())

    def _replace(
        self,
        member: str,
        entry: bytes,
        due_us: int | None,
        *,
        cancelled: bool,
        edit: Edit | None = None,
    ) -> tuple[str, int] | None:
        before = StoreEntry.decoded(entry.decode()).edited(edit)
        at_us = self._store.now_us() if due_us is None else due_us
        new = ""
        if before.is_task or not cancelled:  # no other consumer would know the mark
            new = (before.revoked(at_us) if cancelled else before.moved(at_us)).encoded()
        told = "" if due_us is None else due_us
        done = self._store._run(_REPLACE, member, entry, told, new, int(cancelled))
        if not done:
            return None
        self._store.on_add(int(done))
        return member, int(done)

    def _is_taken(self, task_id: str) -> bool:
        names = self._store.link.ask("ZRANGE", self._store.keys.taken, 0, -1)
        return any(_is_of(name.decode(), task_id) for name in names)

    def _found(self, task_id: str) -> list[tuple[str, bytes, Waiting]]:
        return super()._found(storable(task_id))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as exc:
            where = f"the store at {self._store.where} does not work"
            raise StoreUnavailable(f"{where}: {str(exc).rstrip('.')}") from exc


def _count_of(told: bytes) -> int:
    return int(told.partition(b" ")[0] or 0)


def _time(score: bytes) -> int:
    return int(float(score))


def _is_of(name: str, task_id: str) -> bool:
    return name.rpartition(":")[0] == storable(task_id)
