"""The names of the Redis keys of waiting messages, and the Lua functions that write them.

Each waiting message has a content and a name, ``<task id>:<delivery id>``. If the Redis is the
broker, the name is ``<task id>:<digest>``, with a digest of the delivery tag and the destination.
"""

from __future__ import annotations

from .interface import RecordName
from .redis_link import NOW


class IndexKeys:
    """The names of the Redis keys that hold the waiting messages of one namespace.

    Each sorted set and each hash has the names of messages.
    """

    def __init__(self, space: str) -> None:
        """Set the beginning of all these Redis keys, such as ``shop.records.v1``."""
        self.space = space
        #: A sorted set of all waiting messages, scored by due time in microseconds.
        self.due = f"{space}.due"
        #: A hash with the contents of all messages.
        self.messages = f"{space}.messages"
        #: A sorted set of all waiting messages, all with score 0, so that Redis sorts them by task
        #: id.
        self.ids = f"{space}.ids"
        #: Sorted sets: taken messages by the end of their lease, parked ones by the next attempt.
        #: On a Redis broker none is taken, and a parked one has the time of its last attempt.
        self.taken, self.parked = f"{space}.taken", f"{space}.parked"
        #: Hashes: the token of the dispatcher that took the message, after "!" if it is cancelled;
        #: and the refusals.
        self.tokens, self.refusals = f"{space}.tokens", f"{space}.refusals"
        #: A sorted set of cancelled messages of a store, which are published at once.
        self.cancelled = f"{space}.cancelled"
        #: A sorted set that gets a member when a message becomes the first to be due. Workers of a
        #: Redis broker wait for it with BZPOPMIN.
        self.wake = f"{space}.wake"
        #: The KEYS of all scripts that begin with :data:`ROWS`; further keys may follow.
        self.all = (
            *(self.due, self.messages, self.ids, self.taken, self.tokens, self.parked),
            *(self.refusals, self.cancelled, self.wake),
        )

    def record(self, name: RecordName) -> str:
        """Return the Redis key that holds the stored state *name*."""
        return f"{self.space}.{name.kind}.{name.name}"

    def names(self, kind: str) -> str:
        """Return the Redis key of a sorted set that lists the stored states of *kind*.

        The members are the names of the states, scored by expiry time.
        """
        return f"{self.space}.{kind}s"


#: The beginning of the scripts that write messages. ``add`` reads name, due time in µs and content
#: of each message from ARGV.
#:
#: A script that has written may write on although maxmemory is reached. So ``add``, which fills
#: Redis, begins with a command that needs memory; other scripts begin with one that needs none.
ROWS = (
    """
local due, messages, ids, taken = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tokens, parked, refusals, cancelled, wake = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local call = redis.call

local function unmark(names)
    call('ZREM', taken, unpack(names))
    call('HDEL', tokens, unpack(names))
    call('ZREM', parked, unpack(names))
    call('HDEL', refusals, unpack(names))
    call('ZREM', cancelled, unpack(names))
end

local function forget(names)
    call('ZREM', due, unpack(names))
    call('ZREM', ids, unpack(names))
    call('HDEL', messages, unpack(names))
    unmark(names)
end

local function tell(names)
    local first = call('ZRANGE', due, 0, 0, 'WITHSCORES')
    for _, name in ipairs(names) do
        if name == first[1] then call('ZADD', wake, first[2], 'earlier') end
    end
end

local function add(first, last)
    local names, entries, scores, zeros = {}, {}, {}, {}
    for at = first, last, 3 do
        local next = #scores + 1
        names[#names + 1] = ARGV[at]
        entries[next], entries[next + 1] = ARGV[at], ARGV[at + 2]
        scores[next], scores[next + 1] = ARGV[at + 1], ARGV[at]
        zeros[next], zeros[next + 1] = 0, ARGV[at]
    end
    call('HSET', messages, unpack(entries))
    call('ZADD', due, unpack(scores))
    call('ZADD', ids, unpack(zeros))
    unmark(names)
    tell(names)
end
"""
    + NOW
)
