"""The ledger's keys in Redis, and the Lua that decides each race.

A delivery may carry a mark: *void*, its message must not be run; or *pending*, the member of the
delivery that it is to replace. The first of the two to come decides: the old one removes its
entry, and the new one is void; or the new one removes it, and the old one is void.

Rule 3 of ``redis/keys.py`` holds here, too: a change in what the keys hold is a new VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ledger.redis_index import THROW_AWAY, IndexKeys

VERSION = 1


@dataclass(frozen=True)
class LedgerKeys(IndexKeys):
    """The keys of one namespace of one virtual host: several hosts may share a Redis."""

    namespace: str
    vhost: str = "/"

    @property
    def space(self) -> str:
        """Beginning of all keys, without the last dot."""
        return f"{self.namespace}.ledger.v{VERSION}.{self.vhost}"

    @property
    def marks(self) -> str:
        """Beginning of the keys of marks; the delivery id follows."""
        return f"{self.space}.mark."

    def record(self, name: str) -> str:
        """The record of a key, for debounce, throttle or unique."""
        return f"{self.space}.key.{name}"


#: How long a mark outlives the due time of its delivery, in ms: a message may lie in its queue for
#: that long before a worker asks about it.
MARK_GRACE_MS = 30 * 86_400_000

#: An entry that is overdue by so much has lost its message, or its worker could not tell us.
STALE_AFTER_US = 86_400_000_000

#: KEYS due, messages, ids. ARGV member, due µs, entry.
RECORD = """
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], 0, ARGV[1])
"""

#: KEYS due, messages, ids. ARGV members.
FORGET = """
redis.call('ZREM', KEYS[1], unpack(ARGV))
redis.call('HDEL', KEYS[2], unpack(ARGV))
redis.call('ZREM', KEYS[3], unpack(ARGV))
"""

_REMOVE = """
local function remove(member)
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
    redis.call('ZREM', KEYS[3], member)
end
"""

#: A worker has got a message. KEYS due, messages, ids, its mark. ARGV member, what keys of marks
#: begin with. Returns 1 if it must not be run. Marks that were there live on.
RECEIVED = (
    _REMOVE
    + f"""
local mark = redis.call('GET', KEYS[4])
if mark == '' then return 1 end
if mark then
    local score = redis.call('ZSCORE', KEYS[1], mark)
    if not score then
        redis.call('SET', KEYS[4], '', 'KEEPTTL')
        return 1
    end
    local time = redis.call('TIME')
    local left = math.ceil(tonumber(score) / 1000) - tonumber(time[1]) * 1000
    local replaced = ARGV[2] .. string.match(mark, '[^:]*$')
    redis.call('SET', replaced, '', 'PX', math.max(left, 0) + {MARK_GRACE_MS})
    remove(mark)
    redis.call('DEL', KEYS[4])
    return 0
end
remove(ARGV[1])
return 0
"""
)

#: The new message of a move is with the broker. KEYS due, messages, ids, mark of the old delivery,
#: of the new one. ARGV old member, its mark's TTL in ms, new member, its due µs, its entry or ''
#: for none, TTL of its mark. Returns 1 if the new one counts.
REPLACE = (
    _REMOVE
    + """
if redis.call('EXISTS', KEYS[5]) == 0 then return 1 end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
    redis.call('SET', KEYS[5], '', 'PX', ARGV[6])
    return 0
end
remove(ARGV[1])
if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[2], ARGV[3], ARGV[5])
    redis.call('ZADD', KEYS[1], ARGV[4], ARGV[3])
    redis.call('ZADD', KEYS[3], 0, ARGV[3])
end
redis.call('SET', KEYS[4], '', 'PX', ARGV[2])
redis.call('DEL', KEYS[5])
return 1
"""
)

#: KEYS due, messages, ids. ARGV from µs, until µs, limit. Returns how many entries it removed.
SWEEP = (
    """
local members = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'BYSCORE', 'LIMIT', 0, ARGV[3])
"""
    + THROW_AWAY
)

#: The mark of a delivery whose key does not know it yet: void, if a worker gets it before.
UNKNOWN = "not known to its key"

#: KEYS record, ids, mark of a delivery that may be sent next, due. ARGV the TTL of that mark in ms,
#: '' for none. Returns now in µs, the record or '', then of each message of the task that it names
#: the member and its due time.
READ_KEY = f"""
if ARGV[1] ~= '' then redis.call('SET', KEYS[3], '{UNKNOWN}', 'PX', ARGV[1]) end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[1])
local found = {{now, record or ''}}
local id = record and cjson.decode(record).id
if not id then return found end
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. id .. ':', '(' .. id .. ';')) do
    found[#found + 1] = {{member, redis.call('ZSCORE', KEYS[4], member)}}
end
return found
"""

#: Another record, and perhaps a delivery that counts in the place of others. KEYS due, messages,
#: ids, record, mark of the new delivery. ARGV the record as it was read or '', the new one or '',
#: its TTL in ms, then of the new delivery, or '' thrice: member, due µs, entry; what keys of marks
#: begin with; the members that it takes the place of. Returns 0 if all is not as it was: then the
#: new delivery is void, and nothing else was done.
WRITE_KEY = (
    _REMOVE
    + f"""
local is_new = ARGV[4] ~= ''
local as_it_was = (redis.call('GET', KEYS[4]) or '') == ARGV[1]
if is_new and redis.call('GET', KEYS[5]) ~= '{UNKNOWN}' then as_it_was = false end
for at = 8, #ARGV do
    if not redis.call('ZSCORE', KEYS[3], ARGV[at]) then as_it_was = false end
end
if not as_it_was then
    if is_new then redis.call('SET', KEYS[5], '', 'XX', 'KEEPTTL') end
    return 0
end
if ARGV[2] == '' then
    redis.call('DEL', KEYS[4])
else
    redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
end
local time = redis.call('TIME')
for at = 8, #ARGV do
    local due = redis.call('ZSCORE', KEYS[1], ARGV[at]) or 0
    local left = math.ceil(tonumber(due) / 1000) - tonumber(time[1]) * 1000
    local mark = ARGV[7] .. string.match(ARGV[at], '[^:]*$')
    redis.call('SET', mark, '', 'PX', math.max(left, 0) + {MARK_GRACE_MS})
    remove(ARGV[at])
end
if is_new then
    redis.call('HSET', KEYS[2], ARGV[4], ARGV[6])
    redis.call('ZADD', KEYS[1], ARGV[5], ARGV[4])
    redis.call('ZADD', KEYS[3], 0, ARGV[4])
    redis.call('DEL', KEYS[5])
end
return 1
"""
)
