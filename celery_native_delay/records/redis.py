"""Stores state about waiting tasks in the Redis in which the tasks wait.

Lua scripts make each change atomic, and use the Redis server's clock. Increase VERSION when the
data format changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from secrets import token_hex
from time import time_ns
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from kombu.utils.imports import symbol_by_name
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from ..errors import SettingsError
from ..urls import redis_py_url, without_credential_provider
from .interface import (
    ANSWER_SECONDS,
    Change,
    Decide,
    Publish,
    RecordName,
    Records,
    Snapshot,
    T,
    tried_again,
)
from .redis_keys import ROWS, IndexKeys
from .redis_link import NOW

#: The kinds of stored state that :meth:`RedisRecords.latest` can list. A sorted set per kind has
#: the names of the stored states.
LISTED_KINDS = ("rate", "run")

#: Reads a record. KEYS record, ids, due. Returns the time in µs, the text of the record or '', then
#: member and due time of each message of the record's task.
_LOOK = (
    NOW
    + """
local record = redis.call('GET', KEYS[1])
local found = {now, record or ''}
if not record or string.sub(record, 1, 1) ~= '{' then return found end
local id = cjson.decode(record).id
if not id then return found end
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. id .. ':', '(' .. id .. ';')) do
    if not string.find(member, ':', #id + 2, true) then
        found[#found + 1] = {member, redis.call('ZSCORE', KEYS[3], member)}
    end
end
return found
"""
)

#: Changes a record and its waiting messages in one step. KEYS 10-11: record, names of the record's
#: kind. ARGV 1: name of the record if its kind is listed, else '-'; 2-4: text of the record as it
#: was read, new text, TTL in ms; 5-7: name, due time in µs and content of the new message, or ''
#: three times; from 8 on: messages to remove. Returns 0, and writes nothing, if the record or a
#: message has changed since it was read. A full Redis permits a change without a new message.
_COMPARE_AND_SET = (
    ROWS
    + """
local record, listed = KEYS[10], KEYS[11]
if (call('GET', record) or '') ~= ARGV[2] then return 0 end
local gone = {}
for at = 8, #ARGV do
    if not call('ZSCORE', ids, ARGV[at]) then return 0 end
    gone[#gone + 1] = ARGV[at]
end
if ARGV[3] == '' then
    call('DEL', record)
    call('ZREM', listed, ARGV[1])
else
    if ARGV[5] == '' then call('DEL', record) end
    call('SET', record, ARGV[3], 'PX', ARGV[4])
    if ARGV[1] ~= '-' then
        if ARGV[2] == '' then call('ZREMRANGEBYSCORE', listed, '-inf', now) end
        call('ZADD', listed, string.format('%.0f', now + ARGV[4] * 1000), ARGV[1])
    end
end
if #gone > 0 then forget(gone) end
if ARGV[5] ~= '' then add(5, 5) end
return 1
"""
)


#: KEYS the sorted set of names. ARGV limit, prefix of the records' keys. Returns the time in µs,
#: then the name and the text of each record.
_LATEST = (
    NOW
    + """
local found = {now}
for _, name in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])) do
    found[#found + 1] = name
    found[#found + 1] = redis.call('GET', ARGV[2] .. name) or ''
end
return found
"""
)


class RedisRecords(Records):
    """The state about waiting tasks in Redis.

    Args:
        link: an object with the calls ``run(script, keys, *arguments)`` and ``ask(*command)``.
        keys: the names of the keys.
        added: called with the due time of each message that a change has added.
    """

    def __init__(
        self, link: Any, keys: IndexKeys, added: Callable[[int], object] = lambda due_us: None
    ) -> None:
        self._link = link
        self.keys = keys
        self._added = added

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        if not names:
            return []
        found = self._link.ask("MGET", *map(self.keys.record, names))
        return [None if text is None else text.decode() for text in found]

    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        prefix = self.keys.record(RecordName(kind, ""))
        now_us, *found = self._link.run(_LATEST, [self.keys.names(kind)], limit, prefix)
        texts = [text.decode() for text in found]
        return now_us, [pair for pair in zip(texts[::2], texts[1::2], strict=True) if pair[1]]

    def clear(self) -> int:
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self.keys.space) + ".*"
        count, cursor = 0, b"0"
        while True:
            cursor, names = self._link.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            count += self._link.ask("UNLINK", *names) if names else 0
            if int(cursor) == 0:
                return count

    def read(self, name: RecordName) -> Snapshot:
        keys = [self.keys.record(name), self.keys.ids, self.keys.due]
        now_us, text, *found = self._link.run(_LOOK, keys)
        messages = tuple((member.decode(), int(due_us or 0)) for member, due_us in found)
        return Snapshot(now_us, text.decode() or None, messages)

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        def attempt() -> Change[T] | None:
            snapshot = self.read(name)
            # The number includes the time that the answer took, so it is too large. Tasks are late
            # by that time, and never early.
            ahead_us = time_ns() // 1000 - snapshot.now_us
            change = decide(snapshot)
            gone = [member for member, _ in snapshot.messages] if change.replaces else []
            if change.look is not None:
                texts = self._link.ask("HMGET", self.keys.messages, *gone) if gone else []
                if None in texts:  # one was taken meanwhile
                    return None
                change.look([text.decode() for text in texts])
            new = None
            if change.due_us is not None:
                assert publish is not None
                new = publish(change.due_us, token_hex(16), ahead_us)
            if new is None and change.text == snapshot.text:
                return change
            if not self._compare_and_set(name, snapshot, change, new, gone):
                return None
            if new is not None:
                self._added(new.due_us)
            return change

        return tried_again(name.name, attempt).answer

    def _compare_and_set(
        self, name: RecordName, before: Snapshot, change: Change[Any], new: Any, gone: list[str]
    ) -> bool:
        keys = self.keys
        done = self._link.run(
            _COMPARE_AND_SET,
            [*keys.all, keys.record(name), keys.names(name.kind)],
            name.name if name.kind in LISTED_KINDS else "-",
            before.text or "",
            change.text or "",
            max(change.kept_us - before.now_us, 0) // 1000 + 1,
            *(("", "", "") if new is None else (new.name, new.due_us, new.entry)),
            *gone,
        )
        return bool(done)


def redis_client(url: str, *, timeout_seconds: float = ANSWER_SECONDS) -> Any:
    """Make a redis-py client without retries.

    *timeout_seconds* is for connecting, for an answer, and for asking all Sentinels. The URL with
    Sentinels is ``sentinel://user:password@host:26379,host2:26379/service/0``.
    """
    url, provider = without_credential_provider(url)
    options = {
        "credential_provider": None if provider is None else _credential_provider(provider),
        **_limits(timeout_seconds),
    }
    if not url.startswith("sentinel://"):
        return redis.Redis.from_url(redis_py_url(url), **options)
    place = urlsplit(url)
    login, _, hosts = place.netloc.rpartition("@")
    if login:
        user, _, password = login.partition(":")
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    _, service, database = place.path.split("/")
    pairs = [
        (host.partition(":")[0], int(host.partition(":")[2] or 26379)) for host in hosts.split(",")
    ]
    sentinels = _Sentinels(pairs, sentinel_kwargs=_limits(timeout_seconds / len(pairs)))
    return sentinels.master_for(service, db=int(database), **options)


def _limits(seconds: float) -> dict[str, Any]:
    """Return redis-py's options for time limits; its own retries would sleep for seconds."""
    retry = Retry(NoBackoff(), 0)
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": retry}


class _Sentinels(Sentinel):  # type: ignore[misc]
    """redis-py's Sentinel with a readable error."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError:
            raise MasterNotFoundError(
                f"no Sentinel that answers knows a primary {service_name!r} that is up"
            ) from None


def _credential_provider(name: str) -> redis.CredentialProvider:
    """Make the object that gives a user and a password for each connection, as kombu does."""
    try:
        found = symbol_by_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        found = exc
    if not isinstance(found, redis.CredentialProvider):
        raise SettingsError(
            f"expected the dotted name of a subclass of redis.CredentialProvider that can be "
            f"called without arguments, got {name!r} ({found!r}): change credential_provider in "
            f"the URL"
        )
    return found
