"""Lists, searches, cancels and reschedules the waiting tasks in Redis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from ..errors import StoreUnavailable
from ..records.waiting import (
    Edit,
    Found,
    Query,
    Replacement,
    Waiting,
    WaitingTasks,
)
from ..texts import storable
from .entry import changed_text, waiting_of

#: KEYS due, messages. ARGV earliest due time or '', end of the due times or '', messages to skip,
#: messages to read, a text in lower case or '', and the last message of the call before with its
#: due time, or '' and ''. Returns the last message and its due time, or '' and '' at the end, then
#: due time and entry of each message whose entry contains the text in any case. 25 entries at once
#: fit into the processor's cache.
SEARCH = """
local call, find, lower, text = redis.call, string.find, string.lower, ARGV[5]
local until_us, last, last_us = tonumber(ARGV[2]), ARGV[6], ARGV[7]
local rank = ARGV[3]
if last ~= '' and call('ZSCORE', KEYS[1], last) == last_us then
    rank = call('ZRANK', KEYS[1], last) + 1
elseif last ~= '' then
    rank = call('ZCOUNT', KEYS[1], '-inf', '(' .. last_us)
elseif ARGV[1] ~= '' then
    rank = rank + call('ZCOUNT', KEYS[1], '-inf', '(' .. ARGV[1])
end
local rows = call('ZRANGE', KEYS[1], rank, rank + ARGV[4] - 1, 'WITHSCORES')
local found, number = {'', ''}, #rows
while until_us and number > 0 and tonumber(rows[number]) >= until_us do number = number - 2 end
if number == 2 * ARGV[4] then found = {rows[number - 1], rows[number]} end
for first = 1, number, 50 do
    local names = {}
    for at = first, math.min(first + 48, number - 1), 2 do names[#names + 1] = rows[at] end
    local entries = call('HMGET', KEYS[2], unpack(names))
    for index = 1, #entries do
        local entry = entries[index]
        if entry and (text == '' or find(lower(entry), text, 1, true)) then
            found[#found + 1] = rows[first + 2 * index - 1]
            found[#found + 1] = entry
        end
    end
end
return found
"""

#: KEYS due, messages, ids, refusals. ARGV first name and end of the names of each range.
#: Returns name, due time or '', entry and refusal or '' of each message with such a name.
FIND = """
local call, found = redis.call, {}
for at = 1, #ARGV, 2 do
    for _, name in ipairs(call('ZRANGE', KEYS[3], ARGV[at], ARGV[at + 1], 'BYLEX')) do
        local entry = call('HGET', KEYS[2], name)
        if entry then
            found[#found + 1] = name
            found[#found + 1] = call('ZSCORE', KEYS[1], name) or ''
            found[#found + 1] = entry
            found[#found + 1] = call('HGET', KEYS[4], name) or ''
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


#: KEYS due. Returns the first and the last due time, or nothing.
SPAN = """
local found = {}
for _, rank in ipairs({0, -1}) do
    found[#found + 1] = redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')[2]
end
return found
"""


class RedisTasks(WaitingTasks):
    """Lists, searches, cancels and reschedules the waiting tasks in Redis."""

    lists_cancelled = False
    """True if a cancelled row waits among the others, as on a Redis broker."""

    def __init__(self, rows: Any, delays: Any) -> None:
        """*rows* is a ``RedisRows``."""
        self._rows = rows
        self._delays = delays
        self._due, self._messages, ids = rows.keys.all[:3]
        self._found_in = [self._due, self._messages, ids, rows.keys.refusals]

    def _count(self, from_us: int | None, until_us: int | None) -> int:
        first = "-inf" if from_us is None else from_us
        end = "+inf" if until_us is None else f"({until_us}"
        return int(self._ask("ZCOUNT", self._due, first, end))

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        return [int(count) for count in self._run(COUNTS, [self._due], *edges_us)]

    def span(self) -> tuple[int, int] | None:
        found = self._run(SPAN, [self._due])
        return (int(float(found[0])), int(float(found[1]))) if found else None

    def _decoded(self, entry: bytes, due_us: int) -> Waiting | None:
        """Convert a stored message to a waiting task, or to None if the task is cancelled."""
        return waiting_of(entry.decode())

    def _now_us(self) -> int:
        with self._explained():
            now_us: int = self._rows.now_us()
        return now_us

    def _changed(self, entry: bytes, due_us: int, edit: Edit | None, *, cancelled: bool) -> str:
        return changed_text(entry.decode(), due_us, edit, cancelled=cancelled)

    def _replace(self, new: Sequence[Replacement], *, cancelled: bool) -> Collection[str]:
        apart = cancelled and not self.lists_cancelled
        with self._explained():
            done: Collection[str] = self._rows.replace(new, cancelled=apart)
        return done

    def taken(self, task_ids: Collection[str]) -> Collection[str]:
        taken = {_id_in(name) for name in self._ask("ZRANGE", self._rows.keys.taken, 0, -1)}
        return [one for one in task_ids if storable(one) in taken]

    def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        with self._explained():
            return self._rows.link.run(script, keys, *arguments)

    def _ask(self, *command: Any) -> Any:
        with self._explained():
            return self._rows.link.ask(*command)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn redis-py's errors in a ``with`` block into StoreUnavailable."""
        try:
            yield
        except (RedisError, OSError) as exc:
            said = str(exc).rstrip(".")
            raise StoreUnavailable(f"{self._rows.what} does not work: {said}") from exc

    def _found(self, task_ids: Collection[str]) -> Iterator[Found]:
        wanted = {storable(one): one for one in task_ids}
        # In ASCII ";" follows ":".
        ranges = [edge for one in wanted for edge in (f"[{one}:", f"({one};")]
        told = self._run(FIND, self._found_in, *ranges)
        for name, score, entry, refusal in zip(*[iter(told)] * 4, strict=True):
            task = self._decoded(entry, int(float(score or 0)))
            if task is not None and (task_id := wanted.get(_id_in(name))) is not None:
                if refusal:
                    task = replace(task, refusal=refusal.decode().partition(" ")[2])
                yield Found(task_id, name.decode(), entry, task)

    def _read(
        self, query: Query, after: Any, *, offset: int, limit: int
    ) -> tuple[list[Waiting], Any]:
        edges = ["" if at_us is None else at_us for at_us in (query.from_us, query.until_us)]
        last = ("", "") if after is None else after
        asked = *edges, offset, limit, query.needle, *last
        name, due_us, *found = self._run(SEARCH, [self._due, self._messages], *asked)
        tasks = (
            self._decoded(entry, int(float(score)))
            for score, entry in zip(found[::2], found[1::2], strict=True)
        )
        return list(filter(None, tasks)), (name, due_us) if name else None


def _id_in(name: bytes) -> str:
    return name.decode().rpartition(":")[0]
