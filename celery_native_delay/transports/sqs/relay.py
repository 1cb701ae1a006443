"""Move messages out of the SQS delay queues, where SQS delivers a message after 15 minutes.

A worker runs one thread for each of its standard queues. The command ``delay promote`` runs the
same threads without a worker.

1. The thread receives a message from the delay queue.
2. If more than 15 minutes of the delay remain, the thread sends the message to the delay queue
   again. Otherwise the thread sends the message to the destination queue, with the rest of the
   delay as ``DelaySeconds``.
3. The thread deletes the received message.

If a worker dies between the send and the deletion, another worker sends the message, too. SQS drops
this duplicate in a delay queue (a FIFO queue), but not in the destination queue (a standard queue).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import KombuError

from ...backoff import Backoff
from ...errors import NativeDelayError
from .entry import SqsEntry, in_requests, opened
from .hops import BATCH, Reception, seconds_up
from .queues import Queues, dated_ms, delay_queue_of, is_gone

logger = logging.getLogger(__name__)

#: How many seconds SQS waits for messages before SQS answers that there are none.
LONG_POLL_SECONDS = 20

#: The visibility timeout: after so many seconds a relay receives a message again that was not sent
#: on or not deleted. This is shorter than the five minutes in which SQS recognises a repeated send.
VISIBILITY_SECONDS = 30

#: Seconds between attempts after a failure: the first pause, and the longest.
PAUSE_SECONDS = (0.5, 60.0)

#: How many seconds a stopping relay waits for its threads.
PATIENCE_SECONDS = 3.0

_ASKED = ["ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount", "SentTimestamp"]

_EXPECTED = (NativeDelayError, ClientError, BotoCoreError, KombuError, OSError)


@dataclass(frozen=True)
class _Received:
    """A message that a thread received from a delay queue."""

    entry: SqsEntry
    reception: Reception
    at: float  # the monotonic time
    message_id: str
    receipt: str

    @property
    def left_ms(self) -> int:
        """Return the remaining milliseconds of the message's delay."""
        waited_ms = int((monotonic() - self.at) * 1000)
        return self.reception.left_ms(self.entry.left_ms) - waited_ms


class SqsRelay:
    """Moves messages out of the SQS delay queues, with one thread for each queue."""

    parked = 0
    """Always 0, because a refused message stays in the delay queue for another attempt."""

    def __init__(self, connect: Callable[..., Any], queues: Sequence[str]) -> None:
        """*connect* opens a kombu connection; *queues* are the names of the destination queues."""
        self.promoted = 0  # messages sent to the destination
        self._connect = connect
        self._queues = list(queues)
        self._stopping = Event()
        self._counting = Lock()

    def run(self) -> None:
        """Move messages out of the delay queues until :meth:`stop`; retry after errors."""
        backoff = Backoff(*PAUSE_SECONDS)
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    _leave_room(connection, len(self._queues))
                    self._run_on(connection.default_channel)
            except Exception as exc:  # the loop must survive any error of the network
                _complain("relaying", exc, backoff.seconds)
                self._stopping.wait(backoff.failed())

    def count(self, promoted: int) -> None:
        """Count messages that were sent to their destination queue. Thread-safe."""
        with self._counting:
            self.promoted += promoted

    def stop(self) -> None:
        # A running long poll is not interrupted. If the process ends, another worker receives the
        # polled messages after VISIBILITY_SECONDS.
        self._stopping.set()

    def _run_on(self, channel: Any) -> None:
        threads = [
            Thread(
                target=self._serve,
                args=(channel, queue),
                name=f"native-delay-relay-{queue}",
                daemon=True,
            )
            for queue in self._queues
        ]
        for thread in threads:
            thread.start()
        self._stopping.wait()
        deadline = monotonic() + PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0))

    def _serve(self, channel: Any, queue: str) -> None:
        relay = QueueRelay(self, channel, queue)
        backoff = Backoff(*PAUSE_SECONDS)
        while not self._stopping.is_set():
            try:
                relay.step()
                backoff.reset()
            except _NoDelayQueue:
                return  # preparing the worker has logged this
            except Exception as exc:  # as above
                if self._stopping.is_set():
                    return
                _complain(f"relaying for {queue!r}", exc, backoff.seconds)
                self._stopping.wait(backoff.failed())


class _NoDelayQueue(NativeDelayError):
    """Raised if a delay queue does not exist, and this package cannot create the delay queue."""


