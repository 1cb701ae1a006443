"""Keep a bulk publisher's messages until confirmed; send unconfirmed messages again."""

from __future__ import annotations

import logging
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Event, RLock, Thread
from time import monotonic, sleep
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import OperationalError

from ..errors import NativeDelayError, RefusedMessage, errors_ignored
from .interface import connect_once

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OutboxMessage(Protocol):
    """A message that a bulk publisher stores in memory until the broker's confirm."""

    @property
    def size_bytes(self) -> int:
        """Return the message's approximate size in bytes."""


MessageT = TypeVar("MessageT", bound=OutboxMessage)

#: How many messages a batch has. More are no faster, and other clients of the broker wait longer.
BATCH = 100

#: Seconds to try to reconnect, counted from the first failure of an outage.
PATIENCE_SECONDS = 60.0

#: Seconds after which a batch that is not full is sent.
LINGER_SECONDS = 0.01

IN_DOUBT = "the broker has not confirmed it"

#: Seconds between two attempts to connect.
PAUSE_SECONDS = 0.2

#: How many bytes a batch has at most, so that the server is busy with a batch only briefly.
_BATCH_BYTES = 1_000_000

_TLS_REASONS = frozenset(
    ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "UNKNOWN_PROTOCOL", "NO_PROTOCOLS_AVAILABLE",
     "HTTP_REQUEST", "CERTIFICATE_VERIFY_FAILED", "NO_SHARED_CIPHER")
)  # fmt: skip

#: Beginnings of a SQLSTATE that mean: wrong user or password, no such database, no permission.
_SQL_STATES = ("28", "3D", "42501")

#: Texts of PostgreSQL when it refuses a connection. PostgreSQL's drivers give no SQLSTATE then.
_SQL_TEXTS = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied for database",
)

#: MySQL's error numbers for wrong user or password, no such database, no permission.
_MYSQL = frozenset((1044, 1045, 1049, 1142, 1698))

#: Error codes of SQLite: not permitted, read-only, cannot open, not authorized, no database.
_SQLITE = frozenset((3, 8, 14, 23, 26))


class OutboxBatch(Generic[MessageT]):
    """Messages that are sent together. Confirmed messages are removed from the batch."""

    def __init__(self, puts: Sequence[MessageT]) -> None:
        self.puts = list(puts)


BatchT = TypeVar("BatchT", bound=OutboxBatch[Any])


