"""Many messages to SQS: ten in a request, what it does not take is sent again or named.

A request whose answer was lost is sent again. SQS recognises that in a delay queue, for five
minutes; in a queue that is no FIFO queue it does not, nor does it for other senders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time_ns
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)

from ..outbox import OutboxBatch
from ..virtual.collecting import Collecting, PlainMessage
from ..virtual.recorded import Outbox as RecordedOutbox
from .delay_queue import can_delay, delay_queue_of
from .delays import Delays
from .entry import SqsMessage, in_requests
from .queues import explained

#: What SQS answers to credentials that it does not know; those it knows may be denied an action.
_NOT_LET_IN = frozenset(
    ("InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException",
     "InvalidAccessKeyId", "AuthFailure", "OptInRequired", "AccessDenied", "AccessDeniedException")
)  # fmt: skip

_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, NoRegionError)


class NotYet(Exception):
    """SQS did not take some messages now; it may in a moment."""


class SqsCollecting(Collecting):
    """A channel that collects messages that SQS will take."""

    def put_for(self: Any, queue: str, message: dict[str, Any]) -> SqsMessage | PlainMessage:
        due_us = self.due_of(message)
        if due_us is None or not can_delay(queue):
            return PlainMessage(queue, message)
        self.delays.check_reach(due_us)
        put: SqsMessage = self.delays.put_of(queue, message, due_us=due_us)
        self.check(put)
        return put

    def put_plainly(self: Any, put: PlainMessage) -> None:
        with explained(self.delays.queues.name(put.queue), "sqs:SendMessage"):
            super().put_plainly(put)

    def check(self: Any, put: SqsMessage) -> None:
        """Raise an error that stands against sending, before it is among those that are sent."""
        delays: Delays = self.delays
        now_us = time_ns() // 1000
        delays.check_size(put, now_us=now_us)
        with explained(delays.queues.name(put.queue), "sqs:CreateQueue"):
            delays.queues.url(put.queue)


class Outbox(RecordedOutbox[SqsMessage | PlainMessage]):
    """Many messages to SQS, ten in a request; what does not wait is sent as ever, one by one."""

    lost = (*RecordedOutbox.lost, BotoCoreError, ClientError, NotYet)
    collecting = SqsCollecting

    def is_lasting(self, error: BaseException) -> bool:
        if isinstance(error, ClientError):
            return error.response.get("Error", {}).get("Code") in _NOT_LET_IN
        no_credentials = isinstance(error, _NO_CREDENTIALS)
        return no_credentials or super().is_lasting(error)

    def take(self, put: SqsMessage | PlainMessage) -> None:
        if isinstance(put, SqsMessage):
            self.channel.check(put)
        super().take(put)

    def _prepare(self, channel: Any) -> None:
        channel.delays.check_settings()

    def _packed(
        self, puts: list[SqsMessage | PlainMessage]
    ) -> Iterable[OutboxBatch[SqsMessage | PlainMessage]]:
        """Batches of those that go to the same queue."""
        now_us = time_ns() // 1000
        ways: dict[tuple[str, bool], list[SqsMessage | PlainMessage]] = {}
        for put in puts:
            if isinstance(put, PlainMessage):
                yield OutboxBatch([put])
            else:
                way = put.queue, put.is_far(now_us=now_us)
                ways.setdefault(way, []).append(put)
        for together in ways.values():
            # By the size of an entry, which is some 200 bytes more than the message.
            yield from map(OutboxBatch, in_requests(together, lambda put: put.size_bytes + 1000))

    def _deliver(self, batch: OutboxBatch[SqsMessage | PlainMessage]) -> None:
        waiting = [put for put in batch.puts if isinstance(put, SqsMessage)]
        if isinstance(plain := batch.puts[0], PlainMessage):  # the only one
            self._put_plainly(plain)
            return
        # Since it was packed, some may have become due sooner than a wait in the delay queue ends.
        delays, now_us = self._delays, time_ns() // 1000
        queue = waiting[0].queue
        far = [put for put in waiting if put.is_far(now_us=now_us)]
        url = delays.usable(queue).url if far else None
        far = far if url else []
        near = [put for put in waiting if put not in far]
        if far:
            entries = [put.entry(now_us=now_us).arguments() for put in far]
            self._send(batch, far, delay_queue_of(queue), entries, lambda: str(url))
        if near:
            messages = [
                {**put.payload.arguments(), "DelaySeconds": put.seconds_here(now_us=now_us)}
                for put in near
            ]
            self._send(batch, near, queue, messages, lambda: delays.queues.url(queue))

    def _send(
        self,
        batch: OutboxBatch[SqsMessage | PlainMessage],
        puts: list[SqsMessage],
        queue: str,
        messages: list[dict[str, Any]],
        url: Callable[[], str],
    ) -> None:
        queues = self._delays.queues
        with explained(queues.name(queue), "sqs:SendMessage"):
            failures = queues.send_many(queue, messages, url=url)
        self._settled(batch, [put for at, put in enumerate(puts) if at not in failures])
        for at, failure in failures.items():
            if failure.is_final:
                self._settled(batch, [puts[at]], reason=failure.reason)
        again = [failure.reason for failure in failures.values() if not failure.is_final]
        if again:
            raise NotYet(again[0])

    def _lose(self) -> None:
        """Only at the end: what a request needs of a connection it makes by itself."""
        if self._closed.is_set():
            super()._lose()

    @property
    def _delays(self) -> Delays:
        delays: Delays = self.channel.delays
        return delays
