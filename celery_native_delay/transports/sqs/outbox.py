"""Publish in bulk to SQS: ten messages per request.

A request without an answer is sent again. A delay queue is a FIFO queue, so SQS drops a
duplicate that arrives less than five minutes after the original. A standard queue may deliver the
messages twice.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from ..virtual.outbox import CallingOutbox, Collecting, PlainMessage
from .delays import SqsDelays
from .entry import SqsMessage, in_requests
from .queues import can_delay, explained

#: Error codes of SQS for unknown credentials and missing rights.
_NOT_LET_IN = frozenset(
    ("InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException",
     "InvalidAccessKeyId", "AuthFailure", "OptInRequired", "AccessDenied", "AccessDeniedException")
)  # fmt: skip

_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, NoRegionError)


class NotYet(Exception):
    """Raised if SQS refused some messages of a batch; these messages are sent again."""


class SqsCollecting(Collecting):
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
        """Raise an error if SQS cannot accept the encoded message."""
        delays: SqsDelays = self.delays
        now_us = time_ns() // 1000
        delays.check_size(put, now_us=now_us)
        with explained(delays.queues.name(put.queue), "sqs:CreateQueue"):
            delays.queues.declared_url(put.queue)


class SqsOutbox(CallingOutbox[SqsMessage | PlainMessage]):
    """Sends delayed messages to SQS, ten per request, and immediate messages one by one."""

    lost = (*CallingOutbox.lost, BotoCoreError, ClientError, NotYet)
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
        now_us = time_ns() // 1000
        ways: dict[tuple[str, bool], list[SqsMessage | PlainMessage]] = {}
        for put in puts:
            if isinstance(put, PlainMessage):
                yield OutboxBatch([put])
            else:
                way = put.queue, put.is_far(now_us=now_us)
                ways.setdefault(way, []).append(put)
        for together in ways.values():
            # An entry has some 200 bytes more than the message in it.
            yield from map(OutboxBatch, in_requests(together, lambda put: put.size_bytes + 1000))

    def _deliver(self, batch: OutboxBatch[SqsMessage | PlainMessage]) -> None:
        if isinstance(plain := batch.puts[0], PlainMessage):  # the only one
            self._put_plainly(plain)
            return
        puts = [put for put in batch.puts if isinstance(put, SqsMessage)]
        failures = self.channel.delays.send(puts, now_us=time_ns() // 1000)
        self._settled(batch, [put for at, put in enumerate(puts) if at not in failures])
        for at, failure in failures.items():
            if failure.is_final:
                self._settled(batch, [puts[at]], reason=failure.reason)
        again = [failure.reason for failure in failures.values() if not failure.is_final]
        if again:
            raise NotYet(again[0])

    def _lose(self) -> None:
        # Each request connects by itself, so the connection is closed only at the end.
        if self._closed.is_set():
            super()._lose()
