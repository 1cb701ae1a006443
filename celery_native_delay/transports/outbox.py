"""Unconfirmed messages of a bulk publisher: sent in batches, and again after a reconnect.

All brokers share it. The ``outbox.py`` of each says what a batch is and how it is sent.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, RLock, Thread
from time import monotonic, sleep
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import OperationalError

from ..errors import NativeDelayError, RefusedMessage
from .lasting import is_lasting_tls, with_causes

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutboxMessage(Protocol):
    """A message in an outbox."""

    @property
    def size_bytes(self) -> int:
        """The bytes that the message adds to a batch, roughly."""


MessageT = TypeVar("MessageT", bound=OutboxMessage)

#: Messages in a batch. More are no faster, and other clients of the broker wait longer.
BATCH = 100

#: Seconds to try to reconnect, counted from the first failure of an outage.
PATIENCE_SECONDS = 60.0

#: Seconds after which a batch that is not full is sent.
LINGER_SECONDS = 0.01

IN_DOUBT = "the broker has not confirmed it"

#: Seconds between two attempts to connect.
PAUSE_SECONDS = 0.2

#: Bytes in a batch at most, so that the server is busy with it for a moment only.
_BATCH_BYTES = 1_000_000


class OutboxBatch(Generic[MessageT]):
    """Messages that are sent together; confirmed ones are removed from it."""

    def __init__(self, puts: Sequence[MessageT]) -> None:
        self.puts = list(puts)


BatchT = TypeVar("BatchT", bound=OutboxBatch[Any])


class Outbox(ABC, Generic[MessageT, BatchT]):
    """Keeps messages until the broker has confirmed them, and sends them again after a reconnect.

    For one thread. A second thread, its own, sends a batch that is not full in time.
    """

    lost: tuple[type[Exception], ...] = (OSError, OperationalError, RecoverableConnectionError)
    """Errors of a lost connection."""

    connection_options: ClassVar[dict[str, Any]] = {}
    """Further transport options of the outbox's own connection."""

    def __init__(self, client: Any, window: int) -> None:
        """*client* is a kombu connection to the broker; the outbox connects a clone of it."""
        options = {**(client.transport_options or {}), **self.connection_options}
        # Without heartbeats: no thread would send them.
        self._clone = partial(client.clone, heartbeat=0, transport_options=options)
        self._window = window
        self._batch_size = min(BATCH, window)
        #: Held by either thread while it uses the outbox.
        self.lock = RLock()
        #: The channel that collects messages; None before the first connection.
        self.channel: Any = None
        self.connects = 0
        self._client: Any = None
        #: Messages of the next batch.
        self._held: list[MessageT] = []
        self._held_bytes = 0
        self._held_since = 0.0
        #: All unconfirmed batches; the first *written* ones are sent on this connection.
        self._batches: deque[BatchT] = deque()
        self._written = 0
        self._unanswered = 0
        #: When the present outage began, in seconds of the monotonic clock; None without one.
        self._away_since: float | None = None
        #: True if the outage has lasted for PATIENCE_SECONDS, or waiting cannot end it.
        self.has_given_up = False
        self._refused: list[RefusedMessage] = []
        self._wanted = Event()
        self._closed = Event()
        self._thread = Thread(target=self._send_in_time, name="native-delay-bulk", daemon=True)

    def take(self, put: MessageT) -> None:
        """Send a message soon, in a batch. Call :meth:`make_room` before."""
        if not self._held:
            self._held_since = monotonic()
            self._want()
        self._held.append(put)
        self._held_bytes += put.size_bytes

    def refuse_returned(self, returned: list[Any]) -> None:
        """Report messages as refused because no queue is bound for them."""

    def make_room(self) -> None:
        """Send the next batch if it is full, and wait while the window of unconfirmed messages is.

        Called before :meth:`take`: if it raises, the message was not taken.
        """
        if len(self._held) >= self._batch_size or self._held_bytes >= _BATCH_BYTES:
            self._close_batch()
        if self._written < len(self._batches):
            self.patiently(lambda _: self._write())
        if self._unanswered > self._window - self._batch_size:
            self.patiently(lambda _: self._read_down())

    def patiently(self, attempt: Callable[[Any], T]) -> T:
        """The result of *attempt*, which gets a channel; tried again after a lost connection.

        Raises what *attempt* raises. Raises one of :attr:`lost` if there has been no connection for
        :data:`PATIENCE_SECONDS`, over all calls, or the error is lasting.
        """
        while True:
            try:
                self._connect()
                done = attempt(self.channel)
            except self.lost as exc:
                self._lose()
                now = monotonic()
                if self._away_since is None:
                    self._away_since = now
                self.has_given_up = now - self._away_since > PATIENCE_SECONDS or any(
                    map(self.is_lasting, with_causes(exc))
                )
                if self.has_given_up:
                    raise
                sleep(PAUSE_SECONDS)
            else:
                self._is_back()
                return done

    def is_lasting(self, error: BaseException) -> bool:
        """True if waiting cannot end this error, such as a wrong password."""
        return is_lasting_tls(error)

    @property
    def unconfirmed_count(self) -> int:
        """The number of messages that the broker has not confirmed."""
        return len(self._held) + self._unanswered

    def settle(self, *, timeout_seconds: float | None) -> None:
        """Return when the broker has confirmed or refused every message.

        Raises TimeoutError after *timeout_seconds*, or if the outage has lasted too long or is
        lasting; then there is one attempt.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        with self.lock:
            self._close_batch()
            while self._unanswered:
                if deadline is not None and monotonic() > deadline:
                    raise TimeoutError(f"{self._unanswered} message(s) not confirmed in time")
                try:
                    self._write()
                    self._read_ready(timeout_seconds=PAUSE_SECONDS)
                except self.lost as exc:
                    self._lose()
                    if self.has_given_up or any(map(self.is_lasting, with_causes(exc))):
                        raise TimeoutError(
                            f"{self._unanswered} message(s) not confirmed: {exc}"
                        ) from exc
                    sleep(PAUSE_SECONDS)
                else:
                    self._is_back()

    def take_refused(self) -> list[RefusedMessage]:
        """The messages that the broker refused since the last call."""
        with self.lock:
            refused, self._refused = self._refused, []
            return refused

    def give_up(self) -> list[RefusedMessage]:
        """Forget the unconfirmed messages, and return them."""
        with self.lock:
            self._close_batch()
            puts = [put for batch in self._batches for put in batch.puts]
            self._batches.clear()
            self._written = self._unanswered = 0
            return self._reports(IN_DOUBT, puts)

    def close(self) -> None:
        """Close the connection, and forget the unconfirmed messages."""
        with self.lock:
            self._closed.set()
            self._wanted.set()
            if self._client is not None:
                with suppress(*self.lost, NativeDelayError):
                    self._forget()
            self._batches.clear()
            self._lose()
        if self._thread.ident is not None:
            self._thread.join()

    # --- what each broker implements ------------------------------------------------------

    @abstractmethod
    def _opened(self, client: Any) -> Any:
        """A channel that collects published messages, on a kombu connection that is open."""

    @abstractmethod
    def _reports(self, reason: str, puts: Iterable[MessageT]) -> list[RefusedMessage]:
        """Reports of refused messages."""

    @abstractmethod
    def _packed(self, puts: list[MessageT]) -> Iterable[BatchT]:
        """Batches of these messages. There may be no connection."""

    @abstractmethod
    def _write(self) -> None:
        """Connect if need be, and send all batches that were not sent on this connection."""

    def _read_down(self) -> None:
        """Read confirms until another batch fits into the window."""

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        """Read the confirms that have arrived, or arrive in time."""

    def _forget(self) -> None:
        """Delete what the broker keeps of this outbox, which is about to close."""

    # --- batches ----------------------------------------------------------------------------

    def _close_batch(self) -> None:
        if self._held:
            batches = list(self._packed(self._held))
            self._held, self._held_bytes = [], 0
            for batch in batches:
                self._add(batch)

    def _add(self, batch: BatchT) -> None:
        self._batches.append(batch)
        self._unanswered += len(batch.puts)
        self._want()

    def _refuse(self, reason: str, puts: Iterable[MessageT]) -> None:
        self._refused += self._reports(reason, puts)

    # --- the connection ------------------------------------------------------------------

    def _connect(self) -> None:
        if self._client is not None:
            return
        client = self._clone()
        try:
            # Once for each URL of a failover list; patiently() pauses between attempts.
            tries = len(client.alt) or 1
            client.ensure_connection(max_retries=tries, interval_start=0, interval_step=0)
            self.channel = self._opened(client)
        except BaseException:
            with suppress(Exception):
                client.close()
            raise
        self._client = client
        self.connects += 1

    def _is_back(self) -> None:
        self._away_since, self.has_given_up = None, False

    def _lose(self) -> None:
        client, self._client = self._client, None
        self._written = 0
        if client is not None:
            with suppress(Exception):  # the connection is lost already
                client.close()

    # --- the second thread ---------------------------------------------------------------

    def _want(self) -> None:
        if not self._wanted.is_set():
            self._wanted.set()
            if self._thread.ident is None:
                self._thread.start()

    def _send_in_time(self) -> None:
        expected: tuple[type[Exception], ...] = (*self.lost, NativeDelayError)
        pause_seconds = LINGER_SECONDS
        while self._wanted.wait() and not self._closed.wait(pause_seconds):
            pause_seconds = LINGER_SECONDS
            with self.lock:
                if self._closed.is_set():
                    break
                try:
                    if self._held and monotonic() - self._held_since >= LINGER_SECONDS:
                        self._close_batch()
                    if self._unanswered:
                        self._write()
                        self._read_ready()
                except Exception as exc:  # the thread must survive every error of the broker
                    if not isinstance(exc, expected):
                        logger.warning("native delay: sending in time failed", exc_info=True)
                    self._lose()
                    pause_seconds = PAUSE_SECONDS
                if not self._held and not self._unanswered:
                    self._wanted.clear()
