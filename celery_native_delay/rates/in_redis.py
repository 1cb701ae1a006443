"""Stores the lines (queues of tasks with the same rate limit and key) in Redis.

The Lua scripts repeat the arithmetic of ``line.py``, so that each decision takes one round trip.
The state of each line is a string with a TTL. A sorted set holds the names of the lines, scored by
expiry time. Times are in microseconds of the Redis server's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.interface import T, tried_again
from ..records.redis_link import RedisLink, latest
from .line import (
    KEPT_US,
    SET_KEPT_US,
    VERSION,
    Asked,
    Decide,
    RateLine,
    Turn,
    at_rate,
    seen_longest_first,
)
from .rate import Rate

#: Seconds that the server may take to connect, and for an answer.
_TIMEOUT_SECONDS = 1.0


#: KEYS 1: the sorted set of names; then for each line: the line, the list of start times. ARGV 1:
#: the time in µs, or '' for the server's time; 2: 0 if a task without a place may not start now;
#: then for each line: its name; ``Rate.numbers``; the end of the line's text (1 if the rate was
#: set, limit and burst); the task's place, or ''.
#: Returns the number of a line whose stored text ends otherwise. If every line permits the start,
#: returns an empty text. Otherwise returns a text: the wait in µs, the place, and the number of the
#: line in which the task waits.
ASK = f"""
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local lines, max = {{}}, math.max
for number = 1, (#KEYS - 1) / 2 do
    local a = 4 * number - 1
    local spacing, ahead, period, window, catch_up, each, noted =
        string.match(ARGV[a + 1], '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
    local front, last, start_at, held, from, starts, before, total, rate = 0, 0, 0, 0, 0, 0, 0, 0
    local text = redis.call('GET', KEYS[2 * number])
    if text then
        front, last, start_at, held, from, starts, before, total, rate = string.match(text,
            '^{VERSION} (-?%d+) (-?%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$')
        if rate ~= ARGV[a + 2] then return number end
    else
        redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
    end
    lines[number] = {{
        key = KEYS[2 * number], log = KEYS[2 * number + 1], name = ARGV[a], rate = ARGV[a + 2],
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
    local text = string.format('{VERSION} %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %s', line.front,
        line.last, line.start_at, line.held, line.from, line.starts, line.before, line.total,
        line.rate)
    local ttl = string.format('%.0f', (ends - now) / 1000 + 1)
    redis.call('SET', line.key, text, 'PX', ttl)
    redis.call('ZADD', KEYS[1], string.format('%.0f', ends), line.name)
    return ttl
end

local longest, waits = -1, nil
for number, line in ipairs(lines) do
    if line.front >= line.last then line.start_at = max(line.start_at, now) end
    if not line.place or line.place >= line.last then
        line.place = line.last
        line.last = line.last + 1
    end
    local at = slot(line, line.place)
    local oldest = redis.call('LINDEX', line.log, -line.noted)
    local room = oldest and oldest + line.window or 0
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
        redis.call('RPUSH', line.log, string.format('%.0f', now))
        redis.call('LTRIM', line.log, -line.noted, -1)
    end
    line.front = max(line.front, line.place) + 1
    line.last = max(line.last, line.front)
    local pace = max(line.start_at, now - line.catch_up)
    if now - line.start_at > max(line.spacing, line.catch_up) then pace = now end
    line.start_at = pace + line.spacing
    line.starts, line.total = line.starts + 1, line.total + 1
    redis.call('PEXPIRE', line.log, keep(line))
end
return ''
"""

#: KEYS 1: the line; 2: the list of start times; 3: the set of names. ARGV 1: the name of the line;
#: 2: the text that was read; 3: the new text; 4: its end in µs; 5: its TTL in ms; 6 and more: the
#: times of the last starts. Returns 0 if the text has changed since it was read.
SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[5])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
redis.call('DEL', KEYS[2])
for each = 6, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[each]) end
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
"""


class RedisLines:
    """The lines (queues of tasks with the same rate limit and key), stored in Redis."""

    def __init__(self, pool: Any, space: str, where: str) -> None:
        """Use redis-py's *pool*. Keys begin with *space*. Error texts contain the URL *where*."""
        self._link = RedisLink(
            pool,
            f"the lines of rated tasks at {where}",
            timeout_seconds=_TIMEOUT_SECONDS,
        )
        self._prefix = f"{space}.rate."
        self._names = f"{space}.rates"
        self._starts = f"{space}.starts."
        #: The rates that were set by ``Delay.set_rate``, by line.
        self._set: dict[str, Rate] = {}
        #: The time in µs, set by tests. None means the server's time.
        self.now_us: int | None = None

    def ask(self, asked: Sequence[Asked], *, may_start: bool = True) -> Turn:
        names = [each.line for each in asked]
        keys = [self._names, *(key for name in names for key in self._keys_of(name))]

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

    def look(self, limit: int) -> list[RateLine]:
        now_us, found = latest(self._link, self._names, self._prefix, limit)
        return seen_longest_first(found, now_us)

    def close(self) -> None:
        self._link.close()

    def change(self, asked: Asked, decide: Decide[T], *, sets: bool | None = None) -> T:
        name, keys = asked.line, self._keys_of(asked.line)

        def changed() -> T | None:
            text = self._link.ask("GET", keys[0]) or b""
            log = b" ".join(self._link.ask("LRANGE", keys[1], 0, -1))
            seconds, micros = map(int, self._link.ask("TIME"))
            now_us = self.now_us or seconds * 1_000_000 + micros
            stored = text.decode(), log.decode()
            line, rate = at_rate(stored, asked.rate, now_us, sets=sets)
            line, answer = decide(line, rate, now_us)
            self._set.pop(name, None)
            if line.is_set:
                self._set[name] = rate
            ends_us = line.ends_us(rate, now_us)
            new = [line.encoded(rate), ends_us, (ends_us - now_us) // 1000 + 1, *line.log]
            swapped = self._link.run(SWAP, [*keys, self._names], name, text, *new)
            return answer if swapped else None

        return tried_again(name, changed)

    def _keys_of(self, name: str) -> list[str]:
        return [self._prefix + name, self._starts + name]
