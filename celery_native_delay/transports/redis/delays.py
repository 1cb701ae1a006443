"""Publish delayed messages on a Redis channel, with one Lua script call per message."""

from __future__ import annotations

import json
from time import time_ns
from typing import Any
from uuid import uuid4

import redis

from ...due_time import milliseconds_up
from ...finding import Finding
from ...records.publishing import RecordedPublish
from ...records.redis import RedisRecords
from ...records.waiting import HELD
from ...redis_server import Server, check_server, clock_ahead_seconds, keeping, server_of
from ...settings import DelaySettings
from ...store.entry import StoreEntry
from ...store.interface import Row
from ..status import Status, warn_if_nothing_promotes
from ..virtual.channel import VirtualDelays
from ..virtual.from_store import collected
from ..virtual.from_store import entry_of as entry_of_message
from ..virtual.wrapping import due_then, encoded, id_of, wrapped
from .keys import Destination, RedisBrokerKeys, entry_of, member_of, opened_entry
from .store import RedisBrokerStore


class RedisDelays(VirtualDelays):
    """Publishes delayed messages to Redis on one kombu channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel, settings)
        self.keys = RedisBrokerKeys(channel.global_keyprefix or "", settings.namespace)
        self._shown = f"{self.keys.space} of {channel.connection.client.as_uri()}"
        self._own: RedisBrokerStore | None = None
        self._server: Server | None = None

    @property
    def place(self) -> str:
        # redis://host and redis://host/0 are one database.
        database = super().place.strip("/") or "0"
        return f"{database}.{self.keys.prefix}" if self.keys.prefix else database

    @property
    def own(self) -> RedisBrokerStore:
        """Return the waiting messages in this Redis broker."""
        pool = self._channel.pool
        if self._own is None or self._own.client.connection_pool is not pool:
            self._own = RedisBrokerStore(redis.Redis(connection_pool=pool), self.keys)
        return self._own

    def prepare(self) -> Server:
        """Check once per channel that the Redis server can store delayed messages."""
        self.check_settings()
        if self._server is None:
            server = server_of(self.own.client)
            check_server(server, prefix=self.keys.prefix)
            self._server = server
        return self._server

    def dangers(self) -> list[Finding]:
        """Report Redis settings that can cause message loss, such as eviction."""
        server = server_of(self.own.client, thoroughly=True)
        return list(keeping(server, check="server", kept="delayed messages"))

    def publish(
        self, message: dict[str, Any], destination: Destination, *, due_us: int, batch: Any = None
    ) -> None:
        """Store a delayed message in Redis.

        *batch* is the command buffer of kombu's ``Producer.batch()``. If *batch* is given, this
        method only adds a command to the buffer, and kombu sends the command later.
        """
        row = self.stored(message, destination, due_us=due_us)
        if batch is None:
            self.own.add([row])
        else:
            name, arguments = self.own.add_command(row)
            batch.add(name, *arguments)
        self.watch()

    @property
    def records(self) -> RedisRecords:
        """Return the storage for task state, such as debounce keys, in this Redis broker."""
        return self.own.state

    def publish_keyed(
        self, keyed: RecordedPublish, message: dict[str, Any], destination: Destination
    ) -> None:
        def put(due_us: int, *_: object) -> Row:
            own = collected(keyed, due_then(message, due_us))
            return self.stored(own, destination, due_us=due_us)

        def decoded(text: str) -> StoreEntry:
            return entry_of_message(json.loads(opened_entry(text.encode())[1]), None, due_us=0)

        keyed.settle(self.records, put, decoded)
        self.watch()

    def watch(self) -> None:
        """Log a warning if messages are overdue and no process moves due messages."""
        warn_if_nothing_promotes(self._shown, lambda: Status.of(self.keys.space, self.own.census()))

    def stored(self, message: dict[str, Any], destination: Destination, *, due_us: int) -> Row:
        """Return the row of a delayed message."""
        self.prepare()
        if HELD not in (message.get("headers") or {}):
            self.check_reach(due_us)
        return self._row(message, destination, due_us)

    def put_back(self, message: dict[str, Any], destination: Destination, *, due_us: int) -> None:
        """Store a message again, because a worker received the message before the due time."""
        # The worker acknowledges the old tag. The delay counts from the server's clock.
        properties = {**message["properties"], "delivery_tag": str(uuid4())}
        wait_us = due_us - time_ns() // 1000
        row = self._row({**message, "properties": properties}, destination, due_us)
        # The name has the old delivery tag, so a second attempt replaces the first message.
        name = member_of(message, destination.keys[0])
        self.own.add([row._replace(name=name, due_us=self.own.now_us() + wait_us)])

    def clock_ahead_seconds(self) -> float:
        return clock_ahead_seconds(self.own.client)

    @staticmethod
    def _row(message: dict[str, Any], destination: Destination, due_us: int) -> Row:
        entry = entry_of(destination, encoded(wrapped(message, due_ms=milliseconds_up(due_us))))
        name = member_of(message, destination.keys[0])
        return Row(name, id_of(message), due_us, entry)
