"""Publish delayed messages to SQS: to the destination queue or the delay queue."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from ...durations import duration
from ...errors import CannotDelay, NotPermitted, TopologyMismatch
from ...settings import DelaySettings
from ..virtual import delays
from . import hops
from .entry import MOST_BYTES, Payload, SqsEntry, SqsMessage, check_size
from .queues import (
    Queues,
    can_delay,
    delay_queue_of,
    explained,
    is_gone,
    mismatches,
    most_bytes_of,
    overdue_in,
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


class SqsDelays(delays.SendingDelays):
    """Publishes delayed messages on one SQS channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel, settings)
        self.queues = Queues(channel)
        self._known: dict[str, KnownDelayQueue] = {}

    @property
    def place(self) -> str:
        return str(self._channel.queue_name_prefix or super().place)

    def send(self, put: SqsMessage, *, now_us: int) -> None:
        """Send a message to the destination queue or, for long delays, to the delay queue."""
        queue = put.queue
        self.check_size(put, now_us=now_us)
        if not put.is_far(now_us=now_us) or not self._send_into_delay_queue(
            queue, put.entry(now_us=now_us)
        ):
            self._send(queue, put.payload, put.seconds_here(now_us=now_us))

    def _put(self, queue: str, message: dict[str, Any], due_us: int) -> SqsMessage:
        if not can_delay(queue):
            raise CannotDelay(
                f"expected a queue that can delay, got the FIFO queue {queue!r}: SQS takes no "
                f"delay for a single message there"
            )
        base64 = self._channel.sqs_base64_encoding
        payload = Payload.of(message, base64=base64)
        return SqsMessage(
            queue, due_us, str(message["properties"]["delivery_tag"]), payload, base64
        )

    def check_size(self, put: SqsMessage, *, now_us: int) -> None:
        """Raise CannotDelay if a message is too large for SQS or for the destination queue."""
        if not put.is_far(now_us=now_us):
            check_size(put.payload.size_bytes, queue=put.queue)
            return
        check_size(put.entry(now_us=now_us).size_bytes, queue=put.queue)
        # An error at the end of the wait would come too late.
        most_bytes = self.known_delay_queue(put.queue).most_bytes
        check_size(put.payload.size_bytes, queue=put.queue, most_bytes=most_bytes)

    def _send(self, queue: str, payload: Payload, delay_seconds: int) -> None:
        """Send a message; if *queue* was deleted, create *queue* and try once more."""
        arguments = {"DelaySeconds": delay_seconds, **payload.arguments()}
        for is_last_try in (False, True):
            try:
                self._send_to(queue, self.queues.declared_url(queue), arguments)
                return
            except ClientError as exc:
                if is_last_try or not is_gone(exc):
                    raise
                self.queues.forget(queue)

    def _send_into_delay_queue(self, queue: str, entry: SqsEntry) -> bool:
        """Send a message to the delay queue; return False if the delay queue is missing."""
        name = delay_queue_of(queue)
        for _ in range(2):
            url = self.known_delay_queue(queue).url
            if url is None:
                return False
            try:
                self._send_to(name, url, entry.arguments())
                return True
            except ClientError as exc:
                if not is_gone(exc):
                    raise
                self.queues.forget(name)
                self._known.pop(queue, None)
        return False

    def _send_to(self, queue: str, url: str, arguments: dict[str, Any]) -> None:
        with explained(self.queues.name(queue), "sqs:SendMessage"):
            self.queues.client(queue).send_message(QueueUrl=url, **arguments)

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
            way_out = "start an installed worker or run `celery -A PROJ delay relay`"
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
        overdue = overdue_in(attributes)
        if overdue:
            logger.warning(
                "native delay: %s: about %d message(s) have done their wait and no relay receives "
                "them: start an installed worker for %r or `celery -A PROJ delay relay`. "
                "SQS keeps them for 14 days",
                name,
                overdue,
                queue,
            )
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
