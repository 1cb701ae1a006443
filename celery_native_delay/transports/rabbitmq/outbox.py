"""Delayed messages on their way to one broker, kept until it has confirmed them.

With ``native_delay_confirm_publish = "window"`` all threads of a process publish through one
outbox for each broker URL. It has a connection of its own, so that reading confirms meets no other
conversation, and a lock. What is unconfirmed when that connection dies goes out again on
the next, under the same delivery id. A thread looks after what no further publish comes for, and
ends when nothing has come for a while.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from threading import Event, RLock, Thread
from time import monotonic
from typing import Any

from amqp.exceptions import AccessRefused, NotAllowed

from ...backoff import Backoff
from ...durations import duration
from ...errors import NativeDelayError, PublishRefused, RefusedMessage
from ...per_process import PerProcess
from ...settings import DelaySettings
from ..aliases import flushes
from ..lasting import is_lasting_tls
from .channels import NotConfirmedInTime, Publication, Sendable
from .own_connection import LOST, connection_like, hang_up, leave_to_parent
from .sending import Sender

logger = logging.getLogger(__name__)

#: Seconds that a message is held back at most, so that others are written with it.
LINGER_SECONDS = 0.005

#: Seconds between two looks at what no further publish comes for.
SETTLE_SECONDS = 0.5

#: Seconds without a publish after which the connection is given up.
IDLE_SECONDS = 30.0

#: Seconds that the end of the process is put off for what is not confirmed.
EXIT_SECONDS = 30.0

_LONGEST_RETRY_SECONDS = 5.0

IN_DOUBT = "the connection was lost before the broker had confirmed it; it may have arrived"


def is_lasting(error: BaseException) -> bool:
    """True if what ended a connection, or kept it from being made, will be there tomorrow.

    It is a wrong user or password, a virtual host that is not there or not for this user, TLS
    where the other end has none; not a limit of connections, nor a virtual host that is down.
    """
    if isinstance(error, NotAllowed):
        text = str(error)
        return "limit (" not in text and "is down" not in text
    return isinstance(error, AccessRefused) or is_lasting_tls(error)


class Outbox:
    """A keeper of a process's delayed messages for one broker, until it has confirmed them."""

    def __init__(self, client: Any, window: int) -> None:
        """*client* is a kombu connection to the same broker, which is not touched."""
        self._client = connection_like(client)
        self._window = window
        #: Held while the connection is used.
        self.lock = RLock()
        self._sender: Sender | None = None
        self._unsent: deque[Sendable] = deque()
        self._refused: list[RefusedMessage] = []
        self._published_at = monotonic()
        self._settler: Thread | None = None
        self._wake = Event()
        self._is_settler_slow = False
        #: How often it has connected; other connections look again for what they rely on then.
        self.connects = 0
        #: Set when the broker has been away for too long, or does not let us in.
        self.has_given_up = False

    def publish(self, publication: Publication, *, timeout_seconds: float | None = None) -> None:
        """Send without waiting, unless the window is full; it was not sent if this raises.

        Raises:
            PublishRefused: the broker did not take earlier ones.
            TimeoutError: the window stayed full for *timeout_seconds*.
            OSError, amqp.exceptions.AMQPError: there is no connection; earlier ones stay kept.
        """
        with self.lock:
            self._report_refused("this message was not sent")
            self.send(publication, timeout_seconds=timeout_seconds)

    def send(self, message: Sendable, *, timeout_seconds: float | None = None) -> None:
        """:meth:`publish` that leaves what was refused to :meth:`take_refused`."""
        with self.lock:
            lost = False
            while True:
                try:
                    sender = self._sender
                    if sender is None or self._unsent:
                        sender = self._ready_sender()
                    sender.send(message, timeout_seconds=timeout_seconds)
                    break
                except NotConfirmedInTime:
                    raise
                except LOST as exc:
                    self.lose()
                    if lost or is_lasting(exc):
                        raise
                    lost = True
            self._published_at = monotonic()
            if self._settler is None:
                self._start_settler()
            elif self._is_settler_slow:
                self._wake.set()

    def flush(self, *, timeout_seconds: float | None) -> None:
        """Return when the broker has confirmed everything.

        Raises PublishRefused for what it did not take, TimeoutError for what stays kept.
        """
        self.settle(timeout_seconds=timeout_seconds)
        with self.lock:
            self._report_refused("all others are confirmed")

    def settle(self, *, timeout_seconds: float | None) -> None:
        """:meth:`flush` that leaves what was refused to :meth:`take_refused`.

        Without a connection there is one attempt if it :attr:`has_given_up`.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        backoff = Backoff(0.05, _LONGEST_RETRY_SECONDS)
        while lost := self._settle_all(deadline):
            left = None if deadline is None else deadline - monotonic()
            slow = isinstance(lost, NotConfirmedInTime)
            gives_up = is_lasting(lost) or (self.has_given_up and not slow)
            if gives_up or (left is not None and left <= 0):
                raise TimeoutError(
                    f"{self.unconfirmed_count} delayed message(s) not confirmed"
                    f"{'' if gives_up else f' within {duration(timeout_seconds or 0.0)}'}"
                    f"{'' if slow else f', {type(lost).__name__}: {lost}'}; "
                    f"they are kept and will be sent again"
                ) from lost
            retry_seconds = backoff.failed()
            self._wake.wait(min(retry_seconds, left or retry_seconds))

    def take_refused(self) -> list[RefusedMessage]:
        """Messages that the broker did not take since the last time; they have been logged."""
        with self.lock:
            if self._sender is not None:
                self._refused += self._sender.take_refused()
            refused, self._refused = self._refused, []
            return refused

    def give_up(self) -> list[RefusedMessage]:
        """Send nothing again; the messages in doubt, each of which may have arrived."""
        with self.lock:
            self.lose()
            in_doubt = [message.refused(IN_DOUBT) for message in self._unsent]
            self._unsent.clear()
            return in_doubt

    def close(self) -> None:
        """Give up the connection; what is in doubt is forgotten."""
        with self.lock:
            self.give_up()
            self._published_at = -IDLE_SECONDS  # nothing is to come: the thread ends
            self._wake.set()

    @property
    def is_connected(self) -> bool:
        """True if the connection is not known to be lost."""
        return self._sender is not None and self._sender.is_usable

    @property
    def connection(self) -> Any:
        """The AMQP connection, made anew if it is lost."""
        with self.lock:
            self._ready_sender()
            return self._client.connection

    @property
    def unconfirmed_count(self) -> int:
        """Number of messages in doubt."""
        sender = self._sender
        return len(self._unsent) + (0 if sender is None else sender.in_doubt_count)

    def abandon(self) -> None:
        """Leave the socket alone, which in a forked child is the parent's."""
        leave_to_parent(self._client)

    # --- under the lock ------------------------------------------------------------------

    def _ready_sender(self) -> Sender:
        """A sender that has sent everything kept."""
        if self._sender is None or not self._sender.is_usable:
            self.lose()
            self._client.connect()
            self._sender = Sender(self._client.connection, self._window)
            self.connects += 1
            self.has_given_up = False
        while self._unsent:
            self._sender.send(self._unsent[0])
            self._unsent.popleft()
        return self._sender

    def _settle_all(self, deadline: float | None) -> Exception | None:
        """The reason for which something is still in doubt; None if nothing is."""
        with self.lock:
            try:
                if self.unconfirmed_count:
                    self._ready_sender().settle(deadline=deadline)
            except NotConfirmedInTime as exc:
                return exc
            except LOST as exc:
                self.lose()
                logger.debug("native delay: %s: %s", type(exc).__name__, exc)
                return exc
            return None

    def _report_refused(self, others: str) -> None:
        if refused := tuple(self.take_refused()):
            raise PublishRefused(
                f"the broker did not take {len(refused)} delayed message(s) published earlier, "
                f"the first being {refused[0]}; {others}",
                refused,
            )

    def lose(self) -> None:
        """Close the connection; keep what is unconfirmed for the next one."""
        sender, self._sender = self._sender, None
        if sender is not None:
            self._unsent.extendleft(reversed(sender.take_in_doubt()))
            self._refused += sender.take_refused()
        hang_up(self._client)

    # --- the thread ----------------------------------------------------------------------

    def _start_settler(self) -> None:
        if self._settler is None:
            self._settler = Thread(target=self._settle, name="native-delay-outbox", daemon=True)
            try:
                self._settler.start()
            except RuntimeError:  # the interpreter is ending; flushing at exit comes next
                self._settler = None

    def _settle(self) -> None:
        pause = LINGER_SECONDS
        while True:
            if self._wake.wait(pause):
                self._wake.clear()
            pause = LINGER_SECONDS
            sender = self._sender
            lingers = sender is not None and sender.unwritten_seconds >= LINGER_SECONDS
            if not lingers and monotonic() - self._published_at < SETTLE_SECONDS:
                continue  # without the lock, which a fast loop needs all the time
            with self.lock:
                idle_seconds = monotonic() - self._published_at
                self._is_settler_slow = idle_seconds >= SETTLE_SECONDS
                if self._is_settler_slow:
                    pause = SETTLE_SECONDS
                if not self.unconfirmed_count:
                    if idle_seconds > IDLE_SECONDS:
                        self.lose()
                        self._settler = None
                        return
                    continue
                try:
                    self._ready_sender().look()
                except Exception as exc:  # the thread must outlive whatever the broker says
                    expected = isinstance(exc, (*LOST, NativeDelayError))
                    logger.warning(
                        "native delay: %d message(s) unconfirmed, trying on: %s: %s",
                        self.unconfirmed_count,
                        type(exc).__name__,
                        exc,
                        exc_info=not expected,
                    )
                    self.lose()
                    self._is_settler_slow = True
                    pause = _LONGEST_RETRY_SECONDS


