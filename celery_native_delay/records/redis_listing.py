"""Lists and searches the waiting tasks in Redis.

Each waiting message has a content and a name, ``<task id>:<delivery id>``. If the Redis is the
broker, the name is ``<task id>:<digest>``, with a digest of the delivery tag and the destination.
Three Redis keys hold the messages:

- ``due``: a sorted set of the names, scored by due time in microseconds;
- ``messages``: a hash from the names to the contents;
- ``ids``: a sorted set of the names, all with score 0, so that Redis sorts the names by task id.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from .interface import RecordName
from .waiting import ALL, Query, Waiting, WaitingPage, WaitingTasks

#: Entries that one script searches: so many take 1-2 ms, in which Redis serves no other client.
CHUNK = 500

#: KEYS due, messages. ARGV first rank, last rank, a text in lower case or ''. Returns member, due
#: time and entry of each message whose entry contains the text in any case. 25 entries at once fit
#: into the processor's cache.
SEARCH = """
local call, find, lower, text = redis.call, string.find, string.lower, ARGV[3]
local names, found = call('ZRANGE', KEYS[1], ARGV[1], ARGV[2]), {}
for first = 1, #names, 25 do
    local last = math.min(first + 24, #names)
    local entries = call('HMGET', KEYS[2], unpack(names, first, last))
    for index = 1, #entries do
        local entry = entries[index]
        if entry and (text == '' or find(lower(entry), text, 1, true)) then
            local name, next = names[first + index - 1], #found + 1
            found[next], found[next + 1] = name, call('ZSCORE', KEYS[1], name)
            found[next + 2] = entry
        end
    end
end
return found
"""

#: KEYS due. ARGV times in µs. Returns the number of messages due between neighbouring times.
COUNTS = """
local counts = {}
for at = 1, #ARGV - 1 do
    counts[at] = redis.call('ZCOUNT', KEYS[1], ARGV[at], '(' .. ARGV[at + 1])
end
return counts
"""

#: KEYS any sorted set, messages, ids. ARGV lowest score, highest score, limit. Removes messages,
#: and returns their number.
_THROW_AWAY = """
local members = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'BYSCORE', 'LIMIT', 0, ARGV[3])
if #members > 0 then
    redis.call('ZREM', KEYS[1], unpack(members))
    redis.call('HDEL', KEYS[2], unpack(members))
    redis.call('ZREM', KEYS[3], unpack(members))
end
return #members
"""

_THROWN_AT_ONCE = 1000


class IndexKeys:
    """The names of the Redis keys that hold the waiting messages of one namespace."""

    def __init__(self, space: str) -> None:
        """Set the beginning of all these Redis keys, such as ``shop.records.v1``."""
        self.space = space
        #: A sorted set with the names of all waiting messages, scored by due time.
        self.due = f"{space}.due"
        #: A hash with the contents of all waiting messages, by name.
        self.messages = f"{space}.messages"
        #: A sorted set with the names of all waiting messages, all with score 0.
        self.ids = f"{space}.ids"
        self.index = self.due, self.messages, self.ids

    def record(self, name: RecordName) -> str:
        """Return the Redis key that holds the stored state *name*."""
        return f"{self.space}.{name.kind}.{name.name}"

    def names(self, kind: str) -> str:
        """Return the Redis key of a sorted set that lists the stored states of *kind*.

        The members are the names of the states, scored by expiry time.
        """
        return f"{self.space}.{kind}s"


class RedisListing(WaitingTasks):
    """Lists and searches the waiting tasks in Redis."""

    def __init__(self, client: Any, keys: IndexKeys) -> None:
        self._client = client
        self._due, self._messages, self._ids = keys.index
        self._counts = client.register_script(COUNTS)
        self._search = client.register_script(SEARCH)

    def count(self, query: Query = ALL) -> int:
        with self._explained():
            first, end = self._ranks(query)
            if query.is_by_time_only:
                return end - first
            return sum(1 for _ in self._matching(query, first, end))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> WaitingPage:
        with self._explained():
            first, end = self._ranks(query)
            if query.is_by_time_only:
                # The page is filled up from the next entries if some are not shown.
                matching = self._matching(query, first + offset, end, chunk=min(limit, CHUNK))
                return WaitingPage(tuple(islice(matching, limit)), end - first)
            matching = self._matching(query, first, end)
            return WaitingPage(tuple(islice(matching, offset, offset + limit)), None)

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        with self._explained():
            return [int(count) for count in self._counts(keys=[self._due], args=list(edges_us))]

    def span(self) -> tuple[int, int] | None:
        with self._explained():
            first = self._client.zrange(self._due, 0, 0, withscores=True)
            last = self._client.zrange(self._due, -1, -1, withscores=True)
        return (int(first[0][1]), int(last[0][1])) if first and last else None

    @abstractmethod
    def _decoded(self, member: str, entry: bytes, due_us: int) -> Waiting | None:
        """Convert a stored message to a waiting task, or to None if the task is cancelled."""

    @abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """Turn redis-py's errors in a ``with`` block into StoreUnavailable."""

    def _found(self, task_id: str) -> list[tuple[str, bytes, Waiting]]:
        found = []
        with self._explained():
            # In ASCII ";" follows ":".
            members = self._client.zrangebylex(self._ids, f"[{task_id}:", f"({task_id};")
            for member in map(bytes.decode, members):
                if member.rpartition(":")[0] != task_id:
                    continue
                due_us = self._client.zscore(self._due, member)
                entry = self._client.hget(self._messages, member)
                task = None if entry is None else self._decoded(member, entry, int(due_us or 0))
                if task is not None:
                    found.append((member, entry, task))
        return found

    def _ranks(self, query: Query) -> tuple[int, int]:
        """Return the first matching rank in ``due``, and the rank after the last match."""
        count = self._client.zcount
        first = 0 if query.from_us is None else count(self._due, "-inf", f"({query.from_us}")
        if query.until_us is None:
            return int(first), int(self._client.zcard(self._due))
        return int(first), int(count(self._due, "-inf", f"({query.until_us}"))

    def _matching(
        self, query: Query, first: int, end: int, *, chunk: int = CHUNK
    ) -> Iterator[Waiting]:
        keys = [self._due, self._messages]
        for start in range(first, end, chunk):
            found = self._search(keys=keys, args=[start, min(start + chunk, end) - 1, query.needle])
            for member, score, entry in zip(found[::3], found[1::3], found[2::3], strict=True):
                task = self._decoded(member.decode(), entry, int(float(score)))
                if task is not None and query.matches(task):
                    yield task


def throw_away(link: Any, keys: Sequence[str], lowest: int | str, highest: int | str) -> int:
    """Remove all messages with a score from *lowest* to *highest*, both inclusive.

    *keys* are three Redis keys: first a sorted set with the scores, then the key ``messages``, then
    the key ``ids``. The messages are removed from all three keys. Returns the number of removed
    messages.
    """
    thrown = 0
    while True:
        taken: int = link.run(_THROW_AWAY, keys, lowest, highest, _THROWN_AT_ONCE)
        thrown += taken
        if taken < _THROWN_AT_ONCE:
            return thrown
