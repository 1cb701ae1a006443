"""A connection to the ledger that nobody waits for: each use is bounded in time.

What publishing notes down is sent and not waited for; its answers are read with what follows. A
ledger that refuses, or owes an answer for :data:`PATIENCE_SECONDS`, is left alone for a while, one
warning tells so, and tasks wait and run as ever.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
from collections import deque
from contextlib import suppress
from hashlib import sha1
from threading import Lock
from time import monotonic, perf_counter
from typing import Any

from ....core.errors import UnsupportedBroker
from ....core.redis_url import redis_py_url
from ....core.shown_url import without_password
from ....kombu_hook import flushes
from ..own_channel import is_readable
from .scripts import FORGET, RECEIVED, RECORD, LedgerKeys

logger = logging.getLogger(__name__)

#: Seconds that the ledger may take to connect, and for an answer.
PATIENCE_SECONDS = 0.3

#: Seconds for which a ledger that failed is left alone, doubled each time.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

#: Seconds for which a worker looks out for an answer before it goes to sleep.
_AWAKE_SECONDS = 0.00005

#: Answers are read at every so many messages, or after so many seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05

_RUN, _DROP = b":0\r\n", b":1\r\n"


def redis_options(url: str, *, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
    """URL and options for redis-py.

    Raises:
        UnsupportedBroker: redis-py is not installed.
    """
    try:
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise UnsupportedBroker(
            "native_delay_ledger needs redis-py: pip install 'celery_native_delay[redis]'"
        ) from exc
    return redis_py_url(url), {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }


class LedgerLine:
    """See the module's docstring. For any thread of one process.

    Used to publish or to receive, not for both. redis-py connects and logs in; it would take
    longer than the server to write a command and to read its answer.

    *missed* counts what could not be noted down, or asked.
    """

    def __init__(self, url: str, namespace: str, vhost: str = "/") -> None:
        to, options = redis_options(url, timeout_seconds=PATIENCE_SECONDS)
        from redis import ConnectionPool

        self.keys = LedgerKeys(namespace, vhost)
        self.missed = 0
        self._where = without_password(url)
        self._make_connection = ConnectionPool.from_url(to, **options).make_connection
        self._connection: Any = None
        self._answers = select.poll()
        self._lock = Lock()
        #: When each command that waits for its answer was sent.
        self._sent: deque[float] = deque()
        self._rest = b""
        self._retry_at = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._told = False
        digest = sha1(RECEIVED.encode(), usedforsecurity=False).hexdigest()
        self._record = _packed("EVAL", RECORD, 3, *self.keys.index)
        self._forget = _packed("EVAL", FORGET, 3, *self.keys.index)
        self._received = _packed("EVALSHA", digest, 4, *self.keys.index)
        self._received_whole = _packed("EVAL", RECEIVED, 4, *self.keys.index)
        marks = self.keys.marks.encode()
        self._marks, self._marks_packed = marks, _packed(marks)

    # --- publishing ----------------------------------------------------------------------

    def record(self, member: str, due_us: int, entry: bytes) -> None:
        """Note down a message that is about to wait; never fails, never waits."""
        name, due = member.encode(), b"%d" % due_us
        self._send(
            b"*9\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"
            % (self._record, len(name), name, len(due), due, len(entry), entry)
        )

    def forget(self, member: str) -> None:
        """A message could not be sent after all."""
        self._send(b"*7\r\n" + self._forget + _packed(member))

    def _send(self, command: bytes) -> None:
        with self._lock:
            if not self._is_usable():
                self.missed += 1
                return
            try:
                self._connection._sock.sendall(command)
                now = monotonic()
                self._sent.append(now)
                if len(self._sent) >= _READ_EVERY or now - self._sent[0] > _READ_AFTER_SECONDS:
                    self._read_ready()
                    if self._sent and now - self._sent[0] > PATIENCE_SECONDS:
                        raise TimeoutError(f"no answer within {PATIENCE_SECONDS} s")
            except Exception as exc:  # whatever it is, publishing must go on
                self._lose(exc)

    def _read_ready(self) -> None:
        while self._sent and self._is_readable(0):
            self._read_some()

    def _is_readable(self, seconds: float) -> bool:
        # redis-py's can_read() reads, into a buffer of its own.
        return is_readable(self._connection._sock, max(seconds, 0))

    def _read_some(self) -> None:
        """Many answers at once: each is a line, that of a script which returns nothing ``$-1``."""
        received = self._connection._sock.recv(65_536)
        if not received:
            raise ConnectionError("the ledger closed the connection")
        *lines, self._rest = (self._rest + received).split(b"\r\n")
        for line in lines:
            if line.startswith(b"-"):
                raise ConnectionError(line.decode("utf-8", "replace"))
            self._sent.popleft()
        if lines:
            self._works()

    def flush(self, timeout_seconds: float | None) -> None:
        """Read what is outstanding: a socket that is closed with answers unread loses commands."""
        deadline = monotonic() + min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS)
        with self._lock, suppress(Exception):
            while self._sent and monotonic() < deadline:
                if self._is_readable(deadline - monotonic()):
                    self._read_some()

    # --- receiving -----------------------------------------------------------------------

    def received(self, member: str) -> bool | None:
        """Whether the message of *member* may run; None if the ledger does not answer.

        Its entry is gone then.
        """
        with self._lock:
            if not self._is_usable():
                self.missed += 1
                return None
            name = member.encode()
            mark = self._marks + name.rpartition(b":")[2]
            rest = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(mark), mark, len(name), name)
            arguments = rest + self._marks_packed
            try:
                socket = self._connection._sock
                socket.sendall(b"*9\r\n" + self._received + arguments)
                self._look_out()
                answer = socket.recv(4096)
                if answer.startswith(b"-NOSCRIPT"):
                    socket.sendall(b"*9\r\n" + self._received_whole + arguments)
                    answer = socket.recv(4096)
                while not answer.endswith(b"\n"):
                    more = socket.recv(4096)
                    if not more:
                        raise ConnectionError("the ledger closed the connection")
                    answer += more
                if answer not in (_RUN, _DROP):
                    raise ConnectionError(answer.decode("utf-8", "replace").strip())
            except Exception as exc:  # whatever it is, the worker must go on
                self._lose(exc)
                self.missed += 1
                return None
            self._works()
            return bool(answer == _RUN)

    def _look_out(self) -> None:
        """Wait awake for as long as an answer takes: falling asleep and waking up takes longer."""
        is_there = self._answers.poll
        until = perf_counter() + _AWAKE_SECONDS
        while not is_there(0) and perf_counter() < until:
            pass

    def connect(self) -> bool:
        """Connect now, so that no task has to wait for it; False if that fails."""
        with self._lock:
            return self._is_usable()

    # --- the connection ------------------------------------------------------------------

    def _is_usable(self) -> bool:
        if self._connection is not None:
            return True
        if monotonic() < self._retry_at:
            return False
        connection = self._make_connection()
        try:
            connection.connect()
        except Exception as exc:  # redis-py's, the resolver's, TLS'
            self._lose(exc)
            return False
        self._connection = connection
        self._answers = select.poll()
        self._answers.register(connection._sock, select.POLLIN)
        return True

    def _works(self) -> None:
        if self._told:
            self._told = False
            logger.info("native delay: the ledger at %s is back", self._where)
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def _lose(self, exc: Exception) -> None:
        connection, self._connection = self._connection, None
        self._sent.clear()
        self._rest = b""
        if connection is not None:
            with suppress(Exception):
                connection.disconnect()
        self._retry_at = monotonic() + self._pause_seconds
        self._pause_seconds = min(self._pause_seconds * 2, LONGEST_PAUSE_SECONDS)
        if not self._told:
            self._told = True
            logger.warning(
                "native delay: the ledger at %s is away: tasks are delayed as ever, but cannot be "
                "listed, cancelled or moved until it is back: %s: %s",
                self._where,
                type(exc).__name__,
                exc,
            )


def _packed(*words: Any) -> bytes:
    """Words of a command, as Redis wants them."""
    encoded = (word if isinstance(word, bytes) else str(word).encode() for word in words)
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


# ---- the lines of this process ---------------------------------------------------------------

_lines: dict[tuple[str, str, str], LedgerLine] = {}
_registering = Lock()


def line_of(url: str, namespace: str, vhost: str = "/") -> LedgerLine:
    """The process's line for publishing."""
    key = (url, namespace, vhost)
    line = _lines.get(key)
    if line is None:
        with _registering:
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = LedgerLine(*key)
    return line


def _flush_all(timeout_seconds: float | None) -> None:
    for line in list(_lines.values()):
        line.flush(timeout_seconds)


def _leave_to_parent() -> None:
    """A forked child has lines of its own."""
    global _registering
    _registering = Lock()
    _lines.clear()


flushes.append(_flush_all)
atexit.register(_flush_all, None)
os.register_at_fork(after_in_child=_leave_to_parent)
