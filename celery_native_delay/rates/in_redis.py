"""Stores the queues of rate-limited tasks in Redis.

The Lua scripts repeat the arithmetic of ``line.py``, so that each decision takes one round trip.
The state of each queue is a string with a TTL. A sorted set holds the names of the queues, scored
by expiry time. Times are in microseconds of the Redis server's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ..records.interface import tried_again
from ..records.redis_link import RedisLink, latest
from .line import (
    KEPT_US,
    SET_KEPT_US,
    VERSION,
    Asked,
    Line,
    RateLine,
    Turn,
    at_rate,
    name_of,
    seen_longest_first,
)
from .rate import Rate

#: Seconds that the server may take to connect, and for an answer.
PATIENCE_SECONDS = 1.0

#: Seconds without a new attempt after the server failed: the first time, and at most.
LEFT_ALONE_SECONDS = (0.5, 5.0)

_numbers_of = attrgetter(
    *("spacing_us", "ahead_us", "period_us", "window_us", "catch_up_us", "noted_each", "noted")
)

#: KEYS, for each line: the line, the sorted set of names, the list of start times. ARGV 1: the time
#: in µs, or '' for the server's time; 2: 0 if a task without a place may not start now, or the
#: length of a pause in µs; then ten for each line: its name and, of its rate, spacing_us, ahead_us,
#: period_us, window_us, catch_up_us, noted_each and noted; the end of the line's text (1 if the
#: rate was set, limit and burst); the task's place, or ''. If the text ends otherwise, the answer
#: is -2.
_HEAD = f"""
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function opened(number)
    local k, a = 3 * number, 10 * number + 2
    local spacing, ahead = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
    local period, window = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
    local catch_up = tonumber(ARGV[a + 6])
    local each, noted = tonumber(ARGV[a + 7]), tonumber(ARGV[a + 8])
    local last, shift, start_at, held, from, starts, before, total, front, pivot, unit, rate
    local text = redis.call('GET', KEYS[k + 1])
    if text then
        last, shift, start_at, held, from, starts, before, total, front, pivot, unit, rate =
            string.match(text, '^{VERSION} (-?%d+) (-?%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)'
                .. ' (-?%d+) (-?%d+) (%d+) (.*)$')
        if rate and rate ~= ARGV[a + 9] then return nil end
    else
        redis.call('ZREMRANGEBYSCORE', KEYS[k + 2], '-inf', now)
    end
    last, shift, start_at = tonumber(last or 0), tonumber(shift or 0), tonumber(start_at or 0)
    held, from = tonumber(held or 0), tonumber(from or 0)
    starts, before, total = tonumber(starts or 0), tonumber(before or 0), tonumber(total or 0)
    front, pivot, unit = tonumber(front or 0), tonumber(pivot or 0), tonumber(unit or 0)
    local step = unit == 0 and spacing or unit

    local function time_of(place)
        return shift + pivot + math.floor((place - pivot) * (spacing / step))
    end

    local function place_at(time)
        return pivot + math.ceil((time - shift - pivot) * (step / spacing))
    end

    local function keep()
        local ends = math.max(time_of(last), start_at, held) + window + catch_up + {KEPT_US}
        if string.sub(ARGV[a + 9], 1, 1) == '1' then ends = ends + {SET_KEPT_US} end
        local record = string.format(
            '{VERSION} %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %s', last, shift,
            start_at, held, from, starts, before, total, front, pivot, unit, ARGV[a + 9])
        local ttl = string.format('%.0f', (ends - now) / 1000 + 1)
        redis.call('SET', KEYS[k + 1], record, 'PX', ttl)
        redis.call('ZADD', KEYS[k + 2], string.format('%.0f', ends), ARGV[a + 1])
        return ttl
    end

    -- The wait, the place, whether the task may start, and the function that does so.
    local function ask()
        local place, room, wait, starting = tonumber(ARGV[a + 10]), 0, 0, false
        local oldest = redis.call('LINDEX', KEYS[k + 3], -noted)
        if oldest then room = tonumber(oldest) + window end
        if place then
            last = math.max(last, place + step)
            if front == 0 then front = place end
            local slot = time_of(place) - ahead
            local due, paced = math.max(slot, held), start_at - ahead
            if due > now then
                wait = due - now
            elseif paced > now then
                shift = shift + math.min(spacing, paced - slot)
                wait = paced - now
            elseif room > now then
                wait = room - now
            else
                local stood_still = now - math.max(paced, slot, room)
                if stood_still > math.max(spacing, catch_up) then shift = shift + stood_still end
                starting = true
            end
        else
            if unit ~= 0 and last <= front then
                shift, pivot, unit, step = time_of(last) - last, 0, 0, spacing
            end
            place = math.max(last, place_at(now))
            local earliest = math.max(held, start_at - ahead, room)
            if earliest > now then place = math.max(place, place_at(earliest + ahead)) end
            if last <= front then front = place end
            last = place + step
            wait = math.max(time_of(place) - ahead - now, earliest - now, 0)
            starting = wait == 0 and ARGV[2] == '1'
        end
        return wait, place, starting, function()
            local elapsed = now - from
            if elapsed >= 2 * period then
                from, starts, before = now, 0, 0
            elseif elapsed >= period then
                from, starts, before = from + period, 0, starts
            end
            if total % each == 0 then
                redis.call('RPUSH', KEYS[k + 3], string.format('%.0f', now))
                redis.call('LTRIM', KEYS[k + 3], -noted, -1)
            end
            starts, total, front = starts + 1, total + 1, math.max(front, place + step)
            start_at = math.max(now - catch_up, start_at) + spacing
            redis.call('PEXPIRE', KEYS[k + 3], keep())
        end
    end

    local function hold()
        local until_ = math.max(held, now + tonumber(ARGV[2]))
        local next = math.max(now, held, start_at - ahead)
        if last > front then next = math.max(next, time_of(front) - ahead) end
        shift = shift + math.max(until_ - next, 0) + spacing
        held = until_
        local place = place_at(held + ahead)
        if front == 0 or place < front then front = place end
        last = math.max(last, place + step)
        keep()
        return place
    end

    return {{ask = ask, hold = hold, keep = keep}}
