"""Manage the parking queue, which holds due messages that matched no binding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import AccessRefused, ChannelError, MessageNacked, NotFound, ResourceLocked

from ...errors import DelayTooLong, NativeDelayError
from ...keyed.record import HEADER as KEY
from ...message import HEADER, Delayed, cancel
from ..interface import Rescue
from .address import queue_of_address
from .channels import OwnChannel, Publication, received
from .delays import RabbitDelays
from .delivering import Deliverer
from .wrapping import COUNTED_BY_THE_QUEUE, keep_user_id, unwrap

#: How many messages are confirmed together.
BATCH = 100

#: How many seconds to wait for a message that the broker has counted in the queue.
ARRIVAL_SECONDS = 5.0

#: How many messages one rescue publishes at most.
ROUND = 10_000

#: How many of them at most go back to the parking queue, because nothing wants them.
UNWANTED = 1_000

#: How many seconds all workers leave the parking queue alone after a rescue left messages there.
PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Parked:
    """A message in the parking queue, because no binding matched the message."""

    message: amqp.Message
    #: The message properties that the user published.
    properties: dict[str, Any]
    #: Destination and due time; None for a message without a header of this package.
    delayed: Delayed | None

    @property
    def expires_ms(self) -> int | None:
        """The time at which the message expires, or None.

        None for a task with a debounce, throttle or unique key. Such a message is delivered even if
        expired, because the worker frees the key.
        """
        if self.delayed is None or KEY in self.properties["application_headers"]:
            return None
        return self.delayed.expires_ms

    def destination(self, delayed: Delayed) -> tuple[str, str]:
        """Return the exchange and routing key for publishing the message again."""
        queue = queue_of_address(self.message.delivery_info["routing_key"]) or delayed.queue
        return (delayed.exchange, delayed.routing_key) if queue is None else ("", queue)


@dataclass
class _RescueState:
    delays: RabbitDelays
    deliverer: Deliverer
    outcome: Rescue = field(default_factory=Rescue)
    unwanted: set[tuple[str, str]] = field(default_factory=set)
    redeclared: bool = False


def count(delays: RabbitDelays) -> int:
    """Return the number of messages in the parking queue (due, but unroutable)."""
    return delays.declarer.depth(delays.topology.parking_queue) or 0


def rescue(delays: RabbitDelays) -> Rescue | None:
    """Publish the parking queue's messages to their destinations; return the counts by outcome.

    Return None if another process holds the lock of the parking queue.
    """
    parked = min(count(delays), ROUND)
    if not parked:
        return Rescue()
    # Messages are published again, not requeued, because RabbitMQ 4.3 drops a message at its 21st
    # return. The publish comes before the ack of the old copy, so a crash may leave two copies.
    try:
        with _lock(delays), closing(_Arrivals(delays)) as arrivals:
            work = _RescueState(delays, Deliverer(delays.connection))
            while (
                parked > 0
                and work.outcome.still_parked < UNWANTED
                and (batch := arrivals.take(min(parked, BATCH)))
            ):
                parked -= len(batch)
                _rescue_batch(work, [_parked(message) for message in batch])
                arrivals.settle(batch)
            work.deliverer.close()
            return work.outcome
    except ResourceLocked:
        return None


def rescue_in_turn(delays: RabbitDelays) -> Rescue | None:
    """Like :func:`rescue`, but return None in the pause that all workers make after a rescue."""
    pause = delays.topology.rescue_pause_queue
    if not count(delays):
        return Rescue()
    with suppress(AccessRefused):
        if delays.declarer.depth(pause):
            return None
    outcome = rescue(delays)
    if outcome is not None and outcome.still_parked:
        # A message with a TTL, not a queue that expires: each look at a queue renews its lease.
        # Without the right to declare the queue, each worker pauses on its own.
        mark = amqp.Message(expiration=str(round(PAUSE_SECONDS * 1000)))
        with suppress(ChannelError):
            channel = delays.declarer.channel
            channel.queue_declare(
                pause, durable=True, auto_delete=False, arguments={"x-max-length": 1}
            )
            channel.send(Publication(mark, "", pause, mandatory=False))
    return outcome


def peek(delays: RabbitDelays, *, limit: int) -> list[Parked]:
    """Return up to *limit* undeliverable due messages; the messages stay in the parking queue."""
    channel = OwnChannel(delays.connection)
    try:
        with _lock(delays):
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
        # When the channel closes, unacknowledged messages return to their places in the queue.
        channel.close()


def _parked(message: amqp.Message) -> Parked:
    message = received(message)
    unwrapped = unwrap(message.properties, message.delivery_info)
    if unwrapped is None:
        return Parked(message, message.properties, None)
    properties, _, delayed = unwrapped
    for header in COUNTED_BY_THE_QUEUE:
        properties["application_headers"].pop(header, None)
    return Parked(message, properties, delayed)


def _rescue_batch(work: _RescueState, batch: list[Parked]) -> None:
    now_ms = time_ns() // 1_000_000
    stay: list[Parked] = []
    due: dict[int, Publication] = {}
    early: list[tuple[Parked, Delayed]] = []
    for at, parked in enumerate(batch):
        delayed = parked.delayed
        if delayed is None:
            stay.append(parked)
            continue
        destination = parked.destination(delayed)
        if parked.expires_ms is not None and parked.expires_ms <= now_ms:
            work.outcome.expired += 1
        elif destination in work.unwanted:
            stay.append(parked)
        elif delayed.due_us > now_ms * 1000:
            try:
                # put_back() would shorten the delay: a plain worker would run the task early.
                work.delays.check_reach(delayed.due_us)
                early.append((parked, delayed))
            except DelayTooLong:
                stay.append(parked)
        else:
            message = _original(parked, delayed, work.deliverer.user, now_ms)
            due[at] = Publication(message, *destination)
    outcomes: dict[int, Exception | None] = {}
    work.deliverer.deliver(due, outcomes)
    refused = [at for at, error in outcomes.items() if error is not None]
    work.unwanted.update((due[at].exchange, due[at].routing_key) for at in refused)
    not_waiting = _wait_again(work, early)
    stay += [batch[at] for at in refused] + not_waiting
    work.outcome.waiting_again += len(early) - len(not_waiting)
    work.outcome.delivered += len(due) - len(refused)
    work.outcome.still_parked += len(stay)
    parking = "", work.delays.topology.parking_queue
    back = [Publication(_as_parked(each, work.deliverer.user), *parking) for each in stay]
    outcomes = {}
    work.deliverer.deliver(dict(enumerate(back)), outcomes)
    if any(outcomes.values()):
        raise MessageNacked(f"{parking[1]}: {outcomes}")


def _as_parked(parked: Parked, user: str) -> amqp.Message:
    """Copy a message, so that RabbitMQ accepts the copy for the parking queue.

    RabbitMQ refuses a message whose ``user_id`` is not *user*, the connection's user. So this
    function moves such a ``user_id`` into this package's header. The only exception: a message
    without this header loses such a ``user_id``.
    """
    properties = dict(parked.message.properties)
    if parked.delayed is None:
        keep_user_id(properties, {}, user)
    elif properties.get("user_id", user) != user:
        headers = properties["application_headers"]
        header = dict(headers[HEADER])
        keep_user_id(properties, header, user)
        properties["application_headers"] = headers | {HEADER: header}
    return amqp.Message(parked.message.body, **properties)


def _wait_again(work: _RescueState, early: list[tuple[Parked, Delayed]]) -> list[Parked]:
    """Put messages back into the delay queues; return those that cannot wait there."""
    if early and not work.redeclared:
        # The messages may have parked because a queue with a TTL was missing.
        work.delays.prepare(redeclare=True)
        work.redeclared = True
    waits = [(amqp.Message(each.message.body, **each.properties), to) for each, to in early]
    errors = work.delays.put_back(waits)
    for error in errors:
        if error is not None and not isinstance(error, (MessageNacked, NativeDelayError)):
            raise error
    return [parked for (parked, _), error in zip(early, errors, strict=True) if error is not None]


def _original(parked: Parked, delayed: Delayed, user: str, now_ms: int) -> amqp.Message:
    """Return the due message as it was published, with this package's header."""
    properties = dict(parked.properties)
    header = dict(parked.message.headers[HEADER])
    keep_user_id(properties, header, user)
    headers = {**properties["application_headers"], HEADER: header}
    if delayed.cancelled:
        cancel(headers, header)
    properties["application_headers"] = headers
    properties.pop("expiration", None)
    if parked.expires_ms is not None:
        properties["expiration"] = str(parked.expires_ms - now_ms)
    return amqp.Message(parked.message.body, **properties)