class Outbox(ABC, Generic[MessageT, BatchT]):
    """Keeps a bulk publisher's messages until confirmed, and sends unconfirmed messages again.

    A second thread sends incomplete batches after 10 ms. Both threads use :attr:`lock`.
    """

    lost: tuple[type[Exception], ...] = (OSError, OperationalError, RecoverableConnectionError)
    """The exception classes that mean a lost connection to the broker."""

    connection_options: ClassVar[dict[str, Any]] = {}
    """The transport options of the bulk publisher's own connection."""

    def __init__(self, client: Any, window: int) -> None:
        """*client* is a kombu connection to clone; *window* limits the unconfirmed messages."""
        options = {**(client.transport_options or {}), **self.connection_options}
        # The connection has no heartbeats, because no thread would send heartbeats.
        self._clone = partial(client.clone, heartbeat=0, transport_options=options)
        self._window = window
        self._batch_size = min(BATCH, window)
        #: Each of the two threads holds this lock while the thread uses the outbox.
        self.lock = RLock()
        #: The channel that collects messages; None before the first connection is made.
        self.channel: Any = None
        self.connects = 0
        self._client: Any = None
        #: The messages of the next batch.
        self._held: list[MessageT] = []
        self._held_bytes = 0
        self._held_since = 0.0
        #: All unconfirmed batches. The first ``_written`` batches are sent on this connection.
        self._batches: deque[BatchT] = deque()
        self._written = 0
        self._unanswered = 0
        #: The monotonic time at which the present outage began; None if there is no outage.
        self._away_since: float | None = None
        #: True if the outage has lasted for PATIENCE_SECONDS, or if a retry cannot end the outage.
        self.has_given_up = False
        self._refused: list[RefusedMessage] = []
        #: Messages of the user's transaction, which only the user's thread can write.
        self._joined: list[MessageT] = []
        self._wanted = Event()
        self._closed = Event()
        self._thread = Thread(target=self._send_in_time, name="native-delay-bulk", daemon=True)

    def take(self, put: MessageT) -> None:
        """Add a message to the next batch. Callers call :meth:`make_room` first."""
        if getattr(put, "joined", False):
            self._joined.append(put)
            return
        if not self._held:
            self._held_since = monotonic()
            self._want()
        self._held.append(put)
        self._held_bytes += put.size_bytes

    def refuse_returned(self, returned: list[Any]) -> None:
        """Report the unroutable messages *returned* as refused."""

    def make_room(self) -> None:
        """Send a full batch, and wait for confirms if too many messages are unconfirmed."""
        if len(self._joined) >= self._batch_size:
            self._write_joined()
        if len(self._held) >= self._batch_size or self._held_bytes >= _BATCH_BYTES:
            self._close_batch()
        if self._written < len(self._batches):
            self.patiently(lambda _: self._write())
        if self._unanswered > self._window - self._batch_size:
            self.patiently(lambda _: self._read_down())

    def patiently(self, attempt: Callable[[Any], T]) -> T:
        """Call the function *attempt* with a channel. After a lost connection, repeat the call.

        Raises a connection error if a retry cannot help, or after :data:`PATIENCE_SECONDS` without
        a connection. Raises every other error of *attempt* at once.
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
        """Return True for errors that a retry cannot fix, such as a wrong password."""
        return is_lasting_tls(error)

    @property
    def unconfirmed_count(self) -> int:
        return len(self._held) + len(self._joined) + self._unanswered

    def settle(self, *, timeout_seconds: float | None) -> None:
        """Wait until the broker has confirmed or refused every message.

        Raises TimeoutError after *timeout_seconds*. After a lost connection, this method tries to
        connect again. But if a retry cannot help, or if an earlier call has given up
        (:attr:`has_given_up`), this method raises TimeoutError at once.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        with self.lock:
            self._write_joined()
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
        """Return the messages that the broker refused since the last call of this method."""
        with self.lock:
            refused, self._refused = self._refused, []
            return refused

    def give_up(self) -> list[RefusedMessage]:
        """Remove all unconfirmed messages, and return a report about each message."""
        with self.lock:
            self._close_batch()
            puts = [put for batch in self._batches for put in batch.puts] + self._joined
            self._joined = []
            self._batches.clear()
            self._written = self._unanswered = 0
            return self._reports(IN_DOUBT, puts)

    def close(self) -> None:
        """Close the connection, and drop the unconfirmed messages."""
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

    def _write_joined(self) -> None:
        joined, self._joined = self._joined, []
        if joined:
            for reason, puts in self._join(joined).items():
                self._refuse(reason, puts)

    def _join(self, puts: list[MessageT]) -> dict[str, list[Any]]:
        """Write messages in the user's transaction; return the refused ones, by reason."""
        raise NotImplementedError("only a store joins a transaction")

    # --- what each broker implements ------------------------------------------------------

    @abstractmethod
    def _opened(self, client: Any) -> Any:
        """On the connection *client*, open a channel that only collects published messages."""

    @abstractmethod
    def _reports(self, reason: str, puts: Iterable[MessageT]) -> list[RefusedMessage]:
        """Return a RefusedMessage with this *reason* for each message."""

    @abstractmethod
    def _packed(self, puts: list[MessageT]) -> Iterable[BatchT]:
        """Divide messages into batches, without a network request."""

    @abstractmethod
    def _write(self) -> None:
        """Send all batches that are not yet sent on this connection; connect if necessary."""

    def _read_down(self) -> None:
        """Read the broker's confirms until the publisher may send another batch."""

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        """Read the broker's confirms that arrive within *timeout_seconds*."""

    def _forget(self) -> None:
        """Delete this publisher's batch number, by which the broker ignores a repeated batch."""

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
            connect_once(client)
            self.channel = self._opened(client)
        except BaseException:
            with errors_ignored():
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
            with errors_ignored():  # the connection is lost already
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


# ---- errors that a retry cannot fix --------------------------------------------------------------


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield *error*, then each exception that caused this error."""
    while error is not None:
        yield error
        context = error.__context__
        error = error.__cause__ or (context if isinstance(context, ssl.SSLError) else None)


def is_lasting_tls(error: BaseException) -> bool:
    """Return True for TLS errors that a retry cannot fix, such as untrusted certificates."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = (isinstance(error, ssl.SSLError) and error.reason) or ""
    refused = "_ALERT_" in reason and "INTERNAL_ERROR" not in reason
    return refused or reason in _TLS_REASONS


def is_lasting_sql(error: BaseException) -> bool:
    """Return True for database errors that a retry cannot fix, such as wrong passwords."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(state, str) and state.startswith(_SQL_STATES):
        return True
    if getattr(error, "sqlite_errorcode", None) in _SQLITE:
        return True
    module = type(error).__module__.partition(".")[0]
    if module in ("pymysql", "MySQLdb", "mysql"):
        return bool(error.args) and error.args[0] in _MYSQL
    text = str(error)
    unknown = "FATAL:" in text and " does not exist" in text
    return module.startswith("psycopg") and (unknown or any(said in text for said in _SQL_TEXTS))
