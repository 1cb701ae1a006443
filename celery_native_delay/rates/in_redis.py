"""Asks the lines (queues of tasks with the same rate limit and key) in Redis by one script.

The Lua script repeats the arithmetic of ``line.py``, so that each decision takes one round trip.
Reading, deciding here and writing would take two, and many workers that ask one line at the same
time would write over each other again and again. All other changes go the way of every stored
state. Times are in microseconds of the Redis server's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.interface import RecordName, T, tried_again
from ..records.redis import IndexKeys, RedisRecords
from ..records.redis_link import RedisLink
from .in_records import RecordedLines
from .line import KEPT_US, SET_KEPT_US, VERSION, Asked, Decide, Line, Turn
from .rate import Rate

#: Seconds that the server may take to connect, and for an answer.
_TIMEOUT_SECONDS = 1.0

#: Bytes of a start time in the log of a line, with the space before it: until the year 2286.
_ENTRY_BYTES = 17

#: KEYS 1: the sorted set of names; then the lines. ARGV 1: the time in µs, or '' for the server's
#: time; 2: 0 if a task without a place may not start now; then for each line: its name;
#: ``Rate.numbers``; the end of the line's text (1 if the rate was set, limit and burst); the task's
#: place, or ''.
#: Returns the number of a line whose stored text ends otherwise. If every line permits the start,
#: returns an empty text. Otherwise returns a text: the wait in µs, the place, and the number of the
#: line in which the task waits. DEL, which needs no memory, lets a full Redis take what follows.
ASK = f"""
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local lines, max = {{}}, math.max
for number = 1, #KEYS - 1 do
    local a = 4 * number - 1
    local spacing, ahead, period, window, catch_up, each, noted =
        string.match(ARGV[a + 1], '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    local front, last, start_at, held, from, starts, before, total = 0, 0, 0, 0, 0, 0, 0, 0
    local rate, log = '', ''
    local text = redis.call('GET', KEYS[number + 1])
    if text then
        front, last, start_at, held, from, starts, before, total, rate, log = string.match(text,
            '^{VERSION} (-?%d+) (-?%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([^\\n]*)\\n(.*)$')
        if rate ~= ARGV[a + 2] then return number end
    else
        redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
    end
    lines[number] = {{
        key = KEYS[number + 1], log = log, name = ARGV[a], rate = ARGV[a + 2],
        place = tonumber(ARGV[a + 3]), spacing = tonumber(spacing), ahead = tonumber(ahead),
        period = tonumber(period), window = tonumber(window), catch_up = tonumber(catch_up),
        each = tonumber(each), noted = tonumber(noted), front = tonumber(front),
        last = tonumber(last), start_at = tonumber(start_at), held = tonumber(held),
        from = tonumber(from), starts = tonumber(starts), before = tonumber(before),
        total = tonumber(total),
    }}
end

local function slot(line, place)
    local at = line.start_at - line.ahead + max(place - line.front, 0) * line.spacing
    return max(at, line.held)
end

local function keep(line)
    local ends = max(slot(line, line.last) + line.ahead, now)
    ends = ends + line.window + line.catch_up + {KEPT_US}
    if string.sub(line.rate, 1, 1) == '1' then ends = ends + {SET_KEPT_US} end
    local text = string.format('{VERSION} %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %s\\n%s',
        line.front, line.last, line.start_at, line.held, line.from, line.starts, line.before,
        line.total, line.rate, line.log)
    redis.call('DEL', line.key)
    redis.call('SET', line.key, text, 'PX', string.format('%.0f', (ends - now) / 1000 + 1))
    redis.call('ZADD', KEYS[1], string.format('%.0f', ends), line.name)
end

local longest, waits = -1, nil
for number, line in ipairs(lines) do
    if line.front >= line.last then line.start_at = max(line.start_at, now) end
    if not line.place or line.place >= line.last then
        line.place = line.last
        line.last = line.last + 1
    end
    local at = slot(line, line.place)
    local oldest = #line.log - {_ENTRY_BYTES} * line.noted + 2
    local room = 0
    if oldest > 0 then
        room = string.sub(line.log, oldest, oldest + {_ENTRY_BYTES} - 2) + line.window
    end
    if room > max(at, now) then
        line.start_at, at = line.start_at + max(room - at - line.catch_up, 0), room
    end
    if (at > now or ARGV[2] == '0') and max(at - now, 0) > longest then
        longest, waits = max(at - now, 0), number
    end
end
if waits then
    local line = lines[waits]
    if line.place < line.front then line.front = line.front - 1 end
    keep(line)
    return string.format('%.0f %.0f %d', longest, line.place, waits)
end
for _, line in ipairs(lines) do
    local elapsed = now - line.from
    if elapsed >= 2 * line.period then
        line.from, line.starts, line.before = now, 0, 0
    elseif elapsed >= line.period then
        line.from, line.starts, line.before = line.from + line.period, 0, line.starts
    end
    if line.total % line.each == 0 then
        local log = line.log .. (line.log == '' and '' or ' ') .. string.format('%.0f', now)
        line.log = string.sub(log, 1 - {_ENTRY_BYTES} * line.noted)
    end
    line.front = max(line.front, line.place) + 1
    line.last = max(line.last, line.front)
    local pace = max(line.start_at, now - line.catch_up)
    if now - line.start_at > max(line.spacing, line.catch_up) then pace = now end
    line.start_at = pace + line.spacing
    line.starts, line.total = line.starts + 1, line.total + 1
    keep(line)
end
return ''
"""


class RedisLines(RecordedLines):
    """The lines (queues of tasks with the same rate limit and key), stored in Redis."""

    def __init__(self, pool: Any, keys: IndexKeys, where: str) -> None:
        """Use redis-py's *pool*. Error texts contain the URL *where*."""
        what = f"the lines of rated tasks at {where}"
        self._link = RedisLink(pool, what, timeout_seconds=_TIMEOUT_SECONDS)
        self._keys = keys
        super().__init__(RedisRecords(self._link, keys))
        #: The rates that were set by ``Delay.set_rate``, by line.
        self._set: dict[str, Rate] = {}
        #: The time in µs, set by tests. None means the server's time.
        self.now_us: int | None = None

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        names = [each.line for each in asked]
        keys = [
            self._keys.names("rate"),
            *(self._keys.record(RecordName("rate", name)) for name in names),
        ]

        def answered() -> bytes | None:
            arguments: list[Any] = ["" if self.now_us is None else self.now_us, int(may_start)]
            for name, each in zip(names, asked, strict=True):
                rate = self._set.get(name, each.rate)
                text = f"{int(name in self._set)} {rate.limit} {rate.burst}"
                place = "" if each.place is None else each.place
                arguments += [name, rate.numbers, text, place]
            answer: bytes | int = self._link.run(ASK, keys, *arguments)
            if isinstance(answer, bytes):
                return answer
            self.change(asked[answer - 1], lambda line, *_: (line, line))
            return None

        if not (answer := tried_again(names[0], answered)):
            return Turn()
        wait_us, place, number = map(int, answer.split())
        return Turn(wait_us, place, number - 1)

    def change(self, asked: Asked, decide: Decide[T], *, sets: bool | None = None) -> T:
        changed: list[tuple[Line, Rate]] = []

        def decided(line: Line, rate: Rate, now_us: int) -> tuple[Line, T]:
            line, answer = decide(line, rate, now_us)
            changed[:] = [(line, rate)]
            return line, answer

        answer = super().change(asked, decided, sets=sets)
        ((line, rate),) = changed
        self._set.pop(asked.line, None)
        if line.is_set:
            self._set[asked.line] = rate
        return answer

    def close(self) -> None:
        self._link.close()
