"""The parking queue: messages that no binding led on, and their way back.

Rescue never requeues: RabbitMQ 4.3 drops a message at its 21st return. What cannot go on is
published to the end of the queue, then acknowledged. A crash in between doubles, never loses.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import AccessRefused, NotFound, ResourceLocked

from ...errors import DelayTooLong
from ...message import HEADER, Delayed, cancel
from ..interface import Rescue
from .address import queue_of_address
from .channels import OwnChannel, Publication, WindowChannel, received
from .delays import Delays
from .topology import Topology
from .wrapping import COUNTED_BY_THE_QUEUE, keep_user_id, unwrap

logger = logging.getLogger(__name__)

#: Messages handled with one wait for the broker.
BATCH = 100

#: How long to wait for a message that the queue has counted, in seconds.
ARRIVAL_SECONDS = 5.0

#: At most this many per round, so that a dead destination costs little.
ROUND = 10_000


@dataclass(frozen=True)
class Parked:
    """A message in the parking queue.

    *properties* are those of the undelayed message; *delayed* is None if it never was one of ours.
    """

    message: amqp.Message
    properties: dict[str, Any]
    delayed: Delayed | None

    def destination(self, delayed: Delayed) -> tuple[str, str]:
        """Exchange and routing key that lead there without us.

        A copy that passed the landing queue of one queue is for that queue alone: the others have
        theirs.
        """
        queue = queue_of_address(self.message.delivery_info["routing_key"]) or delayed.queue
        return (delayed.exchange, delayed.routing_key) if queue is None else ("", queue)


@dataclass
class _Round:
    """One round: its channels, and what it found out about destinations."""

    delays: Delays
    publisher: WindowChannel
    outcome: Rescue = field(default_factory=Rescue)
    exchanges: dict[str, bool] = field(default_factory=dict)
    unwanted: set[tuple[str, str]] = field(default_factory=set)
    redeclared: bool = False


def count(delays: Delays) -> int:
    """Number of parked messages; 0 where nothing was ever declared."""
    return delays.declarer.depth(delays.topology.parking_queue) or 0


def rescue(delays: Delays) -> Rescue | None:
    """Try every parked message once; None if another process is at it.

    A due one goes to its original exchange and routing key, so that a queue which knows nothing
    of us gets it too; one that still has time to wait goes back into the levels; one that no queue
    is bound for yet stays parked.
    """
    connection = delays.connection
    parked = min(count(delays), ROUND)
    if not parked:
        return Rescue()
    try:
        with _lock(connection, delays.topology), _arrivals(delays) as arrivals:
            work = _Round(delays, WindowChannel(connection))
            while parked > 0 and (batch := arrivals.take(min(parked, BATCH))):
                parked -= len(batch)
                _send_on(work, [_parked(message) for message in batch])
                arrivals.settle(batch)
            work.publisher.close()
            return work.outcome
    except ResourceLocked:
        return None


def peek(delays: Delays, *, limit: int) -> list[Parked]:
    """The first *limit* parked messages, left where they are; ResourceLocked while one rescues."""
    channel = OwnChannel(delays.connection)
    try:
        with _lock(delays.connection, delays.topology):
            found: list[Parked] = []
            while len(found) < limit:
                message = channel.basic_get(delays.topology.parking_queue)
                if message is None:
                    break
                found.append(_parked(message))
            return found
    except NotFound:
        return []
    finally:
        # Unacknowledged messages return to their places with the channel.
        channel.close()


def purge(delays: Delays) -> int:
    """Throw away what is parked now, and have the records forget it; how many."""
    left = total = count(delays)
    if not total:
        return 0
    with _arrivals(delays) as arrivals:
        while left > 0 and (batch := arrivals.take(min(left, BATCH))):
            left -= len(batch)
            arrivals.settle(batch)
            for parked in map(_parked, batch):
                if parked.delayed is not None and delays.recorder is not None:
                    delays.recorder.forget(
                        amqp.Message(**parked.properties), parked.delayed.delivery_id
                    )
    return total - left


def _parked(message: amqp.Message) -> Parked:
    message = received(message)
    unwrapped = unwrap(message.properties, message.delivery_info)
    if unwrapped is None:
        return Parked(message, message.properties, None)
    properties, _, delayed = unwrapped
    for header in COUNTED_BY_THE_QUEUE:
        properties["application_headers"].pop(header, None)
    return Parked(message, properties, delayed)


def _send_on(work: _Round, batch: list[Parked]) -> None:
    now_ms = time_ns() // 1_000_000
    stay: list[Parked] = []
    # Copies of one delivery share its id: a broker may double, and so may a retry.
    sent: dict[str, list[tuple[Parked, tuple[str, str]]]] = {}
    with work.delays.one_confirm():
        for parked in batch:
            delayed = parked.delayed
            if delayed is None:
                stay.append(parked)
                continue
            destination = parked.destination(delayed)
            if delayed.expires_ms is not None and delayed.expires_ms <= now_ms:
                work.outcome.expired += 1
            elif not _exists(work, destination[0]) or destination in work.unwanted:
                stay.append(parked)
            elif delayed.due_us > now_ms * 1000:
                if _is_in_reach(work, delayed):
                    _back_to_levels(work, parked, delayed)
                else:
                    stay.append(parked)
            else:
                _publish_original(work, parked, delayed, destination, now_ms)
                sent.setdefault(delayed.delivery_id, []).append((parked, destination))
    work.publisher.wait_all()
    for returned in work.publisher.take_returned():
        copies = sent[returned.message.headers[HEADER]["id"]]
        to = returned.exchange, returned.routing_key
        parked, destination = next(copy for copy in copies if copy[1] == to)
        copies.remove((parked, destination))
        work.unwanted.add(destination)
        stay.append(parked)
    work.outcome.delivered += sum(map(len, sent.values()))
    work.outcome.still_parked += len(stay)
    for parked in stay:
        message = _as_parked(parked, work.delays.user)
        work.publisher.send(
            Publication(message, "", work.delays.topology.parking_queue, mandatory=False)
        )
    work.publisher.wait_all()


def _as_parked(parked: Parked, user: str) -> amqp.Message:
    """The message for the end of the parking queue, where *user* sends it."""
    properties = dict(parked.message.properties)
    if parked.delayed is None:
        keep_user_id(properties, {}, user)
    elif properties.get("user_id", user) != user:
        headers = properties["application_headers"]
        header = dict(headers[HEADER])
        keep_user_id(properties, header, user)
        properties["application_headers"] = headers | {HEADER: header}
    return amqp.Message(parked.message.body, **properties)


def _is_in_reach(work: _Round, delayed: Delayed) -> bool:
    """False while the levels would deliver it too early, to consumers that put nothing back."""
    try:
        work.delays.check_reach(delayed.due_us)
    except DelayTooLong:
        return False
    return True


def _back_to_levels(work: _Round, parked: Parked, delayed: Delayed) -> None:
    if not work.redeclared:
        # It may have parked because a level queue was gone.
        work.delays.prepare(redeclare=True)
        work.redeclared = True
    work.delays.put_back(
        amqp.Message(parked.message.body, **parked.properties),
        delayed,
        recorded=not delayed.cancelled,
    )
    work.outcome.waiting_again += 1


def _publish_original(
    work: _Round, parked: Parked, delayed: Delayed, destination: tuple[str, str], now_ms: int
) -> None:
    """Publish to where it would have gone undelayed; our header stays, for the delivery id."""
    properties = dict(parked.properties)
    header = dict(parked.message.headers[HEADER])
    keep_user_id(properties, header, work.delays.user)
    headers = {**properties["application_headers"], HEADER: header}
    if delayed.cancelled:
        cancel(headers, header)
    properties["application_headers"] = headers
    if delayed.expires_ms is not None:
        properties["expiration"] = str(delayed.expires_ms - now_ms)
    message = amqp.Message(parked.message.body, **properties)
    work.publisher.send(Publication(message, *destination))


def _exists(work: _Round, exchange: str) -> bool:
    """Publishing to an exchange that is gone would close the channel under the whole batch."""
    if exchange and exchange not in work.exchanges:
        work.exchanges[exchange] = True
        try:
            work.delays.declarer.look_for_exchange(exchange)
        except NotFound:
            work.exchanges[exchange] = False
        except AccessRefused:
            logger.debug("may not look for exchange %r: taking it as there", exchange)
    return work.exchanges.get(exchange, True)


class Arrivals:
    """Messages of a queue, taken by a consumer and settled many at a time.

    A quorum queue's client keeps back acknowledgements beyond 32 (rabbit_fifo_client), and a
    channel that closes behind them loses those: the messages come again. One for all is safe.
    """

    def __init__(self, channel: OwnChannel, queue: str, *, prefetch: int) -> None:
        self._messages: deque[amqp.Message] = deque()
        self._channel = channel
        channel.basic_qos(0, prefetch, False)
        self._tag = channel.basic_consume(queue, callback=self._messages.append)

    def take(self, wanted: int) -> list[amqp.Message]:
        """The next *wanted* messages; fewer when no more come."""
        with suppress(TimeoutError):
            while len(self._messages) < wanted:
                self._channel.connection.drain_events(timeout=ARRIVAL_SECONDS)
        return [self._messages.popleft() for _ in range(min(wanted, len(self._messages)))]

    def settle(self, batch: list[amqp.Message]) -> None:
        """All of *batch*, which came in order, are done with."""
        self._channel.basic_ack(batch[-1].delivery_tag, multiple=True)

    def close(self) -> None:
        """Return to the queue what was taken and not settled."""
        if self._channel.connection is not None:
            self._channel.basic_cancel(self._tag)
            self._channel.close()


def _arrivals(delays: Delays) -> closing[Arrivals]:
    channel = OwnChannel(delays.connection)
    return closing(Arrivals(channel, delays.topology.parking_queue, prefetch=BATCH))


@contextmanager
def _lock(connection: Any, topology: Topology) -> Iterator[None]:
    """One process at a time, by an exclusive queue, which lives as long as its connection.

    Raises amqp.exceptions.ResourceLocked if another process has it.
    """
    channel = OwnChannel(connection)
    channel.queue_declare(topology.rescue_lock_queue, exclusive=True, auto_delete=True)
    try:
        yield
    finally:
        if channel.connection is not None:
            channel.queue_delete(topology.rescue_lock_queue)
            channel.close()