class _Arrivals:
    """Consumes the parking queue, and acks many messages with one ack."""

    def __init__(self, delays: RabbitDelays) -> None:
        self._messages: deque[amqp.Message] = deque()
        self._channel = OwnChannel(delays.connection)
        self._channel.basic_qos(0, BATCH, False)
        queue = delays.topology.parking_queue
        self._tag = self._channel.basic_consume(queue, callback=self._messages.append)

    def take(self, wanted: int) -> list[amqp.Message]:
        """Wait for *wanted* messages, and return them; after a timeout, return fewer."""
        with suppress(TimeoutError):
            while len(self._messages) < wanted:
                self._channel.connection.drain_events(timeout=ARRIVAL_SECONDS)
        return [self._messages.popleft() for _ in range(min(wanted, len(self._messages)))]

    def settle(self, batch: list[amqp.Message]) -> None:
        # For a quorum queue, RabbitMQ holds back acks after the first 32 (rabbit_fifo_client), and
        # loses these acks if the channel closes. One ack for all messages is safe.
        self._channel.basic_ack(batch[-1].delivery_tag, multiple=True)

    def close(self) -> None:
        if self._channel.connection is not None:
            self._channel.basic_cancel(self._tag)
            self._channel.close()


@contextmanager
def _lock(delays: RabbitDelays) -> Iterator[None]:
    """Hold an exclusive queue as a lock; raise ResourceLocked if another connection has it."""
    queue = delays.topology.rescue_lock_queue
    channel = OwnChannel(delays.connection)
    channel.queue_declare(queue, exclusive=True, auto_delete=True)
    try:
        yield
    finally:
        if channel.connection is not None:
            channel.queue_delete(queue)
            channel.close()
