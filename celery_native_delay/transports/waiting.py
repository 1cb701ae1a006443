"""Looking at what waits in Redis: by due time, by task id, by what stands in it.

Three keys: a sorted set of members by due time in microseconds, a hash of their entries, and a
sorted set of the same members, all with score 0, so that those of one task id stand together. A
member is ``<task id>:<what tells messages of one id apart>``. Whoever stores keeps all three.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..core.ledger import ALL, Page, Query, Waiting

#: Entries that one script looks into, so that it keeps Redis from others for 1-2 ms only.
CHUNK = 1000

#: KEYS due, messages. ARGV first rank, last rank, then texts that an entry must contain. Returns
#: members, due times and entries of those that do.
SEARCH = """
local members = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES')
local names, found = {}, {}
for at = 1, #members, 2 do names[#names + 1] = members[at] end
if #names == 0 then return found end
local entries = redis.call('HMGET', KEYS[2], unpack(names))
for index, name in ipairs(names) do
    local entry = entries[index]
    local contains = entry and true
    for at = 3, #ARGV do
        contains = contains and string.find(entry, ARGV[at], 1, true)
    end
    if contains then
        local next = #found + 1
        found[next], found[next + 1], found[next + 2] = name, members[index * 2], entry
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

#: Of a member with its entry and due time in microseconds; None for what is not to be seen.
Decode = Callable[[str, bytes, int], Waiting | None]


class Index:
    """See the module's docstring. Errors of redis-py pass through."""

    def __init__(self, client: Any, *, due: str, messages: str, ids: str, decode: Decode) -> None:
        """*client* is a redis.Redis that returns bytes."""
        self._client = client
        self._due = due
        self._messages = messages
        self._ids = ids
        self._decode = decode
        self._search = client.register_script(SEARCH)
        self._counts = client.register_script(COUNTS)

    def count(self, query: Query = ALL) -> int:
        """How many match."""
        first, end = self._ranks(query)
        if query.is_by_time_only:
            return end - first
        return sum(1 for _ in self._matching(query, first, end))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        """Those that match, earliest first; their total only where due times alone decide."""
        first, end = self._ranks(query)
        if query.is_by_time_only:
            # Those that are not to be seen are made up for by the next.
            matching = self._matching(query, first + offset, end, chunk=min(limit, CHUNK))
            return Page(tuple(islice(matching, limit)), end - first)
        matching = self._matching(query, first, end)
        return Page(tuple(islice(matching, offset, offset + limit)), None)

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        """How many are due between each two neighbours of *edges_us*."""
        return [int(count) for count in self._counts(keys=[self._due], args=list(edges_us))]

    def span(self) -> tuple[int, int] | None:
        """When the first and the last are due, microseconds since the epoch."""
        first = self._client.zrange(self._due, 0, 0, withscores=True)
        last = self._client.zrange(self._due, -1, -1, withscores=True)
        return (int(first[0][1]), int(last[0][1])) if first and last else None

    def members(self, task_id: str) -> list[str]:
        """What waits under *task_id*."""
        prefix = f"{task_id}:"
        # ";" follows ":".
        found = self._client.zrangebylex(self._ids, f"[{prefix}", f"({task_id};")
        members = [member.decode() for member in found]
        return [member for member in members if member.rpartition(":")[0] == task_id]

    def entries(self, task_id: str) -> list[tuple[str, bytes, int | None]]:
        """Member, entry and due time, None for one that is parked, of what waits under *task_id*.

        The due time is read first: a message that is moved in between shows up as changed.
        """
        found: list[tuple[str, bytes, int | None]] = []
        for member in self.members(task_id):
            score = self._client.zscore(self._due, member)
            entry = self._client.hget(self._messages, member)
            if entry is not None:
                found.append((member, entry, None if score is None else int(score)))
        return found

    def get(self, task_id: str) -> list[Waiting]:
        """What waits under *task_id*."""
        decoded = (
            self._decode(member, entry, due_us or 0)
            for member, entry, due_us in self.entries(task_id)
        )
        return [task for task in decoded if task is not None]

    # --- private -------------------------------------------------------------------------

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
        needles = [text for text in query.needles if _is_itself_in_json(text)]
        for start in range(first, end, chunk):
            last = min(start + chunk, end) - 1
            for task in self._found([start, last, *needles]):
                if query.matches(task):
                    yield task

    def _found(self, arguments: list[Any]) -> Iterator[Waiting]:
        found = self._search(keys=[self._due, self._messages], args=arguments)
        for member, score, entry in zip(found[::3], found[1::3], found[2::3], strict=True):
            task = self._decode(member.decode(), entry, int(float(score)))
            if task is not None:
                yield task


def _is_itself_in_json(text: str) -> bool:
    """Whether entries contain *text* as it is; the others must be decoded to be searched."""
    return text.isascii() and json.dumps(text) == f'"{text}"'