class QueueRelay:
    """Moves messages out of one SQS delay queue."""

    def __init__(self, relay: SqsRelay, channel: Any, queue: str) -> None:
        self._relay = relay
        self._queues: Queues = channel.delays.queues
        self._destination = queue
        self._source = delay_queue_of(queue)
        #: Ids of messages that were sent on but could not be deleted. They are not sent again.
        self._sent: set[str] = set()

    def step(self) -> None:
        """Receive up to ten messages; send each message to the destination or the delay queue."""
        url = self._declared_url(self._source)
        try:
            answer = self._client().receive_message(
                QueueUrl=url,
                MaxNumberOfMessages=BATCH,
                WaitTimeSeconds=LONG_POLL_SECONDS,
                VisibilityTimeout=VISIBILITY_SECONDS,
                MessageSystemAttributeNames=_ASKED,
            )
        except ClientError as exc:
            if is_gone(exc):
                self._queues.forget(self._source)
            raise
        messages = answer.get("Messages") or []
        received = list(self._read(messages, now_ms=dated_ms(answer)))
        new = [each for each in received if each.message_id not in self._sent]
        home = [each for each in new if each.reception.is_last_hop(each.entry.left_ms)]
        onward = [each for each in new if each not in home]
        if sent_before := [each for each in received if each.message_id in self._sent]:
            self._delete(sent_before)
        # The order matters. SQS recognises a repeated send to the delay queue only while the first
        # message is there, and that may be one of the messages that go to the destination.
        self._send_all(self._source, onward, self._to_delay_queue)
        self._relay.count(self._send_all(self._destination, home, self._to_destination))

    def _read(self, messages: Sequence[dict[str, Any]], *, now_ms: int) -> Iterator[_Received]:
        at = monotonic()
        for message in messages:
            told = message["Attributes"]
            try:
                entry = opened(message["Body"])
            except ValueError as exc:
                logger.error("native delay: %s: unknown message left alone: %s", self._source, exc)
                continue
            reception = Reception(
                int(told["SentTimestamp"]),
                int(told["ApproximateFirstReceiveTimestamp"]),
                int(told["ApproximateReceiveCount"]),
                now_ms,
            )
            yield _Received(entry, reception, at, message["MessageId"], message["ReceiptHandle"])

    # --- sending on ----------------------------------------------------------------------

    def _to_destination(self, each: _Received) -> dict[str, Any]:
        return each.entry.payload.arguments() | {"DelaySeconds": seconds_up(each.left_ms)}

    def _to_delay_queue(self, each: _Received) -> dict[str, Any]:
        return each.entry.again(each.left_ms).arguments()

    def _send_all(
        self,
        queue: str,
        received: Sequence[_Received],
        arguments: Callable[[_Received], dict[str, Any]],
    ) -> int:
        """Move messages to *queue*; return the number of messages that SQS accepted."""
        taken = 0
        for batch in in_requests(received, lambda each: each.entry.size_bytes):
            refused = self._queues.send_many(
                queue,
                [arguments(each) for each in batch],
                url=lambda: self._declared_url(queue),
            )
            self._delete([each for at, each in enumerate(batch) if at not in refused])
            taken += len(batch) - len(refused)
            if refused:
                logger.error(
                    "native delay: %s refused %d of %d message(s), they are tried again: %s",
                    queue,
                    len(refused),
                    len(batch),
                    next(iter(refused.values())).reason,
                )
        return taken

    def _delete(self, sent: Sequence[_Received]) -> None:
        if not sent:
            return
        self._sent.update(each.message_id for each in sent)
        answer = self._client().delete_message_batch(
            QueueUrl=self._declared_url(self._source),
            Entries=[
                {"Id": str(at), "ReceiptHandle": each.receipt} for at, each in enumerate(sent)
            ],
        )
        failed = answer.get("Failed") or []
        kept = {int(each["Id"]) for each in failed}
        self._sent.difference_update(
            each.message_id for at, each in enumerate(sent) if at not in kept
        )
        if failed:
            logger.warning(
                "native delay: %s: %d message(s) were sent on but not deleted, so they may come "
                "twice: %s",
                self._source,
                len(failed),
                failed[0].get("Message"),
            )

    def _declared_url(self, queue: str) -> str:
        """Return the URL of *queue*; create *queue* if it is missing."""
        if queue == self._destination:
            return self._queues.declared_url(queue)
        url = self._queues.make_delay_queue(self._destination)
        if url is None:
            raise _NoDelayQueue(f"expected {self._source!r} among predefined_queues")
        return url

    def _client(self) -> Any:
        """Return a boto client for the delay queue; kombu renews an expired STS token."""
        return self._queues.client(self._source)


def _leave_room(connection: Any, threads: int) -> None:
    """Let boto3 keep at least one open connection for each thread, and wait for long polls."""
    options = connection.transport_options or {}
    config = {"max_pool_connections": max(threads, 10)} | (options.get("client-config") or {})
    config["read_timeout"] = max(config.get("read_timeout", 0), LONG_POLL_SECONDS + 10)
    connection.transport_options = options | {"client-config": config}


def _complain(what: str, exc: BaseException, pause_seconds: float) -> None:
    logger.warning(
        "native delay: %s stopped, next attempt in %.1f s: %s: %s",
        what,
        pause_seconds,
        type(exc).__name__,
        exc,
        exc_info=None if isinstance(exc, _EXPECTED) else exc,
    )
