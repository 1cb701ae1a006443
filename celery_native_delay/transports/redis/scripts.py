"""The Lua that makes each step atomic. Times are milliseconds by the server's own clock.

An entry of the hash reads ``<kind> <ttl ms> <bytes of each key>\\n<keys><envelope>``; see
:func:`~.envelope.entry_of`. Destination keys come from the data, so they are not declared in KEYS:
a server that insists on it (cluster mode) needs them in one slot.
"""

from __future__ import annotations

#: KEYS due, messages, wake. ARGV member, due ms, entry.
#: The marker is touched only by what comes first of all, so it costs nothing in the usual case.
ADD = """
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
if redis.call('ZRANGE', KEYS[1], 0, 0)[1] == ARGV[1] then
    redis.call('ZADD', KEYS[3], ARGV[2], 'earlier')
end
"""

#: KEYS source (due, or parked), messages, parked. ARGV limit, highest score or '' for now.
#: Returns taken, delivered, parked, µs until the source's next one (-1: none), the last refusal.
#:
#: ZREMRANGEBYRANK is the first write because it needs no memory: a script that has written once may
#: go on writing although maxmemory is reached, on servers that do not know allow-oom, too.
MOVE_ON = """
local source, messages, parking = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local highest = ARGV[2] ~= '' and ARGV[2] or now
local members = redis.call('ZRANGE', source, '-inf', highest, 'BYSCORE', 'LIMIT', 0, ARGV[1])
local delivered, parked, refusal = 0, 0, ''
local heads = {}

local function head_of(line)
    local kind, ttl, lengths = string.match(line, '^(%a+) (%d+) (.+)$')
    local head = {kind = kind, ttl = tonumber(ttl), lengths = {}, total = 0}
    for length in string.gmatch(lengths, '%d+') do
        head.lengths[#head.lengths + 1] = tonumber(length)
        head.total = head.total + tonumber(length)
    end
    return head
end

local function keys_of(head, text)
    local keys, from = {}, 1
    for index, length in ipairs(head.lengths) do
        keys[index] = string.sub(text, from, from + length - 1)
        from = from + length
    end
    return keys
end

local function refused(answer)
    if type(answer) == 'table' and answer.err then
        refusal = answer.err
        return true
    end
    return false
end

local function hand_over(run)
    local keys = keys_of(run.head, run.keys)
    if run.head.kind == 'publish' then
        for _, channel in ipairs(keys) do
            for _, envelope in ipairs(run.envelopes) do
                if refused(redis.pcall('PUBLISH', channel, envelope)) then return false end
            end
        end
        return true
    end
    if refused(redis.pcall('LPUSH', keys[1], unpack(run.envelopes))) then return false end
    if run.head.ttl > 0 then
        for _, key in ipairs(keys) do redis.call('PEXPIRE', key, run.head.ttl) end
    end
    return true
end

local function finish(run)
    if not run then return end
    if hand_over(run) then
        redis.call('HDEL', messages, unpack(run.members))
        delivered = delivered + #run.members
    else
        for _, member in ipairs(run.members) do redis.call('ZADD', parking, now, member) end
        parked = parked + #run.members
    end
end

if #members > 0 then
    redis.call('ZREMRANGEBYRANK', source, 0, #members - 1)
    local entries = redis.call('HMGET', messages, unpack(members))
    local run
    for index, member in ipairs(members) do
        local entry = entries[index]
        if entry then
            local cut = string.find(entry, '\\n', 1, true)
            local line = string.sub(entry, 1, cut - 1)
            local head = heads[line]
            if not head then
                head = head_of(line)
                heads[line] = head
            end
            local keys = string.sub(entry, cut + 1, cut + head.total)
            if not run or run.head ~= head or run.keys ~= keys then
                finish(run)
                run = {head = head, keys = keys, members = {}, envelopes = {}}
            end
            run.members[#run.members + 1] = member
            run.envelopes[#run.envelopes + 1] = string.sub(entry, cut + head.total + 1)
        end
    end
    finish(run)
end

local first = redis.call('ZRANGE', source, 0, 0, 'WITHSCORES')
local wait = -1
if first[2] then
    local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
    wait = math.max(tonumber(first[2]) * 1000 - now_us, 0)
end
return {#members, delivered, parked, wait, refusal}
"""

#: In front of MOVE_ON where the server knows script flags (Redis 7): what waits must drain while
#: maxmemory keeps everybody else from writing.
ALLOW_OOM = "#!lua flags=allow-oom\n"

#: KEYS due, messages, parked. Returns waiting, parked, entries, overdue, ms until the next is due
#: (below 0: since it was; '' if nothing waits). A script, because a transaction is refused while
#: maxmemory is reached, reading ones too.
CENSUS = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {
    redis.call('ZCARD', KEYS[1]),
    redis.call('ZCARD', KEYS[3]),
    redis.call('HLEN', KEYS[2]),
    redis.call('ZCOUNT', KEYS[1], '-inf', now),
    first[2] and tonumber(first[2]) - now or '',
}
"""

#: KEYS sorted set, messages. ARGV limit. Returns how many entries it threw away.
DISCARD = """
local members = redis.call('ZRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1)
if #members > 0 then
    redis.call('ZREM', KEYS[1], unpack(members))
    redis.call('HDEL', KEYS[2], unpack(members))
end
return #members
"""