end
"""

#: Returns the wait in µs, the place, and the number of the line in which the task waits. The place
#: is -1 if the task starts now: then every line permits the start.
ASK = (
    _HEAD
    + """
local lines, starts, longest, place, at = {}, {}, -1, -1, 0
for number = 1, #KEYS / 3 do
    lines[number] = opened(number - 1)
    if not lines[number] then return {-2, 0, number - 1} end
    local wait, found, starting, start = lines[number].ask()
    starts[number] = start
    if not starting and wait > longest then longest, place, at = wait, found, number end
end
if at == 0 then
    for _, start in ipairs(starts) do start() end
    return {0, -1, 0}
end
lines[at].keep()
return {longest, place, at - 1}
"""
)

#: Returns the place in front of all others.
HOLD = (
    _HEAD
    + """
local line = opened(0)
if not line then return {-2, 0, 0} end
return {0, line.hold(), 0}
"""
)

#: KEYS as above. Returns the time in µs, the line's text or '', and the times of the last starts.
READ = """
local time, said = redis.call('TIME'), redis.call('GET', KEYS[1])
local now = string.format('%.0f', time[1] * 1000000 + time[2])
return {now, said or '', unpack(redis.call('LRANGE', KEYS[3], 0, -1))}
"""

#: KEYS as above; ARGV 1: name of the line; 2: the text that was read; 3: the new text; 4: its end
#: in µs; 5: its TTL in ms; 6 and more: the times of the last starts. Returns 0 if the text is new.
SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[5])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
redis.call('DEL', KEYS[3])
for each = 6, #ARGV do redis.call('RPUSH', KEYS[3], ARGV[each]) end
redis.call('PEXPIRE', KEYS[3], ARGV[5])
return 1
"""


