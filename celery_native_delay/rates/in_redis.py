"""Stores the queues of rate-limited tasks in Redis.

The Lua scripts repeat the arithmetic of ``line.py``, so that each decision takes one round trip.
The state of each queue is a string with a TTL. A sorted set holds the names of the queues, scored
by expiry time. Times are in microseconds of the Redis server's clock.
"""

from __future__ import annotations

from typing import Any

from ..records.redis_link import RedisLink, latest
from .line import KEPT_US, VERSION, RateLine, Turn, name_of, seen_longest_first
from .rate import Rate

#: Seconds that the server may take to connect, and for an answer.
PATIENCE_SECONDS = 1.0

#: Seconds without a new attempt after the server failed: the first time, and at most.
LEFT_ALONE_SECONDS = (0.5, 5.0)

#: KEYS the line, the sorted set of names, the list of start times. ARGV 1-8: name of the line and,
#: of its rate, spacing_us, ahead_us, period_us, window_us, catch_up_us, noted_each and noted; 9:
#: limit and burst as text; 10: the time in µs, or '' for the server's time.
_HEAD = f"""
local spacing, ahead, period = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local window, catch_up, each = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local noted, now = tonumber(ARGV[8]), tonumber(ARGV[10])
if not now then
    local time = redis.call('TIME')
    now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local last, shift, start_at, held, from, starts, before, total, front
local text = redis.call('GET', KEYS[1])
if text then
    last, shift, start_at, held, from, starts, before, total, front = string.match(
        text, '^{VERSION} (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ')
end
last, shift, start_at = tonumber(last or 0), tonumber(shift or 0), tonumber(start_at or 0)
held, from = tonumber(held or 0), tonumber(from or 0)
starts, before, total = tonumber(starts or 0), tonumber(before or 0), tonumber(total or 0)
if not text then redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now) end

front = tonumber(front or 0)

local function keep()
    local ends = math.max(last + shift, start_at, held) + window + catch_up + {KEPT_US}
    local record = string.format('{VERSION} %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %s',
        last, shift, start_at, held, from, starts, before, total, front, ARGV[9])
    local ttl = string.format('%.0f', (ends - now) / 1000 + 1)
    redis.call('SET', KEYS[1], record, 'PX', ttl)
    redis.call('ZADD', KEYS[2], string.format('%.0f', ends), ARGV[1])
    return ttl
end
"""

#: ARGV as above; 11: the task's place, or '' if it has none yet; 12: 0 if a task without a place
#: may not start now. Returns the wait in µs and the place; the place is -1 if the task starts now.
ASK = (
    _HEAD
    + """
local place = tonumber(ARGV[11])
local room = 0
local oldest = redis.call('LINDEX', KEYS[3], -noted)
if oldest then room = tonumber(oldest) + window end
local wait, starting = 0, false
if place then
    last = math.max(last, place + spacing)
    if front == 0 then front = place end
    local slot = place + shift - ahead
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
    place = math.max(last, now - shift)
    local earliest = math.max(held, start_at - ahead, room)
    if earliest > now then place = math.max(place, earliest - shift + ahead) end
    if last <= front then front = place end
    last = place + spacing
    wait = math.max(place + shift - ahead - now, 0)
    starting = wait == 0 and ARGV[12] == '1'
end
if starting then
    local elapsed = now - from
    if elapsed >= 2 * period then
        from, starts, before = now, 0, 0
    elseif elapsed >= period then
        from, starts, before = from + period, 0, starts
    end
    if total % each == 0 then
        redis.call('RPUSH', KEYS[3], string.format('%.0f', now))
        redis.call('LTRIM', KEYS[3], -noted, -1)
    end
    starts, total, front = starts + 1, total + 1, math.max(front, place + spacing)
    start_at = math.max(now - catch_up, start_at) + spacing
    redis.call('PEXPIRE', KEYS[3], keep())
    return {0, -1}
end
keep()
return {wait, place}
"""
)

#: ARGV as above; 11: the length of the pause in µs. Returns the place in front of all others.
HOLD = (
    _HEAD
    + """
local until_ = math.max(held, now + tonumber(ARGV[11]))
local next = math.max(now, held, start_at - ahead)
if last > front then next = math.max(next, front + shift - ahead) end
shift = shift + math.max(until_ - next, 0) + spacing
held = until_
local place = held + ahead - shift
if front == 0 or place < front then front = place end
last = math.max(last, place + spacing)
keep()
return place
"""
)


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

    def ask(
        self,
        task: str,
        key: str | None,
        rate: Rate,
        place: int | None,
        *,
        may_start: bool = True,
        now_us: int | None = None,
    ) -> Turn:
        """Decide in Redis whether a rate-limited task may start; only tests set *now_us*."""
        asked = "" if place is None else place
        wait_us, found = self._run(ASK, name_of(task, key), rate, now_us, asked, int(may_start))
        return Turn() if found < 0 else Turn(wait_us, found)

    def hold(
        self, task: str, key: str | None, rate: Rate, seconds: float, *, now_us: int | None = None
    ) -> int:
        wait_us = round(seconds * 1_000_000)
        return int(self._run(HOLD, name_of(task, key), rate, now_us, wait_us))

    def look(self, limit: int) -> list[RateLine]:
        now_us, found = latest(self._link, self._names, self._prefix, limit)
        return seen_longest_first(found, now_us)

    def close(self) -> None:
        self._link.close()

    def _run(self, script: str, name: str, rate: Rate, now_us: int | None, *more: int | str) -> Any:
        return self._link.run(
            script,
            [self._prefix + name, self._names, self._starts + name],
            name,
            rate.spacing_us,
            rate.ahead_us,
            rate.period_us,
            rate.window_us,
            rate.catch_up_us,
            rate.noted_each,
            rate.noted,
            f"{rate.limit} {rate.burst}",
            "" if now_us is None else now_us,
            *more,
        )
