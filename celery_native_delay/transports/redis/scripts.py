"""Lua scripts that store and move delayed messages in Redis.

Times are in microseconds, by the clock of the Redis server. Each message is stored as the text
``push|publish <ttl ms> <length of each key>\\n<keys><envelope>``. A due message is pushed to a list
(a queue), or published to pub/sub channels (a fanout exchange). The TTL is for the keys; 0 means no
TTL. The lengths are in bytes. The envelope is kombu's JSON.

The scripts read the destination's keys from this text, not from ``KEYS``. Redis Cluster routes a
script by ``KEYS``, so there all keys must be in one slot.
"""

from __future__ import annotations

from ...store.redis import ADD

#: How long, in seconds, the server keeps the numbers of an outbox's batches after the last one. An
#: outbox that lost its connection comes back sooner, or gives up.
TAKEN_SECONDS = 3600

#: The beginning of each script of an outbox. The last of KEYS is the set of the batches' numbers,
#: and the last of ARGV the number of this batch.
_ONCE = f"""
if redis.call('SADD', KEYS[#KEYS], ARGV[#ARGV]) == 0 then return end
redis.call('EXPIRE', KEYS[#KEYS], {TAKEN_SECONDS})
"""

#: Stores many messages: the store's script, once.
ADD_MANY = _ONCE + ADD

#: Sends an immediate message. KEYS the list of its queue, further keys to give the TTL. ARGV TTL in
#: ms or 0, envelope.
PUSH = (
    _ONCE
    + """
redis.call('LPUSH', KEYS[1], ARGV[2])
if tonumber(ARGV[1]) > 0 then
    for at = 1, #KEYS - 1 do redis.call('PEXPIRE', KEYS[at], ARGV[1]) end
end
"""
)

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
