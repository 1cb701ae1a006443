"""Store the waiting messages in one Redis database.

The scripts need a plain redis-py client, because kombu's client adds ``global_keyprefix`` only to
the first key of a script.

Times are in microseconds, by the clock of the Redis server. Each message is stored as the text
``push|publish <ttl ms> <length of each key>\\n<keys><envelope>``. A due message is pushed to a list
(a queue), or published to pub/sub channels (a fanout exchange). The TTL is for the keys; 0 means no
TTL. The lengths are in bytes. The envelope is kombu's JSON.

The scripts read the destination's keys from this text, not from ``KEYS``. Redis Cluster routes a
script by ``KEYS``, so there all keys must be in one slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ResponseError

from ...errors import BrokerFull, NotPermitted
from ...records.redis import RedisRecords
from ...records.redis_link import digest_of
from ...redis_server import RIGHTS
from ...store.interface import Row
from ...store.redis import ADD, RedisRows
from .keys import RedisBrokerKeys

#: How many messages one script moves into their queues. More are hardly faster, and block other
#: clients of Redis for longer: 0.45 ms for 100, 4.7 ms for 1000.
BATCH = 100

#: How many seconds a promoter's heartbeat is valid.
_SHOWN_SECONDS = 30

#: Delivers due messages, or tries parked messages again. KEYS source (due, or parked), messages,
#: parked, ids. ARGV limit, highest score or '' for now. Returns numbers of messages taken,
#: delivered and parked, the time in µs, the score of the next message (-1: none), and the last
#: error.
#:
#: ZREMRANGEBYRANK is the first write because it needs no memory: after its first write a script may
#: write on although maxmemory is reached.
#:
#: Messages are grouped by destination, which is the first part of their entries.
HAND_OVER = """
local source, messages, parking, ids = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local highest = ARGV[2] ~= '' and ARGV[2] or now
local members = redis.call('ZRANGE', source, '-inf', highest, 'BYSCORE', 'LIMIT', 0, ARGV[1])
local done, parked, refusal = {}, 0, ''
local sub = string.sub
local groups, by_front, totals = {}, {}, {}

local function total_of(line)
    local total = 0
    for length in string.gmatch(string.match(line, '^%a+ %d+ (.+)$'), '%d+') do
        total = total + tonumber(length)
    end
    return total
end

