"""Delay messages in pgmq, with a subclass of kombu's pgmq transport (kombu 5.7).

pgmq delays messages by whole seconds; delays are rounded up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time_ns
from typing import Any
from uuid import uuid4

from kombu.exceptions import OperationalError
from kombu.transport import pgmq

from ..due_time import milliseconds_up
from ..durations import duration
from ..finding import WRONG, Finding
from ..settings import DelaySettings
from ..store.entry import StoreEntry
from .interface import AdminPart, Backlog, Told, Wait, WorkerPart
from .outbox import OutboxBatch, is_lasting_sql
from .virtual.channel import DelayingChannel, DelayingTransport, VirtualDelays
from .virtual.outbox import CallingOutbox, Collecting, NotTaken, PlainMessage
from .virtual.wrapping import wrapped

#: Seconds after which a due message that no worker has read is reported.
_UNREAD_SECONDS = 60

#: Conditions for messages that are not due, and for messages that are due for a while.
_WAITING = "vt > clock_timestamp()"
_UNREAD = f"vt < clock_timestamp() - interval '{_UNREAD_SECONDS} s'"


class PgmqDelays(VirtualDelays):
    """Publishes delayed messages to pgmq, which delays them by itself."""

    def publish(
        self, queue: str, message: dict[str, Any], *, due_us: int, delivery_id: str | None = None
    ) -> None:
        """Publish a delayed message; without *delivery_id* its id is kombu's delivery tag."""
        channel, own = self._channel, self.own(message, due_us=due_us, delivery_id=delivery_id)
        told = channel.told(own, due_us - time_ns() // 1000)
        channel.pgmq.send(channel._queue_name(queue), own, **told)

    def own(
        self, message: dict[str, Any], *, due_us: int, delivery_id: str | None = None
    ) -> dict[str, Any]:
        """Return a message with this package's header."""
        self.check_settings()
        delivery_id = delivery_id or str(message["properties"]["delivery_tag"])
        return wrapped(message, due_ms=milliseconds_up(due_us), delivery_id=delivery_id)


class Channel(DelayingChannel, pgmq.Channel):  # type: ignore[misc]
    """A channel of kombu's pgmq transport; delayed messages stay invisible in pgmq until due."""

    delays_class = PgmqDelays

    def _pgmq_send_kwargs(self, message: dict[str, Any]) -> dict[str, Any]:
        """Add the message's delay to kombu's arguments for pgmq's ``send``."""
        due_us = self.due_of(message)
        if due_us is None:
            return self.told(message, 0)
        self.delays.check_settings()
        self.delays.check_reach(due_us)
        return self.told(message, due_us - time_ns() // 1000)

    def told(self, message: dict[str, Any], wait_us: int) -> dict[str, Any]:
        """Return the arguments for pgmq's ``send``, with a delay of *wait_us* microseconds."""
        if wait_us > 0:
            seconds = -(-wait_us // 1_000_000)
            # A copy is changed, because a second attempt, perhaps when due, must not delay again.
            message = {**message, "properties": {**message["properties"], "DelaySeconds": seconds}}
        found: dict[str, Any] = super()._pgmq_send_kwargs(message)
        return found

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> Any:
        self.delays.check_reach(due_us)
        self.delays.publish(queue, message, due_us=due_us)

    def _put_fanout(self, exchange: str, message: dict[str, Any], *args: Any, **more: Any) -> None:
        if not self.put_broadcast(exchange, message, *args[:1]):
            super()._put_fanout(exchange, message, *args, **more)

    def _put_topic(self, exchange: str, message: dict[str, Any], *args: Any, **more: Any) -> None:
        if not self.put_broadcast(exchange, message, *args[:1]):
            super()._put_topic(exchange, message, *args, **more)

    def put_due(self, message: dict[str, Any], entry: StoreEntry) -> None:
        if entry.queue is None and self.typeof(entry.exchange).type == "topic":
            pgmq.Channel._put_topic(self, entry.exchange, message, entry.routing_key)
        else:
            super().put_due(message, entry)

    def own_worker_part(self, settings: DelaySettings) -> PgmqWorkerPart:
        return PgmqWorkerPart(self, settings)

    def own_admin_part(self, settings: DelaySettings) -> PgmqAdminPart:
        return PgmqAdminPart(self)


class PgmqWorkerPart(WorkerPart):
    comes_back_late_seconds = 2.0
    """Two seconds, because the delay is rounded up, and kombu polls every second."""

    def prepare(self, where: str) -> str:
        return f"{where} delays by itself; {self.terms}"

    def put_one_back(self, wait: Wait) -> None:
        message = wait.on(wait.message._raw)
        properties = dict(message["properties"])
        info = properties.get("delivery_info") or {}
        own = {name: info[name] for name in info if not name.startswith("pgmq_")}
        # The message gets a new tag, because the present tag is about to be acknowledged.
        message["properties"] = properties | {"delivery_info": own, "delivery_tag": str(uuid4())}
        try:
            self._delays.publish(
                wait.queue,
                message,
                due_us=wait.due_us,
                delivery_id=wait.delivery_id,
            )
        except pgmq.psycopg.Error as exc:
            raise OperationalError(str(exc)) from exc


class PgmqAdminPart(AdminPart):
    name = "the queues of this app"
    parking = "none: nothing is parked"

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._queues: Sequence[str] = ()

    def serve(self, queues: Sequence[Any]) -> None:
        self._queues = [queue.name for queue in queues]

    def declare(self, queues: Sequence[Any]) -> Told:
        return Told({"queues": []}, ["pgmq delays by itself: nothing to declare"])

    def status(self) -> Told:
        waiting = self._of_waiting("SELECT")
        return Told({"waiting": waiting, "parked": 0}, [f"waiting   {waiting}"], self._unread())

    def backlog(self) -> Backlog:
        return Backlog(self._of_waiting("SELECT"), 0)

    def purge(self) -> int:
        return self._of_waiting("DELETE")

    def _unread(self) -> list[Finding]:
        """Report due messages that no worker has read."""
        found = [(queue, self._rows("SELECT", queue, _UNREAD)) for queue in self._queues]
        return [
            Finding(
                "workers",
                WRONG,
                f"no worker reads from {queue}: {count} message(s) are due for over "
                f"{duration(_UNREAD_SECONDS)}",
                f"start workers that consume from {queue}",
            )
            for queue, count in found
            if count
        ]

    def _of_waiting(self, verb: str) -> int:
        return sum(self._rows(verb, queue, _WAITING) for queue in self._queues)

    def _rows(self, verb: str, queue: str, condition: str) -> int:
        """Count the messages never read; with the SQL verb "DELETE", also delete them."""
        if not self._channel._has_queue(queue):
            return 0
        table = f"q_{self._channel._queue_name(queue)}"
        statement = pgmq.psycopg.sql.SQL(
            f"{verb} FROM pgmq.{{}} WHERE read_ct = 0 AND {condition}"
        ).format(pgmq.psycopg.sql.Identifier(table))
        with self._channel.pgmq.pool.connection() as connection:
            return int(connection.execute(statement).rowcount)


class PgmqCollecting(Collecting):
    def put_for(self: Any, queue: str, message: dict[str, Any]) -> PlainMessage:
        due_us = self.due_of(message)
        if due_us is not None:
            self.delays.check_reach(due_us)
            message = self.delays.own(message, due_us=due_us)
        return PlainMessage(queue, message)

    def _put_fanout(self, *args: Any, **kwargs: Any) -> None:
        self._is_routed = True
        super(Collecting, self)._put_fanout(*args, **kwargs)  # type: ignore[misc]

    def _put_topic(self, *args: Any, **kwargs: Any) -> None:
        self._is_routed = True
        super()._put_topic(*args, **kwargs)  # type: ignore[misc]


class PgmqOutbox(CallingOutbox[PlainMessage]):
    """Publishes many messages to pgmq, 100 messages in each transaction."""

    collecting = PgmqCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (*self.lost, *client.recoverable_connection_errors)

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _packed(self, puts: list[PlainMessage]) -> Iterable[OutboxBatch[PlainMessage]]:
        return (OutboxBatch(puts),)

    def _deliver(self, batch: OutboxBatch[PlainMessage]) -> None:
        channel = self.channel
        alike: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for put in batch.puts:
            told = channel._pgmq_send_kwargs(put.message)
            way = channel._queue_name(put.queue), told.get("delay", 0)
            alike.setdefault(way, []).append((put.message, told.get("headers", {})))
        try:
            with channel.pgmq.pool.connection() as connection, connection.transaction():
                for (queue, delay_seconds), sent in alike.items():
                    messages, headers = map(list, zip(*sent, strict=True))
                    channel.pgmq.send_batch(
                        queue, messages, headers=headers, delay=delay_seconds, conn=connection
                    )
        except self.lost:
            raise
        except pgmq.psycopg.Error as error:
            raise NotTaken(str(error)) from error


class Transport(DelayingTransport, pgmq.Transport):  # type: ignore[misc]
    """kombu's pgmq transport; with the option ``native_delay``, delayed messages wait in pgmq."""

    delaying_channel = Channel

    def waits_in(self, settings: DelaySettings) -> str:
        return "their queue of pgmq, invisible"

    def own_outbox(self, window: int) -> PgmqOutbox:
        return PgmqOutbox(self.client, window)
