"""A connection for what is written into the ledger's streams, and read by its place there.

A stream that is not there may cost its publisher the connection (506 in RabbitMQ 4.3), and delaying
must go on without a ledger: so all of this happens on a connection of its own. Entries are sent
and not waited for. If that fails, what is unconfirmed is kept, and what comes next, up to
:data:`WINDOW`; the streams are left alone for a while, and one warning tells so.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from time import monotonic
from typing import Any, TypeVar

import amqp
from amqp.exceptions import NotFound

from ....backoff import Backoff
from ....errors import LedgerUnavailable
from ....settings import DelaySettings
from ...aliases import flushes
from ...per_process import PerProcess
from ..channels import NotConfirmedInTime, OwnChannel, Publication, Sendable, WindowChannel
from ..ledger.connection import LEFT_ALONE_SECONDS, PATIENCE_SECONDS
from ..outbox import outbox_key
from ..own_connection import connection_like, hang_up, leave_to_parent
from ..stream_names import Stream
from ..topology import Topology
from .notes import Note, Noted, note_message

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Entries that may be unconfirmed at a time.
WINDOW = 1000

#: Confirms are read at every so many entries, or after so many seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05

#: People wait longer than publishers, in seconds.
_ANSWER_SECONDS = 5.0


class LeadsNowhere(ConnectionError):
    """A stream, or the exchange in front of it, is not there, or takes nothing."""


#: After these, the streams are declared again; a user who may not goes on without at the next try.
GONE = (NotFound, LeadsNowhere)


class _Entry(Publication):
    """The copy of a message that waits."""


class StreamConnection:
    """A connection that writes into a ledger's streams, and reads by place. For any thread."""

    def __init__(self, client: Any, settings: DelaySettings) -> None:
        """*client* is a kombu connection to the same broker, which is not touched."""
        self._exchange = Topology(settings).ledger.exchange
        self._client = connection_like(client)
        self._meaning = settings.while_ledger_is_away
        self._lock = RLock()
        self._channel: WindowChannel | None = None
        self._fetcher: OwnChannel | None = None
        self._unsent: deque[Sendable] = deque(maxlen=WINDOW)
        self._unread = 0
        self._read_at = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(*LEFT_ALONE_SECONDS)
        self._error: Exception | None = None
        #: Changes with every entry: a reader wants to see those of this process at once.
        self.recorded = 0

    # --- entries: never fail -------------------------------------------------------------

    def record(self, stream: Stream, note: Noted, entry: bytes) -> None:
        """Note down a message that is about to wait."""
        with self._lock:
            self.recorded += 1
            self._unsent.append(_Entry(note_message(note, entry), self._exchange, stream.name))
            if self._channel is None and monotonic() < self._retry_at:
                return
            try:
                channel = self._connected()
                if channel.unconfirmed_count >= WINDOW:
                    self._settle(channel, PATIENCE_SECONDS, most=WINDOW // 2)
                self._send_unsent(channel)
                self._unread += 1
                if self._unread >= _READ_EVERY or monotonic() - self._read_at > _READ_AFTER_SECONDS:
                    channel.read_ready()
                    self._see_to_answers(channel)
            except Exception as exc:  # whatever it is, publishing must go on
                self._lose(exc)

    def flush(self, timeout_seconds: float | None) -> None:
        """Wait a moment for what is unconfirmed: what follows is to stand behind it."""
        most_seconds = min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS)
        with self._lock:
            if self._channel is None:
                return
            try:
                self._settle(self._channel, most_seconds)
            except NotConfirmedInTime:
                pass  # what follows on this connection stands behind it all the same
            except Exception as exc:
                self._lose(exc)

    # --- for who asks --------------------------------------------------------------------

    def write(self, notes: Sequence[tuple[Stream, Note]]) -> None:
        """Write notes, which stand there then; some of them also if LedgerUnavailable is raised."""

        def write(channel: WindowChannel) -> None:
            for stream, note in notes:
                channel.send(
                    Publication(note_message(note), self._exchange, stream.name),
                    timeout_seconds=_ANSWER_SECONDS,
                )
            self._settle(channel, _ANSWER_SECONDS)

        self._try(write)

    def fetch(self, stream: Stream, offset: int) -> amqp.Message:
        """The message that stands there; raises LedgerUnavailable."""

        def fetch(_: WindowChannel) -> amqp.Message:
            came: list[amqp.Message] = []
            channel = self._fetcher
            if channel is None or channel.connection is None:
                channel = self._fetcher = OwnChannel(self._client.connection)
                channel.basic_qos(0, 1, False)
            begin = {"x-stream-offset": offset}
            channel.basic_consume(
                stream.name, consumer_tag="fetch", callback=came.append, arguments=begin
            )
            deadline = monotonic() + _ANSWER_SECONDS
            while not came:
                if not channel.is_readable(max(deadline - monotonic(), 0)):
                    raise TimeoutError(f"{stream.name} yields nothing at offset {offset}")
                channel.read()
            channel.basic_cancel("fetch")
            channel.basic_ack(0, multiple=True)  # 0: all
            return came[0]

        return self._try(fetch)

    def _try(self, action: Callable[[WindowChannel], T]) -> T:
        """Also on a second connection: the first may have been lost long ago."""
        with self._lock:
            for last_try in (False, True):
                try:
                    return action(self._connected())
                except Exception as exc:
                    if last_try or isinstance(exc, GONE):
                        self._lose(exc)
                    self._drop()
                    if last_try:
                        raise LedgerUnavailable(
                            f"the ledger in the streams of {self._client.as_uri()} does not "
                            f"answer: {exc}; {self._meaning}"
                        ) from exc
        raise AssertionError("unreachable")

    # --- the connection ------------------------------------------------------------------

    def _connected(self) -> WindowChannel:
        channel = self._channel
        if channel is not None and channel.is_usable:
            return channel
        if channel is not None:
            self._drop()
        self._client.connect()
        connection = self._client.connection
        connection.delays.preparation.prepare_ledger(redeclare=isinstance(self._error, GONE))
        channel = self._channel = WindowChannel(connection)
        self._send_unsent(channel)
        return channel

    def _send_unsent(self, channel: WindowChannel) -> None:
        while self._unsent:
            channel.send(self._unsent[0], timeout_seconds=PATIENCE_SECONDS)
            self._unsent.popleft()

    def _settle(self, channel: WindowChannel, seconds: float, *, most: int = 0) -> None:
        """Return when at most *most* are unconfirmed."""
        deadline = monotonic() + seconds
        channel.read_down_to(most, deadline=deadline)
        self._see_to_answers(channel)

    def _see_to_answers(self, channel: WindowChannel) -> None:
        self._unread, self._read_at = 0, monotonic()
        if returned := channel.take_returned():
            self._keep(returned)
            raise LeadsNowhere(f"{self._exchange} leads nowhere")
        if nacked := channel.take_nacked():
            self._keep(nacked)
            raise LeadsNowhere(f"{self._exchange} takes nothing")
        if channel.unconfirmed_count == channel.published_count:
            return
        self._backoff.reset()
        if self._error is not None:
            self._error = None
            logger.info("native delay: the ledger in RabbitMQ's streams is back")

    def _lose(self, exc: Exception) -> None:
        self._drop()
        self._retry_at = monotonic() + self._backoff.failed()
        is_first, self._error = self._error is None, exc
        if is_first:
            logger.warning(
                "native delay: the ledger in RabbitMQ's streams is away: tasks are delayed as "
                "ever, but cannot be listed, cancelled or moved until it is back: %s: %s",
                type(exc).__name__,
                exc,
            )

    def _keep(self, messages: Iterable[Sendable]) -> None:
        """To be sent again: entries alone, as who wrote anything else was told that it failed."""
        self._unsent.extend(message for message in messages if isinstance(message, _Entry))

    def _drop(self) -> None:
        channel, self._channel, self._fetcher = self._channel, None, None
        if channel is not None:
            self._keep(channel.unconfirmed)
        hang_up(self._client)
        # As the follower's; see there.
        self._client.maybe_switch_next()

    def abandon(self) -> None:
        """Leave the socket alone, which in a forked child is the parent's."""
        leave_to_parent(self._client)


# ---- those of this process ---------------------------------------------------------------------

_connections: PerProcess[Any, StreamConnection] = PerProcess(StreamConnection.abandon)


def stream_connection(client: Any, settings: DelaySettings) -> StreamConnection:
    """The process's connection to the streams of the broker that *client* leads to."""
    key = outbox_key(client, settings)
    return _connections.get(key, lambda: StreamConnection(client, settings))


def _flush_all(timeout_seconds: float | None) -> None:
    for found in _connections.values():
        found.flush(timeout_seconds)


flushes.append(_flush_all)
atexit.register(_flush_all, None)
