"""Relaying what comes out of delay queues: in every worker, or in a process of its own.

A thread for each queue, because a long poll takes its time. A message is deleted once SQS has it
on its next way, so that nothing is lost when a relay dies; the next to receive it repeats a send
that SQS recognises, as long as it goes back into the delay queue. Any number may run at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import KombuError

from ...backoff import Backoff
from ...errors import NativeDelayError
from .delay_queue import delay_queue_of
from .entry import Entry, in_requests, opened
from .hops import BATCH, Reception, retry_seconds, seconds_up
from .queues import Queues, dated_ms, is_gone

logger = logging.getLogger(__name__)

#: The longest that SQS waits for messages before it answers that there are none.
LONG_POLL_SECONDS = 20

#: After so many seconds another relay is given what this one has received and not sent on; short
#: of the five minutes for which SQS recognises a repeated send.
VISIBILITY_SECONDS = 30

#: Seconds between attempts after a failure: first, and at most.
PAUSE_SECONDS = (0.5, 60.0)

#: Seconds that the end of a relay is put off for what is in its hands.
PATIENCE_SECONDS = 3.0

_ASKED = ["ApproximateFirstReceiveTimestamp", "ApproximateReceiveCount", "SentTimestamp"]

_EXPECTED = (NativeDelayError, ClientError, BotoCoreError, KombuError, OSError)


@dataclass(frozen=True)
class _Received:
    """An entry, when it was received (monotonic, seconds), what SQS calls it, how to delete it."""

    entry: Entry
    reception: Reception
    at: float
    message_id: str
    receipt: str

    @property
    def left_ms(self) -> int:
        """Milliseconds that are left of its delay now."""
        waited_ms = int((monotonic() - self.at) * 1000)
        return self.reception.left_ms(self.entry.left_ms) - waited_ms

    @property
    def retry_seconds(self) -> int:
        return retry_seconds(self.reception.receive_count)


class Relay:
    """A loop that relays for some queues, one thread each.

    *promoted* counts messages that were sent to their destination, *relayed* those that were sent
    back to wait on, *failed* attempts at either that SQS refused.
    """

    parked = 0
    """Nothing is: what cannot be sent on waits in its delay queue."""

    def __init__(self, connect: Callable[..., Any], queues: Sequence[str]) -> None:
        """*connect* makes a kombu connection; *queues* are destinations."""
        self.promoted = 0
        self.relayed = 0
        self.failed = 0
        self._connect = connect
        self._queues = list(queues)
        self._stopping = Event()
        self._counting = Lock()

    def run(self) -> None:
        """Relay until :meth:`stop`, however often SQS cannot be reached."""
        backoff = Backoff(*PAUSE_SECONDS)
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    _leave_room(connection, len(self._queues))
                    self._run_on(connection.default_channel)
            except Exception as exc:  # the loop must outlive whatever the network brings
                _complain("relaying", exc, backoff.seconds)
                self._stopping.wait(backoff.failed())

    def count(self, *, promoted: int = 0, relayed: int = 0, failed: int = 0) -> None:
        """Add to the counters; from any of the threads."""
        with self._counting:
            self.promoted += promoted
            self.relayed += relayed
            self.failed += failed

    def stop(self) -> None:
        """End :meth:`run` soon.

        A long poll cannot be interrupted: what it still brings is sent on as long as this process
        lives, and else received by another relay when :data:`VISIBILITY_SECONDS` are over.
        """
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
                return  # the part that prepared us has said so
            except Exception as exc:  # as above
                if self._stopping.is_set():
                    return
                _complain(f"relaying for {queue!r}", exc, backoff.seconds)
                self._stopping.wait(backoff.failed())


class _NoDelayQueue(NativeDelayError):
    """A delay queue that should have been among the predefined queues."""


class QueueRelay:
    """Relaying for one destination, which is what one thread does."""

    def __init__(self, relay: Relay, channel: Any, queue: str) -> None:
        self._relay = relay
        self._queues: Queues = channel.delays.queues
        self._destination = queue
        self._source = delay_queue_of(queue)
        #: Ids of messages that were sent on and could not be deleted: not to be sent again.
        self._sent: set[str] = set()

    def step(self) -> None:
        """Receive up to ten messages and send them on; what SQS does not take rests by itself."""
        url = self._url(self._source)
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
        # In this order: a repeated send is recognised by the message that it repeats, which may
        # be among those that go home.
        try:
            self._relay.count(relayed=self._send_all(self._source, onward, self._onward))
        except BaseException:
            self._let_rest([(each.receipt, 0) for each in home])
            raise
        self._relay.count(promoted=self._send_all(self._destination, home, self._home))

    def _read(self, messages: Sequence[dict[str, Any]], *, now_ms: int) -> Iterator[_Received]:
        at = monotonic()
        for message in messages:
            told = message["Attributes"]
            count = int(told["ApproximateReceiveCount"])
            try:
                entry = opened(message["Body"])
            except ValueError as exc:
                logger.error("native delay: %s: message left alone: %s", self._source, exc)
                self._let_rest([(message["ReceiptHandle"], retry_seconds(count))])
                continue
            reception = Reception(
                int(told["SentTimestamp"]),
                int(told["ApproximateFirstReceiveTimestamp"]),
                count,
                now_ms,
            )
            yield _Received(entry, reception, at, message["MessageId"], message["ReceiptHandle"])

    # --- sending on ----------------------------------------------------------------------

    def _home(self, each: _Received) -> dict[str, Any]:
        return each.entry.payload.arguments() | {"DelaySeconds": seconds_up(each.left_ms)}

    def _onward(self, each: _Received) -> dict[str, Any]:
        return each.entry.again(each.left_ms).arguments()

    def _send_all(
        self,
        queue: str,
        received: Sequence[_Received],
        arguments: Callable[[_Received], dict[str, Any]],
    ) -> int:
        """Send *received* to *queue* and delete what SQS has taken; how many."""
        taken = 0
        batches = list(in_requests(received, lambda each: each.entry.size_bytes))
        for number, batch in enumerate(batches):
            try:
                refused = self._queues.send_many(
                    queue, [arguments(each) for each in batch], url=lambda: self._url(queue)
                )
            except BaseException:
                # Another relay may reach what this one does not.
                unsent = [each for batch in batches[number:] for each in batch]
                self._let_rest([(each.receipt, 0) for each in unsent])
                raise
            self._delete([each for at, each in enumerate(batch) if at not in refused])
            taken += len(batch) - len(refused)
            if refused:
                self._relay.count(failed=len(refused))
                logger.error(
                    "native delay: %s did not take %d of %d message(s), they are tried again: %s",
                    queue,
                    len(refused),
                    len(batch),
                    next(iter(refused.values())).reason,
                )
                failed = [batch[at] for at in refused]
                self._let_rest([(each.receipt, each.retry_seconds) for each in failed])
        return taken

    def _delete(self, sent: Sequence[_Received]) -> None:
        if not sent:
            return
        self._sent.update(each.message_id for each in sent)
        answer = self._client().delete_message_batch(
            QueueUrl=self._url(self._source),
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
                "native delay: %s: %d message(s) sent on and not deleted, they may come twice: %s",
                self._source,
                len(failed),
                failed[0].get("Message"),
            )

    def _let_rest(self, receipts: Sequence[tuple[str, int]]) -> None:
        """Give messages back to SQS, to be delivered after seconds each; else it does by itself."""
        if not receipts:
            return
        entries = [
            {"Id": str(at), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
            for at, (receipt, seconds) in enumerate(receipts)
        ]
        with suppress(ClientError, BotoCoreError, OSError):
            self._client().change_message_visibility_batch(
                QueueUrl=self._url(self._source), Entries=entries
            )

    def _url(self, queue: str) -> str:
        """The URL of the destination or the delay queue; created if it is gone."""
        if queue == self._destination:
            return self._queues.url(queue)
        url = self._queues.make_delay_queue(self._destination)
        if url is None:
            raise _NoDelayQueue(f"expected {self._source!r} among predefined_queues")
        return url

    def _client(self) -> Any:
        """Asked for each time: the tokens of predefined queues expire."""
        return self._queues.client(self._source)


def _leave_room(connection: Any, threads: int) -> None:
    """Let boto3 keep a socket for each thread; of more than ten it throws some away."""
    options = connection.transport_options or {}
    room = {"max_pool_connections": max(threads, 10)}
    config = {"client-config": room | (options.get("client-config") or {})}
    connection.transport_options = options | config


def _complain(what: str, exc: BaseException, pause_seconds: float) -> None:
    logger.warning(
        "native delay: %s stopped, next attempt in %.1f s: %s: %s",
        what,
        pause_seconds,
        type(exc).__name__,
        exc,
        exc_info=None if isinstance(exc, _EXPECTED) else exc,
    )
