"""A thread that reads streams from as far back as they matter, and follows them.

Plain AMQP 0-9-1, on a connection of its own: https://www.rabbitmq.com/docs/streams#consuming
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from secrets import token_hex
from threading import Condition, Thread
from time import monotonic
from typing import Any, Protocol
from weakref import WeakSet

import amqp
from amqp import spec

from ....backoff import Backoff
from ....durations import duration
from ....errors import LedgerUnavailable, NativeDelayError
from ...per_process import in_forked_child
from ..channels import Publication, WindowChannel
from ..own_connection import LOST, connection_like, hang_up, leave_to_parent
from ..stream_names import Stream
from ..topology import Topology
from .connection import GONE, LeadsNowhere
from .notes import Mark, Note, Noted, note_message, note_of

logger = logging.getLogger(__name__)

#: Messages on their way at a time, and after how many of them they are acknowledged.
_PREFETCH = 2000
_ACK_EVERY = 500

#: Clocks differ.
_CLOCKS = timedelta(minutes=10)

#: The broker is asked this often whether it is there, in seconds.
_PING_SECONDS = 0.25

#: A broker that owes an answer, and has sent nothing for so many seconds, is not there any more.
_UNANSWERED_SECONDS = 30.0

#: What was read is up to date if the broker has answered within so many seconds.
FRESH_SECONDS = 1.0

#: Without anything read for so long, those who wait for the end of the streams give up, and they
#: are read on another connection.
PATIENCE_SECONDS = 10.0

#: The same while there is no connection.
_LOST_SECONDS = 2.0


class Reader(Protocol):
    """A taker of what a follower reads; called with its lock held."""

    def restart(self) -> None:
        """All streams are read from the beginning again."""

    def read(self, rank: int, note: Note, message: Any) -> None:
        """A message of the *rank*-th stream, and what it is; no mark."""


class Follower(Thread):
    """A thread that reads streams and follows them; *lock* is held while the reader is called."""

    def __init__(
        self,
        client: Any,
        topology: Topology,
        streams: Sequence[Stream],
        reader: Reader,
        *,
        idle_seconds: float | None = None,
    ) -> None:
        """Of *idle_seconds* without a question the thread ends; None: never.

        *client* is a kombu connection to the same broker, which is not touched.
        """
        super().__init__(name="native-delay-follower", daemon=True)
        # Its pings take the place of heartbeats.
        self._client = connection_like(client)
        self._ledger = topology.ledger
        self._meaning = topology.settings.while_ledger_is_away
        self._streams = streams
        self._reader = reader
        self._idle_seconds = idle_seconds
        self._channel: WindowChannel | None = None
        self.lock = Condition()
        #: Marks that are to be seen: their tokens, and the streams in which they were not yet.
        self._marks: dict[str, set[int]] = {}
        self._is_current = False
        self._answered_at = 0.0
        self._pinged_at = 0.0
        self._heard_at = 0.0
        self._read_at = monotonic()
        self._asked_at = monotonic()
        self._unacked = 0
        self._error: Exception | None = None
        self._stopping = False
        _followers.add(self)

    # --- for other threads ---------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        """True if everything has been read that was written until about a second ago."""
        return self._is_current and monotonic() - self._answered_at < FRESH_SECONDS

    def wait_fresh(self, timeout_seconds: float) -> bool:
        """True if it :attr:`is_fresh`, or becomes so in time, as it does not without connection."""
        if self.is_fresh or not self._is_current:
            return self._is_current
        with self.lock:
            return self.lock.wait_for(lambda: self.is_fresh, timeout_seconds)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Hold the lock while everything has been read once; LedgerUnavailable if it cannot be."""
        with self.lock:
            self.wait_until(lambda: self._is_current)
            yield

    def expect(self, token: str) -> None:
        """A mark with this token is about to be written into every stream."""
        with self.lock:
            self._marks[token] = set(range(len(self._streams)))

    def wait_for_mark(self, token: str) -> None:
        """Return when everything has been read that stands before a mark; raises likewise."""
        # A new connection has forgotten it, and read everything again.
        self.wait_until(lambda: self._is_current and token not in self._marks)

    def stop(self) -> None:
        """End the thread soon."""
        self._stopping = True
        with self.lock:
            self.lock.notify_all()

    def is_asked(self) -> bool:
        """Go on reading, as something is asked; False if nothing is read any more."""
        with self.lock:
            self._asked_at = monotonic()
            return not self._stopping

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when *condition* of what was read holds; raises likewise."""
        with self.lock:
            begun = self._asked_at = monotonic()
            while not condition():
                patience_seconds = PATIENCE_SECONDS if self._error is None else _LOST_SECONDS
                waited_seconds = monotonic() - max(begun, self._read_at)
                if self._stopping or waited_seconds > patience_seconds:
                    reason = self._error or f"nothing was read for {duration(patience_seconds)}"
                    raise LedgerUnavailable(
                        f"the ledger in the streams of {self._client.as_uri()} does not answer: "
                        f"{reason}; {self._meaning}"
                    )
                self.lock.wait(_PING_SECONDS)
                self._asked_at = monotonic()

    def abandon(self) -> None:
        """Leave the socket alone, which in a forked child is the parent's."""
        leave_to_parent(self._client)

    # --- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while not self._ends():
            try:
                self._connect()
                backoff.reset()
                while not self._ends():
                    self._follow()
            except Exception as exc:  # the thread must outlive whatever the broker says
                self._lose(exc, is_expected=isinstance(exc, (*LOST, NativeDelayError)))
                with self.lock:
                    self.lock.wait(backoff.failed())
        self._disconnect()

    def _ends(self) -> bool:
        if self._idle_seconds is not None:
            with self.lock:
                self._stopping |= monotonic() - self._asked_at > self._idle_seconds
        return self._stopping

    def _connect(self) -> None:
        self._client.connect()
        connection = self._client.connection
        connection.delays.preparation.prepare_ledger(redeclare=isinstance(self._error, GONE))
        channel = self._channel = WindowChannel(connection)
        channel.basic_qos(0, _PREFETCH, False)
        token = token_hex(8)
        with self.lock:
            self._reader.restart()
            self._marks[token] = set(range(len(self._streams)))
            self._unacked = 0
        for rank, stream in enumerate(self._streams):
            begin = datetime.now(UTC) - timedelta(seconds=stream.reach_seconds) - _CLOCKS
            channel.basic_consume(
                stream.name,
                consumer_tag=str(rank),
                callback=partial(self._on_message, rank),
                arguments={"x-stream-offset": begin},
            )
        for stream in self._streams:
            mark = note_message(Mark(token))
            channel.send(Publication(mark, self._ledger.exchange, stream.name))
        self._pinged_at = self._answered_at = self._heard_at = self._read_at = monotonic()
        while token in self._marks and not self._stopping:
            self._follow()
            if monotonic() - self._read_at > PATIENCE_SECONDS:
                raise TimeoutError(f"nothing was read for {duration(PATIENCE_SECONDS)}")
            if channel.take_returned():
                raise LeadsNowhere(f"{self._ledger.exchange} leads nowhere")
        with self.lock:
            self._is_current = True
            if self._error is not None:
                logger.info("native delay: the ledger's streams are read again")
            self._error = None
            self.lock.notify_all()

    def _follow(self) -> None:
        channel = self._channel
        assert channel is not None
        is_readable = channel.is_readable(_PING_SECONDS)
        if is_readable:
            channel.read()
            self._heard_at = monotonic()
        if channel.connection is None:
            raise ConnectionError(f"the broker closed the channel: {channel.closed_with}")
        # Also the last ones: RabbitMQ closes a channel on which a message is not acknowledged for
        # half an hour.
        if self._unacked >= _ACK_EVERY or (self._unacked and not is_readable):
            channel.basic_ack(0, multiple=True)  # 0: all
            self._unacked = 0
        if spec.Basic.QosOk in channel._pending:
            if monotonic() - self._heard_at > _UNANSWERED_SECONDS:
                raise TimeoutError(
                    f"the broker has not answered for {duration(_UNANSWERED_SECONDS)}"
                )
        elif monotonic() - self._pinged_at > _PING_SECONDS:
            self._ping(channel)

    def _ping(self, channel: Any) -> None:
        # Any method with an answer will do. It is not waited for, and comes behind what was sent
        # to us before.
        self._pinged_at = monotonic()
        channel._pending[spec.Basic.QosOk] = self._on_answer
        channel.send_method(spec.Basic.Qos, "lBb", (0, _PREFETCH, False))

    def _on_answer(self, *_: Any) -> None:
        with self.lock:
            self._answered_at = monotonic()
            self.lock.notify_all()

    def _on_message(self, rank: int, message: amqp.Message) -> None:
        self._unacked += 1
        self._read_at = monotonic()
        note = note_of(message.properties.get("application_headers") or {})
        if note is None:
            return
        with self.lock:
            if not isinstance(note, Mark):
                self._reader.read(rank, note, message)
            elif (ranks := self._marks.get(note.token)) is not None:
                ranks.discard(rank)
                if not ranks:
                    del self._marks[note.token]
            if not isinstance(note, Noted):  # nothing waits for those, which may be very many
                self.lock.notify_all()

    def _lose(self, exc: Exception, *, is_expected: bool) -> None:
        first = self._error is None
        with self.lock:
            self._is_current = False
            self._error = exc
            # A mark from before is never told from one that is still to come.
            self._marks.clear()
        if first and not self._stopping:
            logger.warning(
                "native delay: the ledger's streams cannot be read, trying on: %s: %s",
                type(exc).__name__,
                exc,
                exc_info=not is_expected,
            )
        self._disconnect()
        # A node may have no replica: one that joined the cluster after the streams were declared.
        self._client.maybe_switch_next()

    def _disconnect(self) -> None:
        self._channel = None
        hang_up(self._client)


#: Of this process.
_followers: WeakSet[Follower] = WeakSet()


def _leave_to_parent() -> None:
    """A forked child has its parent's sockets, but not its threads."""
    for follower in list(_followers):
        follower.abandon()
    _followers.clear()


in_forked_child(_leave_to_parent)
