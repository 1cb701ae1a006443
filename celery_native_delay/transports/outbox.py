"""Messages that the broker has yet to answer for: written in batches, sent again if lost.

Shared by all brokers. The ``outbox.py`` of each says what a batch is, and how it goes out.
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
    """A message on its way to the broker."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it adds to a batch, about."""


MessageT = TypeVar("MessageT", bound=OutboxMessage)

#: Messages that are written at a time. More are no faster, and keep others waiting longer.
BATCH = 100

#: Seconds to try on while there is no connection, counted from the first failure of an outage.
PATIENCE_SECONDS = 60.0

#: A batch that is not full is sent after this, also if nothing follows it for an hour.
LINGER_SECONDS = 0.01

IN_DOUBT = "the server has not answered for it"

#: Between two attempts to connect.
PAUSE_SECONDS = 0.2

#: Bytes that one batch takes at most, so that it keeps the server from others for a moment only.
_BATCH_BYTES = 1_000_000


class OutboxBatch(Generic[MessageT]):
    """Messages that go out together; those that the broker has taken are not in it any more."""

    def __init__(self, puts: Sequence[MessageT]) -> None:
        self.puts = list(puts)


BatchT = TypeVar("BatchT", bound=OutboxBatch[Any])


class Outbox(ABC, Generic[MessageT, BatchT]):
    """Messages kept until the broker has answered for them.

    For one thread; what it holds back, a second one sends in time.

    *batches* are all that the server has yet to answer for, and the first so many of them have
    been *written* to the connection of now.
    """

    lost: tuple[type[Exception], ...] = (OSError, OperationalError, RecoverableConnectionError)
    """Errors that say that a connection or its server is gone."""

    connection_options: ClassVar[dict[str, Any]] = {}
    """Transport options of its own connection."""

    def __init__(self, client: Any, window: int) -> None:
        """*client* is a kombu connection to the same server, which is not touched."""
        options = {**(client.transport_options or {}), **self.connection_options}
        # Without heartbeats, which no thread would send.
        self._clone = partial(client.clone, heartbeat=0, transport_options=options)
        self._window = window
        self._batch_size = min(BATCH, window)
        #: Held by either thread while it does anything here.
        self.lock = RLock()
        #: On kombu's connection; None until there was one.
        self.channel: Any = None
        self.connects = 0
        self._client: Any = None
        #: What the next batch is to take.
        self._held: list[MessageT] = []
        self._held_bytes = 0
        self._held_since = 0.0
        self._batches: deque[BatchT] = deque()
        self._written = 0
        self._unanswered = 0
        #: When the outage of now began, in seconds of the monotonic clock; None without one.
        self._away_since: float | None = None
        #: Whether it has lasted too long, or will for good.
        self.has_given_up = False
        self._refused: list[RefusedMessage] = []
        self._wanted = Event()
        self._closed = Event()
        self._thread = Thread(target=self._send_in_time, name="native-delay-bulk", daemon=True)

    def take(self, put: MessageT) -> None:
        """Send a message, soon, together with others; after :meth:`make_room`."""
        if not self._held:
            self._held_since = monotonic()
            self._want()
        self._held.append(put)
        self._held_bytes += put.size_bytes

    def refuse_returned(self, returned: list[Any]) -> None:
        """Report messages that the channel did not collect: no queue is bound for them."""

    def make_room(self) -> None:
        """Send what is held if that is enough, and wait for answers while the window is full.

        Before a message is taken, so that one that cannot be sent is not held either.
        """
        if len(self._held) >= self._batch_size or self._held_bytes >= _BATCH_BYTES:
            self._close_batch()
        if self._written < len(self._batches):
            self.patiently(lambda _: self._write())
        if self._unanswered > self._window - self._batch_size:
            self.patiently(lambda _: self._read_down())

    def patiently(self, attempt: Callable[[Any], T]) -> T:
        """The result of *attempt*, given a channel; again on a new one if the connection is lost.

        Raises what *attempt* does, and one of :attr:`lost` if there has been no connection for
        :data:`PATIENCE_SECONDS`, however many calls ago that began, or it is lasting.
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
        """True if this cause of one of :attr:`lost` is no outage, but will be there tomorrow."""
        return is_lasting_tls(error)

    @property
    def unconfirmed_count(self) -> int:
        """Number of messages that the server has yet to answer for."""
        return len(self._held) + self._unanswered

    def settle(self, *, timeout_seconds: float | None) -> None:
        """Return when the server has answered for everything.

        TimeoutError: it has not after *timeout_seconds*, or it is known that it will not: for an
        outage that has lasted too long already there is one attempt.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        with self.lock:
            self._close_batch()
            while self._unanswered:
                if deadline is not None and monotonic() > deadline:
                    raise TimeoutError(f"{self._unanswered} message(s) not answered for in time")
                try:
                    self._write()
                    self._read_ready(timeout_seconds=PAUSE_SECONDS)
                except self.lost as exc:
                    self._lose()
                    if self.has_given_up or any(map(self.is_lasting, with_causes(exc))):
                        raise TimeoutError(
                            f"{self._unanswered} message(s) not answered for: {exc}"
                        ) from exc
                    sleep(PAUSE_SECONDS)
                else:
                    self._is_back()

    def take_refused(self) -> list[RefusedMessage]:
        """Messages that the server did not take since the last time."""
        with self.lock:
            refused, self._refused = self._refused, []
            return refused

    def give_up(self) -> list[RefusedMessage]:
        """The messages that the server has yet to answer for; they are given up."""
        with self.lock:
            self._close_batch()
            puts = [put for batch in self._batches for put in batch.puts]
            self._batches.clear()
            self._written = self._unanswered = 0
            return self._reports(IN_DOUBT, puts)

    def close(self) -> None:
        """Close the connection; what is in doubt is given up."""
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

    # --- what only the one for a broker knows ---------------------------------------------

    @abstractmethod
    def _opened(self, client: Any) -> Any:
        """A channel that collects what is published on it, on a kombu connection that stands."""

    @abstractmethod
    def _reports(self, reason: str, puts: Iterable[MessageT]) -> list[RefusedMessage]:
        """The reports about messages that were not taken."""

    @abstractmethod
    def _packed(self, puts: list[MessageT]) -> Iterable[BatchT]:
        """Batches of the messages that are to go out; there may be no connection now."""

    @abstractmethod
    def _write(self) -> None:
        """Send all batches that are not written yet, on a connection."""

    def _read_down(self) -> None:
        """Read answers until another batch fits into the window."""

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        """Read those answers that have come, or come in time."""

    def _forget(self) -> None:
        """Remove what the server keeps of this outbox, which is about to close."""

    # --- out and in -------------------------------------------------------------------------

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
            # Once for each URL; the pauses between attempts are ours.
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
            with suppress(Exception):  # it is gone, whatever it says to that
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
                except Exception as exc:  # the thread must outlive whatever the broker says
                    if not isinstance(exc, expected):
                        logger.warning("native delay: sending in time failed", exc_info=True)
                    self._lose()
                    pause_seconds = PAUSE_SECONDS
                if not self._held and not self._unanswered:
                    self._wanted.clear()
