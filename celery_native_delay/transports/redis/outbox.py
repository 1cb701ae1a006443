"""Publish in bulk to Redis: 100 messages per Lua script call, without duplicates.

The script stores the batch's number together with the messages. After a lost connection, the
script is called again. If the number is already stored, the script stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Self
from uuid import uuid4

from redis import exceptions

from ...errors import NativeDelayError, errors_ignored
from ...records.redis_link import digest_of
from ...store.redis import ADD
from ...texts import storable
from .. import outbox
from ..virtual.outbox import Collecting, VirtualOutbox
from ..virtual.wrapping import encoded
from .keys import Destination, RedisBrokerKeys, front_of, member
from .promoter import CONNECTION_OPTIONS
from .store import refusals_explained

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

#: Errors of a wrong user or password, or of a missing right.
_NOT_LET_IN = (
    exceptions.AuthenticationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)


class RedisMessage(NamedTuple):
    """An encoded message that a bulk publisher sends to Redis."""

    destination: Destination
    front: bytes
    due_us: int  # 0 for an immediate message
    member: str  # the message's name in the sorted set
    envelope: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.envelope)

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        destination, front = self.destination, self.front
        name = member(storable(task_id), delivery_tag, destination.keys[0])
        return self.__class__(destination, front, due_us, name, envelope.encode())


class RedisCollecting(Collecting):
    def put_for(self: Any, queue: str, message: dict[str, Any]) -> RedisMessage:
        destination = self.destination(queue, message)
        due_us = self.due_of(message)
        if due_us is None:
            return RedisMessage(destination, b"", 0, "", encoded(message).encode())
        return self._waiting(destination, message, due_us)  # type: ignore[no-any-return]

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> RedisMessage:
        destination = self.broadcast(exchange, routing_key)
        return self._waiting(destination, message, due_us)  # type: ignore[no-any-return]

    def _waiting(self: Any, to: Destination, message: dict[str, Any], due_us: int) -> RedisMessage:
        row = self.delays.stored(message, to, due_us=due_us)
        front = front_of(to)
        return RedisMessage(to, front, due_us, row.name, row.entry.encode()[len(front) :])


class ScriptBatch(outbox.OutboxBatch[RedisMessage]):
    """A batch of messages that one Lua script call stores."""

    def __init__(
        self, script: str, keys: tuple[str, ...], arguments: list[Any], puts: list[RedisMessage]
    ) -> None:
        super().__init__(puts)
        self.script, self.keys, self.arguments = script, keys, arguments

    def packed(self, connection: Any, *, whole: bool = False) -> Any:
        """Encode the batch as EVALSHA, or as EVAL (with the script text) if *whole* is True."""
        name = ("EVAL", self.script) if whole else ("EVALSHA", digest_of(self.script))
        return connection.pack_command(*name, len(self.keys), *self.keys, *self.arguments)


class RedisOutbox(VirtualOutbox[RedisMessage, ScriptBatch]):
    """Publishes messages to Redis in bulk, 100 per script call."""

    lost = (
        *outbox.Outbox.lost,
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        # The server is no longer the master.
        exceptions.ReadOnlyError,
    )
    connection_options = CONNECTION_OPTIONS
    collecting = RedisCollecting
    _keys: RedisBrokerKeys

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self._name = uuid4().hex
        #: A connection of redis-py, or None.
        self._connection: Any = None
        self._number = 0

    def take(self, put: RedisMessage) -> None:
        if put.due_us:
            super().take(put)
        else:
            to = put.destination
            self._add(self._batch(PUSH, to.keys, [to.ttl_ms, put.envelope], [put]))

    def is_lasting(self, error: BaseException) -> bool:
        no_database = isinstance(error, exceptions.ResponseError) and "DB index" in str(error)
        return isinstance(error, _NOT_LET_IN) or no_database or super().is_lasting(error)

    def _packed(self, puts: list[RedisMessage]) -> Iterable[ScriptBatch]:
        arguments: list[Any] = []
        for put in puts:
            arguments += (put.member, put.due_us, put.front + put.envelope)
        return (self._batch(ADD_MANY, self._keys.all, arguments, puts),)

    def _batch(
        self, script: str, keys: tuple[str, ...], arguments: list[Any], puts: list[RedisMessage]
    ) -> ScriptBatch:
        self._number += 1
        batches = self._keys.batches(self._name)
        return ScriptBatch(script, (*keys, batches), [*arguments, self._number], puts)

    def _write(self) -> None:
        self._connect()
        while self._written < len(self._batches):
            batch = self._batches[self._written]
            self._connection.send_packed_command(batch.packed(self._connection), check_health=False)
            self._written += 1
            if batch.script is ADD_MANY:
                self.channel.delays.watch()

    def _read_down(self) -> None:
        self._write()
        while self._unanswered > self._window - self._batch_size:
            self._read_one()

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        while self._written and self._connection.can_read(timeout=timeout_seconds):
            self._read_one()

    def _read_one(self) -> None:
        batch = self._batches[0]
        try:
            with refusals_explained(self._keys):
                self._connection.read_response()
        except self.lost:
            raise
        except exceptions.NoScriptError:
            # The server answers this batch after the batches that are already sent.
            self._batches.insert(self._written - 1, self._batches.popleft())
            command = batch.packed(self._connection, whole=True)
            self._connection.send_packed_command(command, check_health=False)
            return
        except (NativeDelayError, exceptions.ResponseError) as exc:
            self._refuse(str(exc), batch.puts)
        self._batches.popleft()
        self._written -= 1
        self._unanswered -= len(batch.puts)

    def _prepare(self, channel: Any) -> None:
        channel.delays.prepare()
        self._keys = channel.delays.keys
        connection = channel.pool.make_connection()
        connection.connect()
        self._connection = connection

    def _forget(self) -> None:
        with suppress(exceptions.ResponseError):
            self.channel.delays.own.client.delete(self._keys.batches(self._name))

    def _lose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with errors_ignored():  # the connection is given up anyway
                connection.disconnect()
        super()._lose()