# ---- the outboxes of this process ------------------------------------------------------------

_outboxes: PerProcess[Any, Outbox] = PerProcess(Outbox.abandon)


def outbox_key(client: Any, settings: DelaySettings) -> Any:
    """Equal for kombu connections that lead to the same broker, wherever failover has brought them.

    The pool's own key would change with the retry policy, which kombu writes into the transport
    options.
    """
    broker = tuple(sorted(client.alt)) or (
        client.transport_cls,
        client.hostname,
        client.port,
        client.userid,
        str(client.password),
        client.virtual_host,
    )
    return broker, settings


def outbox_of(key: Any, client: Any, settings: DelaySettings) -> Outbox:
    """The process's outbox for *key*, made with *client* if there is none."""
    return _outboxes.get(key, lambda: Outbox(client, settings.confirm_window))


def flush_all(timeout_seconds: float | None) -> None:
    """:meth:`Outbox.flush` for every outbox; the first error is raised when all have been tried."""
    deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
    first: Exception | None = None
    for outbox in _outboxes.values():
        try:
            outbox.flush(
                timeout_seconds=None if deadline is None else max(deadline - monotonic(), 0)
            )
        except (PublishRefused, TimeoutError) as exc:
            first = first or exc
    if first is not None:
        raise first


def _flush_at_exit() -> None:
    try:
        flush_all(EXIT_SECONDS)
    except Exception as exc:
        logger.critical("native delay: this process ends with delayed messages lost: %s", exc)


flushes.append(flush_all)
atexit.register(_flush_at_exit)