local function group_of(entry)
    local cut = string.find(entry, '\\n', 1, true)
    local line = sub(entry, 1, cut - 1)
    local total = totals[line]
    if not total then
        total = total_of(line)
        totals[line] = total
    end
    local front = sub(entry, 1, cut + total)
    local group = by_front[front]
    if not group then
        group = {front = front, line = line, at = cut + total, count = 0, members = {},
            envelopes = {}}
        by_front[front] = group
        groups[#groups + 1] = group
    end
    return group
end

local function refused(answer)
    if type(answer) == 'table' and answer.err then
        refusal = answer.err
        return true
    end
    return false
end

local function promote(group)
    local kind, ttl, lengths = string.match(group.line, '^(%a+) (%d+) (.+)$')
    local keys, from = {}, #group.line + 2
    for length in string.gmatch(lengths, '%d+') do
        keys[#keys + 1] = sub(group.front, from, from + length - 1)
        from = from + length
    end
    if kind == 'publish' then
        for _, channel in ipairs(keys) do
            for _, envelope in ipairs(group.envelopes) do
                if refused(redis.pcall('PUBLISH', channel, envelope)) then return false end
            end
        end
        return true
    end
    if refused(redis.pcall('LPUSH', keys[1], unpack(group.envelopes))) then return false end
    if tonumber(ttl) > 0 then
        for _, key in ipairs(keys) do redis.call('PEXPIRE', key, ttl) end
    end
    return true
end

if #members > 0 then
    redis.call('ZREMRANGEBYRANK', source, 0, #members - 1)
    local entries = redis.call('HMGET', messages, unpack(members))
    local group
    for index = 1, #members do
        local entry = entries[index]
        if entry then
            if not group or sub(entry, 1, group.at) ~= group.front then group = group_of(entry) end
            local count = group.count + 1
            group.count = count
            group.members[count] = members[index]
            group.envelopes[count] = sub(entry, group.at + 1)
        end
    end
    for _, group in ipairs(groups) do
        if promote(group) then
            for _, member in ipairs(group.members) do done[#done + 1] = member end
        else
            for _, member in ipairs(group.members) do redis.call('ZADD', parking, now, member) end
            parked = parked + group.count
        end
    end
    if #done > 0 then
        redis.call('HDEL', messages, unpack(done))
        redis.call('ZREM', ids, unpack(done))
    end
end

local first = redis.call('ZRANGE', source, 0, 0, 'WITHSCORES')
return {#members, #done, parked, now, first[2] and tonumber(first[2]) or -1, refusal}
"""


@dataclass(frozen=True)
class HandedOver:
    """The result of the Lua script that moves due messages to their queues."""

    taken: int  # messages that left the sorted set
    delivered: int
    parked: int  # messages that their queue rejected
    now_us: int  # by the server's clock
    next_us: int | None  # the next due time
    refusal: str  # the last error

    @property
    def wait_us(self) -> int | None:
        """Return the microseconds until the next due time, or None if no message waits."""
        return None if self.next_us is None else max(self.next_us - self.now_us, 0)


class BrokerLink:
    """A plain redis-py client; raises BrokerFull or NotPermitted if Redis refuses a call."""

    def __init__(self, client: Any, keys: RedisBrokerKeys) -> None:
        self._client = client
        self._keys = keys
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a Lua script on the Redis server, and return the script's answer."""
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        with refusals_explained(self._keys):
            return self._scripts[script](keys=keys, args=arguments)

    def ask(self, *command: Any) -> Any:
        with refusals_explained(self._keys):
            return self._client.execute_command(*command)


class RedisBrokerStore(RedisRows):
    """The waiting messages of one ``native_delay_namespace`` in a Redis broker."""

    keys: RedisBrokerKeys

    def __init__(self, client: Any, keys: RedisBrokerKeys) -> None:
        """*client* is a plain ``redis.Redis`` that returns bytes."""
        self.client = client
        self.keys = keys
        self.link = BrokerLink(client, keys)
        self.what = f"the Redis broker with the keys {keys.space}.*"

    @cached_property
    def state(self) -> RedisRecords:
        state = super().state
        state.needs_connection = True
        return state

    def note_added(self, due_us: int) -> None:
        """Do nothing: the scripts wake a promoter."""

    def _is_dispatched(self) -> bool:
        return bool(self.link.ask("EXISTS", self.keys.promoting))

    def add_command(self, row: Row) -> tuple[str, list[Any]]:
        """Return the redis-py method and arguments that store a message in a pipeline."""
        # A pipeline cannot load a missing script, so the method is not ``evalsha``.
        keys = self.keys.all
        return "eval", [ADD, len(keys), *keys, row.name, row.due_us, row.entry]

    # --- many out ------------------------------------------------------------------------

    def promote(self) -> HandedOver:
        """Move up to :data:`BATCH` due messages to their queues."""
        return self._hand_over(self.keys.due, "")

    def rescue(self, *, before_us: int) -> HandedOver:
        """Retry up to :data:`BATCH` undeliverable messages that last failed before *before_us*."""
        return self._hand_over(self.keys.parked, f"({before_us}")

    def _hand_over(self, source: str, highest: str) -> HandedOver:
        keys = [source, self.keys.messages, self.keys.parked, self.keys.ids]
        return _handed_over(self.link.run(HAND_OVER, keys, BATCH, highest))

    # --- the heartbeat of a promoter --------------------------------------------------------

    def show_promoting(self) -> None:
        """Write the heartbeat that shows that this process moves due messages."""
        key = self.keys.promoting
        if not self.client.expire(key, _SHOWN_SECONDS):
            self.client.set(key, "", ex=_SHOWN_SECONDS)


class Rounds:
    """Uses a Redis connection of its own to call the script that moves due messages."""

    def __init__(self, connection: Any, keys: RedisBrokerKeys) -> None:
        """*connection* is a redis-py connection."""
        self._connection = connection
        self._keys = keys
        words = (4, keys.due, keys.messages, keys.parked, keys.ids, BATCH, "")
        self._evalsha = connection.pack_command("EVALSHA", digest_of(HAND_OVER), *words)
        self._eval = connection.pack_command("EVAL", HAND_OVER, *words)
        #: The monotonic times of the script calls that the server has not answered yet.
        self._asked: deque[float] = deque()
        self.last_asked_at = 0.0
        """The monotonic time at which the last answered script call was sent."""

    def connect(self) -> None:
        """Connect to Redis, or through Sentinel to the current master."""
        self._connection.connect()

    @property
    def asked_count(self) -> int:
        return len(self._asked)

    def ask(self) -> None:
        self._asked.append(monotonic())
        self._connection.send_packed_command(self._evalsha, check_health=False)

    def answer(self) -> HandedOver:
        """Wait for the result of the oldest unanswered script call, and return the result."""
        while True:
            try:
                with refusals_explained(self._keys):
                    reply = self._connection.read_response()
            except NoScriptError:
                # All calls are equal, so this call may come after the calls that are already sent.
                self._connection.send_packed_command(self._eval, check_health=False)
                continue
            self.last_asked_at = self._asked.popleft()
            return _handed_over(reply)

    def close(self) -> None:
        self._connection.disconnect()


def _handed_over(reply: Any) -> HandedOver:
    taken, delivered, parked, now_us, next_us, refusal = reply
    told = refusal.decode("utf-8", "replace")
    return HandedOver(taken, delivered, parked, now_us, None if next_us < 0 else next_us, told)


@contextmanager
def refusals_explained(keys: RedisBrokerKeys) -> Iterator[None]:
    """In a ``with`` block, turn permission and memory errors into NotPermitted and BrokerFull."""
    try:
        yield
    except ResponseError as exc:
        # In a script such an error has no class of its own: texts of Redis 7.0 and of later ones.
        told = "The user executing the script", "ACL failure in script"
        if isinstance(exc, NoPermissionError) or str(exc).startswith(told):
            raise NotPermitted(
                f"{exc}. Delayed delivery needs +@all or at least {RIGHTS} +@blocking on "
                f"~{keys.space}.*: grant them with ACL SETUSER"
            ) from exc
        # Before Redis 7 a script's error has no class of its own.
        if isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in str(exc):
            raise BrokerFull(
                f"Redis has reached maxmemory and takes no more delayed messages; nothing was "
                f"sent, and waiting messages are still delivered: {exc}"
            ) from exc
        raise
