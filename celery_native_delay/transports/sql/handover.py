"""Deliver due messages from the database to the queues of the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias

import sqlalchemy
from kombu import Connection
from kombu.utils.json import loads
from sqlalchemy import exc, insert, select

from ...now import time_ns
from ...records.database import reason_of, same_database
from ..aliases import OPTION
from .delays import BROADCAST
from .rows import DispatchBatch
from .store import Store
from .whole_files import is_folder, put_file

#: Seconds after which a batch ends. Meanwhile producers wait if the store is a SQLite file. If the
#: store is a server, other dispatchers cannot take these messages.
LONGEST_BATCH_SECONDS = 0.25

#: How many rejections park a message. A rejected message is tried again after 1, 2, 4, … seconds.
#: It is parked after so many rejections, two minutes later.
TRIES = 8

#: The highest number of attempts that is counted. Parked messages are tried again without end.
_MOST_ATTEMPTS = 30_000


#: A function that delivers one batch, and notes which messages were delivered and which rejected.
#: With *park* it parks rejected messages at once. Returns the error if the broker is unreachable.
HandOver: TypeAlias = Callable[..., Exception | None]


def hand_over_on(channel: Any, store: Store) -> HandOver:
    """Return the function that delivers due messages to the broker of *channel*."""
    client = channel.connection.client
    if hasattr(channel, "message_cls") and same_database(client.hostname, store.url):
        return IntoTheSameDatabase(channel)
    return ThroughKombu(channel, store)


@contextmanager
def handing_over(channel: Any, store: Store) -> Iterator[HandOver]:
    """Open a new connection, and yield a function that delivers due messages."""
    # clone() is not used, because kombu 5.7 cannot clone a connection of a pool.
    information = dict(channel.connection.client._info(resolve=False))
    # This is kombu's own channel, because our channel would delay the messages once more.
    information["transport_options"] = (information["transport_options"] or {}) | {OPTION: False}
    with Connection(**information) as connection:
        yield hand_over_on(connection.default_channel, store)


class ThroughKombu:
    """Delivers due messages through a kombu channel, each message at least once."""

    def __init__(self, channel: Any, store: Store) -> None:
        self._channel = channel
        self._delivered_but_kept = store.delivered_but_kept
        self._connection_errors: tuple[type[Exception], ...] = (
            OSError,
            *channel.connection.client.connection_errors,
            *getattr(channel.connection, "recoverable_connection_errors", ()),
        )

    def __call__(self, batch: DispatchBatch, *, park: bool) -> Exception | None:
        end = monotonic() + LONGEST_BATCH_SECONDS
        for message in batch.messages:
            # A full disk may prevent the removal of a delivered message.
            # The envelope is compared too, because SQLite reuses ids.
            known = hash(message.envelope)
            if self._delivered_but_kept.get(message.id) == known:
                batch.delivered.append(message.id)
                continue
            try:
                self._put(message)
            except self._connection_errors as error:
                gone: Exception = error
                return gone
            except Exception as error:  # a transport may raise anything
                refuse(batch, message, error, park=park)
            else:
                self._delivered_but_kept[message.id] = known
                batch.delivered.append(message.id)
            if monotonic() > end:
                break
        return None

    def _put(self, message: Any) -> None:
        channel = self._channel
        if message.queue != BROADCAST and is_folder(channel):
            put_file(channel, message.queue, message.envelope)
            return
        envelope = loads(message.envelope)
        if message.queue != BROADCAST:
            channel._put(message.queue, envelope)
            return
        info = envelope["properties"]["delivery_info"]
        if is_folder(channel):
            for bound in channel.get_table(info["exchange"]):
                put_file(channel, bound.queue, message.envelope)
        else:
            channel._put_fanout(info["exchange"], envelope, info["routing_key"])


class IntoTheSameDatabase:
    """Moves due messages from this package's table to kombu's tables, each exactly once."""

    def __init__(self, channel: Any) -> None:
        channel.session  # noqa: B018  makes kombu create its tables
        self._queues = channel.queue_cls.__table__
        self._messages = channel.message_cls.__table__

    def __call__(self, batch: DispatchBatch, *, park: bool) -> Exception | None:
        if batch.messages and self._refusal(batch, batch.messages):
            # The database rejects one of the messages: deliver the others.
            for message in batch.messages:
                if error := self._refusal(batch, [message]):
                    refuse(batch, message, error, park=park)
        return None

    def _refusal(self, batch: DispatchBatch, messages: list[Any]) -> exc.DBAPIError | None:
        """Insert all *messages* or none; return the database's error, if any."""
        queues = dict.fromkeys(message.queue for message in messages)
        try:
            with batch.connection.begin_nested():
                ids = {queue: self._id_of(batch.connection, queue) for queue in queues}
                rows = [
                    {
                        "queue_id": ids[message.queue],
                        "payload": message.envelope,
                        "visible": True,
                        "version": 1,
                    }
                    for message in messages
                ]
                batch.connection.execute(insert(self._messages), rows)
        except exc.DBAPIError as error:
            if error.connection_invalidated:
                raise
            return error
        batch.delivered += [message.id for message in messages]
        return None

    def _id_of(self, connection: sqlalchemy.Connection, queue: str) -> int:
        """Return the id of kombu's row for *queue*; insert a missing row."""
        named = select(self._queues.c.id).where(self._queues.c.name == queue)
        found = connection.execute(named).scalar()
        if found is None:
            connection.execute(insert(self._queues).values(name=queue))
            found = connection.execute(named).scalar_one()
        return int(found)


def refuse(batch: DispatchBatch, message: Any, error: Exception, *, park: bool) -> None:
    """Schedule the next delivery attempt of a rejected message, or park the message.

    The message is parked (marked as undeliverable) after :data:`TRIES` rejections. With *park*,
    the message is parked at once.
    """
    tries = message.attempts + 1
    parked = park or tries >= TRIES
    due_us = None if parked else time_ns() // 1000 + (1_000_000 << (tries - 1))
    why = f"{type(error).__name__}: {reason_of(error)}"[:1000]
    tries = min(tries, _MOST_ATTEMPTS)
    batch.refused.append({"one": message.id, "due": due_us, "tries": tries, "why": why})
