"""Messages of a batch on their way to RabbitMQ, kept until it has confirmed them.

An outbox has a connection of its own, so that reading confirms meets no other conversation, and a
lock. What is unconfirmed when that connection dies goes out again on the next, under the same
delivery id. A thread looks after messages that no further one follows.
"""

from __future__ import annotations

import logging
from collections import deque
from threading import Event, RLock, Thread
from time import monotonic
from typing import Any

from amqp.exceptions import AccessRefused, NotAllowed

from ...backoff import Backoff
from ...durations import duration
from ...errors import NativeDelayError, RefusedMessage
from ..lasting import is_lasting_tls
from .channels import NotConfirmedInTime, Sendable
from .own_connection import LOST, connection_like, hang_up
from .sending import Sender

logger = logging.getLogger(__name__)

#: Seconds that a message is held back at most, so that others are written with it.
LINGER_SECONDS = 0.005

#: Seconds between two looks at what no further publish comes for.
SETTLE_SECONDS = 0.5

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
    """A keeper of one batch's messages until the broker has confirmed them."""

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
        self._is_closed = False
        #: How often it has connected.
        self.connects = 0
        #: Set when the broker has been away for too long, or does not let us in.
        self.has_given_up = False

    def send(self, message: Sendable) -> None:
        """Send without waiting, unless the window is full; it was not sent if this raises.

        Raises:
            OSError, amqp.exceptions.AMQPError: there is no connection; earlier ones stay kept.
        """
        with self.lock:
            lost = False
            while True:
                try:
                    sender = self._sender
                    if sender is None or self._unsent:
                        sender = self._ready_sender()
                    sender.send(message)
                    break
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

    def settle(self, *, timeout_seconds: float | None) -> None:
        """Return when the broker has answered for everything; TimeoutError for what stays kept.

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
            self._is_closed = True
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
            except RuntimeError:  # the interpreter is ending
                self._settler = None

    def _settle(self) -> None:
        pause = LINGER_SECONDS
        while True:
            if self._wake.wait(pause):
                self._wake.clear()
            if self._is_closed:
                return
            pause = LINGER_SECONDS
            sender = self._sender
            lingers = sender is not None and sender.unwritten_seconds >= LINGER_SECONDS
            if not lingers and monotonic() - self._published_at < SETTLE_SECONDS:
                continue  # without the lock, which a fast loop needs all the time
            with self.lock:
                self._is_settler_slow = monotonic() - self._published_at >= SETTLE_SECONDS
                if self._is_settler_slow:
                    pause = SETTLE_SECONDS
                if not self.unconfirmed_count:
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
