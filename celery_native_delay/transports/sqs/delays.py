"""Publish delayed messages to SQS: to the destination queue or the delay queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time_ns
from typing import Any, NamedTuple

from botocore.exceptions import ClientError
from kombu.exceptions import OperationalError

from ...due_time import milliseconds_up
from ...durations import duration
from ...errors import CannotDelay, NotPermitted, TopologyMismatch
from ...settings import DelaySettings
from ..virtual.channel import VirtualDelays
from ..virtual.wrapping import wrapped
from . import hops
from .entry import MOST_BYTES, Payload, SqsMessage, check_size
from .queues import (
    Queues,
    SqsFailure,
    can_delay,
    delay_queue_of,
    explained,
    is_gone,
    mismatches,
    most_bytes_of,
    why_not_made,
)

logger = logging.getLogger(__name__)

#: Seconds until a producer reads the attributes of a delay queue again.
LOOK_SECONDS = 600.0
#: Seconds until a producer looks again for a delay queue that does not exist.
LOOK_FOR_SECONDS = 60.0


class KnownDelayQueue(NamedTuple):
    """A producer's cached information about one delay queue."""

    at: float  # the monotonic time of the look
    url: str | None  # None if the delay queue does not exist
    most_bytes: int = MOST_BYTES  # the largest message that the destination accepts


class SqsDelays(VirtualDelays):
    """Publishes delayed messages on one SQS channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel, settings)
        self.queues = Queues(channel)
        self._known: dict[str, KnownDelayQueue] = {}

    @property
    def place(self) -> str:
        return str(self._channel.queue_name_prefix or super().place)

    def publish(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
    ) -> None:
        """Send a message to the destination queue or, for long delays, to the delay queue.

        *delivery_id* is as in :meth:`put_of`.
        """
        put = self.put_of(queue, message, due_us=due_us, delivery_id=delivery_id)
        now_us = time_ns() // 1000
        self.check_size(put, now_us=now_us)
        for failure in self.send([put], now_us=now_us).values():
            error = CannotDelay if failure.is_final else OperationalError
            raise error(f"{self.queues.name(queue)} does not take this message: {failure.reason}")

    def put_of(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
    ) -> SqsMessage:
        """Add this package's header to *message*, and encode *message* for *queue*.

        If *delivery_id* is None, the delivery id is kombu's delivery tag.
        """
        self.check_settings()
        if not can_delay(queue):
            raise CannotDelay(
                f"expected a queue that can delay, got the FIFO queue {queue!r}: SQS takes no "
                f"delay for a single message there"
            )
        base64, tag = self._channel.sqs_base64_encoding, str(message["properties"]["delivery_tag"])
        own = wrapped(message, due_ms=milliseconds_up(due_us), delivery_id=delivery_id or tag)
        return SqsMessage(queue, due_us, tag, Payload.of(own, base64=base64), base64)

    def check_size(self, put: SqsMessage, *, now_us: int) -> None:
        """Raise CannotDelay if a message is too large for SQS or for the destination queue."""
        if not put.is_far(now_us=now_us):
            check_size(put.payload.size_bytes, queue=put.queue)
            return
        check_size(put.entry(now_us=now_us).size_bytes, queue=put.queue)
        # An error at the end of the wait would come too late.
        most_bytes = self.known_delay_queue(put.queue).most_bytes
        check_size(put.payload.size_bytes, queue=put.queue, most_bytes=most_bytes)

    def send(self, puts: Sequence[SqsMessage], *, now_us: int) -> dict[int, SqsFailure]:
        """Send up to ten messages for one queue in one request, to it or to its delay queue.

        Returns a dict of the failures. A key is the position of the message in *puts*, from 0.
        """
        queue, url = puts[0].queue, None
        # A delay that has just fallen below 15 minutes is hardly longer in the delay queue.
        if any(put.is_far(now_us=now_us) for put in puts):
            url = self.known_delay_queue(queue).url
        if url is None:
            messages = [
                {**put.payload.arguments(), "DelaySeconds": put.seconds_here(now_us=now_us)}
                for put in puts
            ]
            return self._send(queue, messages, lambda: self.queues.declared_url(queue))
        entries = [put.entry(now_us=now_us).arguments() for put in puts]
        try:
            return self._send(delay_queue_of(queue), entries, lambda: str(url))
        except ClientError as exc:
            self._known.pop(queue, None)
            if not is_gone(exc) or self.known_delay_queue(queue).url is not None:
                raise
            return self.send(puts, now_us=now_us)

    def _send(
        self, queue: str, messages: Sequence[Mapping[str, Any]], url: Callable[[], str]
    ) -> dict[int, SqsFailure]:
        with explained(self.queues.name(queue), "sqs:SendMessage"):
            return self.queues.send_many(queue, messages, url=url)

    def known_delay_queue(self, queue: str) -> KnownDelayQueue:
        """Return information about the delay queue of *queue*, cached for up to ten minutes.

        Raises TopologyMismatch if the delay queue has wrong attributes.
        """
        known = self._known.get(queue)
        if known is None or monotonic() - known.at > (
            LOOK_SECONDS if known.url is not None else LOOK_FOR_SECONDS
        ):
            known = self._known[queue] = self._look_at(queue)
        return known

    def _look_at(self, queue: str) -> KnownDelayQueue:
        name = self.queues.name(delay_queue_of(queue))
        url = self.queues.find(delay_queue_of(queue))
        attributes = None if url is None else self.queues.attributes(delay_queue_of(queue), url)
        if attributes is None:
            way_out = "start an installed worker or run `celery -A PROJ delay promote`"
            if not self.queues.can_make(name):
                way_out = f"it {why_not_made(name)}"
            _say_once(
                f"{name}: not found, so no relay serves {queue!r}. Tasks that are due in more "
                f"than {duration(hops.HOP_SECONDS)} wait for so long in SQS, and then in the "
                f"memory of a plain worker, where visibility_timeout may run them twice: {way_out}"
            )
            return KnownDelayQueue(monotonic(), None)
        found = mismatches(name, attributes)
        if found:
            raise TopologyMismatch("; ".join(map(str, found)))
        return KnownDelayQueue(monotonic(), url, self._most_bytes(queue))

    def _most_bytes(self, queue: str) -> int:
        try:
            return most_bytes_of(self.queues.known(queue) or {})
        except NotPermitted:
            return MOST_BYTES


#: The warnings that this process has already logged.
_said: set[str] = set()


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        logger.warning("native delay: %s", sentence)


def leave_to_celery(queue: str) -> None:
    """Warn once for each FIFO queue: its delayed tasks wait in the workers' memory."""
    _say_once(
        f"{queue!r} is a FIFO queue, where SQS takes no delay for a single message: its tasks with "
        f"an ETA stay with Celery, in the memory of its workers"
    )
