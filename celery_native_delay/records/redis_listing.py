"""Looking at what waits in Redis: by due time, by task id, by what stands in it.

Three keys: a sorted set of members by due time in microseconds, a hash of their entries, and a
sorted set of the same members, all with score 0, so that those of one task id stand together. A
member is ``<task id>:<what tells messages of one id apart>``. A producer keeps all three.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from .interface import RecordName
from .waiting import ALL, Page, Query, Waiting, WaitingTasks

#: Entries that one script looks into, so that it keeps Redis from others for 1-2 ms only.
CHUNK = 500

#: KEYS due, messages. ARGV first rank, last rank, a text in lower case or ''. Returns members, due
#: times and entries that contain it in any case. 25 entries at once fit into the processor's cache.
#: Few entries match as a rule, so only their due times are asked for.
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

#: KEYS due. ARGV edges. Returns how many are due between each two of them.
COUNTS = """
local counts = {}
for at = 1, #ARGV - 1 do
    counts[at] = redis.call('ZCOUNT', KEYS[1], ARGV[at], '(' .. ARGV[at + 1])
end
return counts
"""

#: The end of a script that has put into `members` what it throws away. KEYS any sorted set,
#: messages, ids.
THROW_AWAY = """
if #members > 0 then
    redis.call('ZREM', KEYS[1], unpack(members))
    redis.call('HDEL', KEYS[2], unpack(members))
    redis.call('ZREM', KEYS[3], unpack(members))
end
return #members
"""

#: Of a member with its entry and due time in microseconds; None for what is not to be seen.
Decode = Callable[[str, bytes, int], Waiting | None]


class IndexKeys:
    """The three keys, and what all keys of their kind begin with."""

    @property
    def space(self) -> str:
        """The beginning of all keys, without the last dot."""
        raise NotImplementedError

    @property
    def due(self) -> str:
        """Sorted set: member → due time in microseconds since the epoch."""
        return f"{self.space}.due"

    @property
    def messages(self) -> str:
        """Hash: member → entry, of what is due, waits or is parked."""
        return f"{self.space}.messages"

    @property
    def marks(self) -> str:
        """The beginning of the keys of marks; the delivery id follows."""
        return f"{self.space}.mark."

    def record(self, name: RecordName) -> str:
        """String with a TTL: a record."""
        return f"{self.space}.{name.kind}.{name.name}"

    def names(self, kind: str) -> str:
        """Sorted set: names of a kind's records by the time in µs until which they are kept."""
        return f"{self.space}.{kind}s"

    @property
    def ids(self) -> str:
        """Sorted set: the members of the hash, all with score 0, so in the order of task ids."""
        return f"{self.space}.ids"

    @property
    def index(self) -> tuple[str, str, str]:
        return self.due, self.messages, self.ids


class RedisListing(WaitingTasks):
    """The waiting tasks that the three keys list."""

    def __init__(self, client: Any, keys: IndexKeys, decode: Decode) -> None:
        """*client* is a redis.Redis that returns bytes."""
        self._client = client
        self._due, self._messages, self._ids = keys.index
        self._decoded = decode
        self._counts = client.register_script(COUNTS)
        self._search = client.register_script(SEARCH)

    def count(self, query: Query = ALL) -> int:
        with self._explained():
            first, end = self._ranks(query)
            if query.is_by_time_only:
                return end - first
            return sum(1 for _ in self._matching(query, first, end))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        with self._explained():
            first, end = self._ranks(query)
            if query.is_by_time_only:
                # Those that are not to be seen are made up for by the next.
                matching = self._matching(query, first + offset, end, chunk=min(limit, CHUNK))
                return Page(tuple(islice(matching, limit)), end - first)
            matching = self._matching(query, first, end)
            return Page(tuple(islice(matching, offset, offset + limit)), None)

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        with self._explained():
            return [int(count) for count in self._counts(keys=[self._due], args=list(edges_us))]

    def span(self) -> tuple[int, int] | None:
        with self._explained():
            first = self._client.zrange(self._due, 0, 0, withscores=True)
            last = self._client.zrange(self._due, -1, -1, withscores=True)
        return (int(first[0][1]), int(last[0][1])) if first and last else None

    @abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """A block whose errors of redis-py say that the records are away."""

    def _found(self, task_id: str) -> list[tuple[str, bytes, Waiting]]:
        """Members and entries under *task_id*, parked ones too, and what people see of them.

        The due time is read first: a message that is moved in between shows up as changed.
        """
        found = []
        with self._explained():
            # ";" follows ":".
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
        """The rank of the first that is due in the range, and that behind the last."""
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