class RedisLines:
    """The queues of rate-limited tasks, stored in Redis."""

    def __init__(self, pool: Any, space: str, where: str) -> None:
        """Use redis-py's connection pool *pool*; error texts contain the URL *where*."""
        self._link = RedisLink(
            pool,
            f"the lines of rated tasks at {where}",
            timeout_seconds=PATIENCE_SECONDS,
            left_alone_seconds=LEFT_ALONE_SECONDS,
            logs=False,  # the worker logs what it means for tasks
        )
        self._prefix = f"{space}.rate."
        self._names = f"{space}.rates"
        self._starts = f"{space}.starts."
        #: The rates that were set by ``Delay.set_rate``, by line.
        self._set: dict[str, Rate] = {}

    def ask(
        self, asked: Sequence[Asked], *, may_start: bool = True, now_us: int | None = None
    ) -> Turn:
        """Decide in Redis whether a rate-limited task may start; only tests set *now_us*."""
        wait_us, found, at = self._run(ASK, asked, now_us, int(may_start))
        return Turn() if found < 0 else Turn(wait_us, found, at)

    def hold(
        self, task: str, key: str | None, rate: Rate, seconds: float, *, now_us: int | None = None
    ) -> int:
        wait_us = round(seconds * 1_000_000)
        return int(self._run(HOLD, [Asked(task, key, rate)], now_us, wait_us)[1])

    def change_rate(
        self, task: str, key: str | None, rate: Rate, *, is_set: bool, now_us: int | None = None
    ) -> Line:
        name = name_of(task, key)

        def changed() -> Line | None:
            return self._swapped(name, rate, now_us, int(is_set))

        return tried_again(name, changed)

    def look(self, limit: int) -> list[RateLine]:
        now_us, found = latest(self._link, self._names, self._prefix, limit)
        return seen_longest_first(found, now_us)

    def close(self) -> None:
        self._link.close()

    def _run(self, script: str, asked: Sequence[Asked], now_us: int | None, more: int) -> Any:
        names = [name_of(each.name, each.key) for each in asked]
        keys = [key for name in names for key in self._keys_of(name)]

        def ran() -> Any:
            arguments: list[int | str] = ["" if now_us is None else now_us, more]
            for name, each in zip(names, asked, strict=True):
                rate = self._set.get(name, each.rate)
                text = f"{int(name in self._set)} {rate.limit} {rate.burst}"
                place = "" if each.place is None else each.place
                arguments += [name, *_numbers_of(rate), text, place]
            answer = self._link.run(script, keys, *arguments)
            if answer[0] != -2:
                return answer
            self._swapped(names[answer[2]], asked[answer[2]].rate, now_us)
            return None

        return tried_again(names[0], ran)

    def _swapped(
        self, name: str, rate: Rate, now_us: int | None, is_set: int | None = None
    ) -> Line | None:
        """Give a line the *rate*, except if its rate was set. Returns None if it changed meanwhile.

        If *is_set* is not None, the line gets the rate in any case.
        """
        keys = self._keys_of(name)
        read_us, text, *log = self._link.run(READ, keys)
        at_us = int(read_us) if now_us is None else now_us
        stored = (text.decode() or None, b" ".join(log).decode())
        line, counts = at_rate(stored, rate, at_us, sets=is_set is not None)
        if is_set is not None:
            line = line._replace(is_set=is_set)
        self._set.pop(name, None)
        if line.is_set:
            self._set[name] = counts
        new, ends_us = line.encoded(counts), max(line.ends_us(counts), at_us + KEPT_US)
        if new == stored[0]:
            return line
        ttl_ms = (ends_us - at_us) // 1000 + 1
        swapped = self._link.run(SWAP, keys, name, text, new, ends_us, ttl_ms, *line.log)
        return line if swapped else None

    def _keys_of(self, name: str) -> list[str]:
        return [self._prefix + name, self._names, self._starts + name]
