"""Handing over: putting what is due where kombu would have put it without the delay.

The dispatcher's last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, time_ns
from typing import Any, TypeAlias

import sqlalchemy
from kombu import Connection
from kombu.utils.json import loads
from sqlalchemy import exc, insert, select

from ...records.database import reason_of, same_database
from ..aliases import OPTION
from .delays import BROADCAST
from .rows import DispatchBatch
from .store import Store
from .whole_files import is_folder, put_file

#: Seconds after which a batch ends however much of it is left, for others wait meanwhile:
#: producers, where the store is a file; those messages, where it is a server.
LONGEST_BATCH_SECONDS = 0.25

#: A message that its destination refuses is tried again after 1, 2, 4, … seconds, and parked when
#: it was refused so often: two minutes later.
TRIES = 8

#: As far as they are counted: what is parked is tried for as long as it lies there.
_MOST_ATTEMPTS = 30_000


#: Hands over one batch: marks what is delivered, and what is put off, which with *park* is parked
#: at once. It returns why no more can be handed over now, if the broker is away.
HandOver: TypeAlias = Callable[..., Exception | None]


def hand_over_on(channel: Any, store: Store) -> HandOver:
    """The way of messages from *store* to the queues of *channel*, which is kombu's own."""
    client = channel.connection.client
    if hasattr(channel, "message_cls") and same_database(client.hostname, store.url):
        return IntoTheSameDatabase(channel)
    return ThroughKombu(channel, store)


@contextmanager
def handing_over(channel: Any, store: Store) -> Iterator[HandOver]:
    """A way of messages from *store* on a connection of its own, where *channel* is one of ours."""
    # Not clone(): kombu 5.7 cannot clone a connection of a pool.
    information = dict(channel.connection.client._info(resolve=False))
    # kombu's own channel: what is due is not to wait once more.
    information["transport_options"] = (information["transport_options"] or {}) | {OPTION: False}
    with Connection(**information) as connection:
        yield hand_over_on(connection.default_channel, store)


class ThroughKombu:
    """Handing over through kombu's own channel: put first and remove after, so at least once.

    What a store keeps although it was put, because its disk is full, this process puts once only.
    """

    def __init__(self, channel: Any, store: Store) -> None:
        self._channel = channel
        self._put_already = store.put_already
        self._lost: tuple[type[Exception], ...] = (
            OSError,
            *channel.connection.client.connection_errors,
            *getattr(channel.connection, "recoverable_connection_errors", ()),
        )

    def __call__(self, batch: DispatchBatch, *, park: bool) -> Exception | None:
        end = monotonic() + LONGEST_BATCH_SECONDS
        for message in batch.messages:
            # SQLite gives an id again, so it alone would not tell.
            known = hash(message.envelope)
            if self._put_already.get(message.id) == known:
                batch.delivered.append(message.id)
                continue
            try:
                self._put(message)
            except self._lost as error:
                gone: Exception = error
                return gone
            except Exception as error:  # whatever a transport raises
                refuse(batch, message, error, park=park)
            else:
                self._put_already[message.id] = known
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
    """Handing over into kombu's tables in the same database: one transaction, so exactly once."""

    def __init__(self, channel: Any) -> None:
        channel.session  # noqa: B018  has kombu create its tables
        self._queues = channel.queue_cls.__table__
        self._messages = channel.message_cls.__table__
        self._ids: dict[str, int] = {}

    def __call__(self, batch: DispatchBatch, *, park: bool) -> Exception | None:
        if batch.messages and self._refusal(batch, batch.messages):
            # One is refused, and the others must not wait for it.
            for message in batch.messages:
                if error := self._refusal(batch, [message]):
                    refuse(batch, message, error, park=park)
        return None

    def _refusal(self, batch: DispatchBatch, messages: list[Any]) -> exc.DBAPIError | None:
        """Insert *messages*, all or none; the reason why none are."""
        self._ids.clear()  # a row that was made by a transaction that failed is not there
        try:
            with batch.connection.begin_nested():
                rows = [
                    {
                        "queue_id": self._id_of(batch.connection, message.queue),
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
        """The id of kombu's row for *queue*, which is made if it is not there."""
        if queue not in self._ids:
            named = select(self._queues.c.id).where(self._queues.c.name == queue)
            found = connection.execute(named).scalar()
            if found is None:
                connection.execute(insert(self._queues).values(name=queue))
                found = connection.execute(named).scalar_one()
            self._ids[queue] = int(found)
        return self._ids[queue]


def refuse(batch: DispatchBatch, message: Any, error: Exception, *, park: bool) -> None:
    """Put *message* off, or park it if that was so often enough."""
    tries = message.attempts + 1
    parked = park or tries >= TRIES
    due_us = None if parked else time_ns() // 1000 + (1_000_000 << (tries - 1))
    why = f"{type(error).__name__}: {reason_of(error)}"[:1000]
    tries = min(tries, _MOST_ATTEMPTS)
    batch.put_off.append({"one": message.id, "due": due_us, "tries": tries, "why": why})
