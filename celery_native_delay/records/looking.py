"""Looking for texts in the entries of what waits, on the server that keeps them. Pure.

The entries have no index: they are all read, within Redis, by one script after the other.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product

#: More letters have too many ways to be written.
_LONGEST_PART = 3

#: What it takes Redis to look for a way to write it in an entry, to stop where it may begin, and to
#: have an entry in lower case and look there.
_LOOK_NS, _STOP_NS, _LOWER_NS = 100, 8, 3000

#: KEYS due, messages. ARGV first rank, last rank, how many texts follow that an entry must contain,
#: these; then groups, of each of which it must contain one text in any case: how many words follow,
#: and these in pairs: a way to write a part of the text, and the text in lower case, or "" if the
#: part is all of it. Looking for eight ways is cheaper than an entry in lower case. Returns
#: members, due times and entries of those that do. Most of the time goes into copying entries into
#: Lua, which hashes every byte; 25 at once fit into the processor's cache. Few are found as a rule,
#: so only theirs are the due times to be asked for.
SEARCH = """
local call, find, lower, at = redis.call, string.find, string.lower, 3
local function next_ones()
    local ones, count = {}, ARGV[at]
    for one = 1, count do ones[one] = ARGV[at + one] end
    at = at + 1 + count
    return ones
end
local exact, groups = next_ones(), {}
while at <= #ARGV do groups[#groups + 1] = next_ones() end
local names, found = call('ZRANGE', KEYS[1], ARGV[1], ARGV[2]), {}
for first = 1, #names, 25 do
    local last = math.min(first + 24, #names)
    local entries = call('HMGET', KEYS[2], unpack(names, first, last))
    for index = 1, #entries do
        local entry, lowered = entries[index], nil
        local matches = entry
        for one = 1, #exact do
            matches = matches and find(entry, exact[one], 1, true)
        end
        for number = 1, #groups do
            if not matches then break end
            local ways, missing = groups[number], nil
            matches = false
            for one = 1, #ways, 2 do
                if find(entry, ways[one], 1, true) then
                    local text = ways[one + 1]
                    if text ~= '' and text ~= missing then
                        lowered, missing = lowered or lower(entry), text
                        matches = find(lowered, text, 1, true)
                    end
                    if text == '' or matches then
                        matches = true
                        break
                    end
                end
            end
        end
        if matches then
            local name, next = names[first + index - 1], #found + 1
            found[next], found[next + 1] = name, call('ZSCORE', KEYS[1], name)
            found[next + 2] = entry
        end
    end
end
return found
"""


def is_itself_in_json(text: str) -> bool:
    """True if entries contain *text* as it is; others must be decoded to be searched."""
    return text.isascii() and json.dumps(text) == f'"{text}"'


def to_find(text: str, sample: list[str]) -> list[tuple[str, str]]:
    """The ways to write what is the cheapest to look for in entries like those of *sample*: *text*
    or a part of it; each with *text* if that must be looked for then.
    """
    parts = {
        text[at : at + length]
        for length in range(1, _LONGEST_PART + 1)
        for at in range(len(text) - length + 1)
    }

    @cache
    def stops(char: str) -> int:
        return sum(entry.count(char) for entry in sample)

    def cost_ns(part: str) -> float:
        ways = _ways_to_write(part)
        looked = sum(_LOOK_NS * len(sample) + _STOP_NS * stops(way[0]) for way in ways)
        found = sum(any(way in entry for way in ways) for entry in sample)
        return looked + found * (_LOWER_NS if part != text else 0)

    best = min(sorted(parts), key=cost_ns)
    return [(way, "" if best == text else text) for way in _ways_to_write(best)]


def _ways_to_write(part: str) -> list[str]:
    """*part* in lower, upper and mixed case."""
    return ["".join(way) for way in product(*({char, char.upper()} for char in part))]
