"""What the server has yet to answer for: a hundred messages in a script, sent again as a whole.

Each script carries a number that the server keeps with what it stores. One that is sent again,
because its answer was lost with the connection, changes nothing: neither for a message that still
waits, nor for one that has been handed over since, nor for an immediate one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha1
from threading import Event, RLock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

from kombu.exceptions import OperationalError
from redis import exceptions

from ...core.errors import NativeDelayError
from ...core.refusal import RefusedMessage
from .collecting import BulkChannel, SentinelBulkChannel
from .envelope import Destination
from .keys import Keys
from .promoter import CONNECTION_OPTIONS
from .scripts import ADD_MANY, PUSH
from .store import BATCH, refusals_explained
from .template import refused_of
from .transport import SentinelTransport

T = TypeVar("T")

#: What says that a connection or its server is gone, or that it is no master any more.
LOST = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    OperationalError,
    OSError,
)

#: Seconds to try on while there is no connection.
PATIENCE_SECONDS = 60.0

#: A batch that is not full is sent after this, also if nothing follows it for an hour.
LINGER_SECONDS = 0.01

IN_DOUBT = "the server has not answered for it"
NOWHERE = "no queue is bound for it"

_PAUSE_SECONDS = 0.2

#: Bytes that one script takes at most, so that it keeps Redis from others for a moment only.
_BATCH_BYTES = 1_000_000

_DIGESTS = {
    script: sha1(script.encode(), usedforsecurity=False).hexdigest() for script in (ADD_MANY, PUSH)
}


@dataclass(frozen=True)
class Parcel:
    """One script with its messages: sent, answered for, and sent again as a whole."""

    script: str
    keys: tuple[str, ...]
    arguments: list[Any]
    entries: list[bytes]

    def packed(self, connection: Any, *, whole: bool = False) -> Any:
        """The command's bytes; *whole* with the script itself, for a server that forgot it."""
        name = ("EVAL", self.script) if whole else ("EVALSHA", _DIGESTS[self.script])
        return connection.pack_command(*name, len(self.keys), *self.keys, *self.arguments)


class Outbox:
    """See the module's docstring. For one thread; what it holds back, a second one sends in time.

    *parcels* are all that the server has yet to answer for, and the first so many of them have
    been *written* to the connection of now.
    """

    def __init__(self, client: Any, window: int) -> None:
        """*client* is a kombu connection to the same server, which is not touched."""
        options = {**(client.transport_options or {}), **CONNECTION_OPTIONS}
        self._clone = partial(client.clone, transport_options=options)
        self._window = window
        self._batch = min(BATCH, window)
        self._name = uuid4().hex
        #: Held by whoever does anything here.
        self.lock = RLock()
        #: On kombu's connection; None until there was one.
        self.channel: Any = None
        self.connects = 0
        self._client: Any = None
        #: redis-py's; None while there is none.
        self._connection: Any = None
        #: What the next script is to take: member, due time and entry of each message.
        self._held: list[Any] = []
        self._held_bytes = 0
        self._held_since = 0.0
        self._parcels: deque[Parcel] = deque()
        self._written = 0
        self._parcelled = 0
        self._unanswered = 0
        self._refused: list[RefusedMessage] = []
        self._already_named: set[tuple[str | None, str | None]] = set()
        self._wanted = Event()
        self._closed = Event()
        self._thread = Thread(target=self._send_in_time, name="native-delay-bulk", daemon=True)

    def hold(self, name: str, due_us: int, entry: bytes) -> None:
        """Send a message that waits, soon, together with others; after :meth:`make_room`."""
        if not self._held:
            self._held_since = monotonic()
            self._want()
        self._held += (name, due_us, entry)
        self._held_bytes += len(entry)

    def push(self, to: Destination, envelope: bytes) -> None:
        """Send a message that does not wait; after :meth:`make_room`."""
        self._parcel(PUSH, to.keys, [to.ttl_ms, envelope], [envelope])

    def refuse_returned(self, envelopes: list[bytes]) -> None:
        """Report messages that no queue is bound for."""
        self._refused += [replace(each, returned=True) for each in self._named(NOWHERE, envelopes)]

    def make_room(self) -> None:
        """Send what is held if that is enough, and wait for answers while the window is full.

        Before a message is taken, so that one that cannot be sent is not held either.

        Raises:
            One of :data:`LOST`: there has been no connection for :data:`PATIENCE_SECONDS`.
        """
        if len(self._held) >= 3 * self._batch or self._held_bytes >= _BATCH_BYTES:
            self._close_batch()
        if self._written < len(self._parcels):
            self.patiently(lambda _: self._write())
        if self._unanswered > self._window - self._batch:
            self.patiently(lambda _: self._read_down())

    def patiently(self, attempt: Callable[[Any], T]) -> T:
        """What *attempt* returns, given a channel; again on a new one if the connection is lost.

        Raises:
            Whatever *attempt* does; one of :data:`LOST` after :data:`PATIENCE_SECONDS`.
        """
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._connect()
                return attempt(self.channel)
            except LOST:
                if monotonic() > deadline:
                    raise
                self._lose()
                sleep(_PAUSE_SECONDS)

    def settle(self, *, timeout_seconds: float | None) -> None:
        """Return when the server has answered for everything.

        Raises:
            TimeoutError: it has not after *timeout_seconds*.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        with self.lock:
            self._close_batch()
            while self._parcels:
                if deadline is not None and monotonic() > deadline:
                    raise TimeoutError(f"{self._unanswered} message(s) not answered for in time")
                try:
                    self._write()
                    self._read_ready(timeout_seconds=_PAUSE_SECONDS)
                except LOST:
                    self._lose()
                    sleep(_PAUSE_SECONDS)

    def take_refused(self) -> list[RefusedMessage]:
        """What the server did not take since the last time."""
        with self.lock:
            refused, self._refused = self._refused, []
            return refused

    @property
    def unanswered_count(self) -> int:
        """How many messages the server has yet to answer for."""
        return self._unanswered + len(self._held) // 3

    def give_up(self) -> list[RefusedMessage]:
        """The messages that the server has yet to answer for; they are given up."""
        with self.lock:
            self._close_batch()
            entries = [entry for parcel in self._parcels for entry in parcel.entries]
            self._parcels.clear()
            self._written = self._unanswered = 0
            return self._named(IN_DOUBT, entries)

    def close(self) -> None:
        """Close the connection; what is in doubt is given up."""
        with self.lock:
            self._closed.set()
            self._wanted.set()
            if self._connection is not None:
                with suppress(*LOST, exceptions.ResponseError):
                    self.channel.delays.store.client.delete(self._keys.taken(self._name))
            self._parcels.clear()
            self._lose()
        if self._thread.ident is not None:
            self._thread.join()

    # --- out -----------------------------------------------------------------------------

    @property
    def _keys(self) -> Keys:
        keys: Keys = self.channel.delays.keys
        return keys

    def _close_batch(self) -> None:
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            keys = self._keys
            names = (keys.due, keys.messages, keys.wake, keys.ids)
            self._parcel(ADD_MANY, names, held, held[2::3])

    def _parcel(
        self, script: str, keys: tuple[str, ...], arguments: list[Any], entries: list[bytes]
    ) -> None:
        self._parcelled += 1
        taken = self._keys.taken(self._name)
        parcel = Parcel(script, (taken, *keys), [self._parcelled, *arguments], entries)
        self._parcels.append(parcel)
        self._unanswered += len(entries)
        self._want()

    def _write(self) -> None:
        self._connect()
        while self._written < len(self._parcels):
            parcel = self._parcels[self._written]
            self._connection.send_packed_command(
                parcel.packed(self._connection), check_health=False
            )
            self._written += 1

    # --- in ------------------------------------------------------------------------------

    def _read_down(self) -> None:
        """Read answers until another batch fits into the window."""
        self._write()
        while self._unanswered > self._window - self._batch:
            self._read_one()

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        while self._written and self._connection.can_read(timeout=timeout_seconds):
            self._read_one()

    def _read_one(self) -> None:
        reason = None
        try:
            with refusals_explained(self._keys):
                self._connection.read_response()
        except LOST:
            raise
        except exceptions.NoScriptError:
            # This answer comes after those that are on their way.
            parcel = self._parcels.popleft()
            self._written -= 1
            self._parcels.insert(self._written, parcel)
            command = parcel.packed(self._connection, whole=True)
            self._connection.send_packed_command(command, check_health=False)
            self._written += 1
            return
        except (NativeDelayError, exceptions.ResponseError) as exc:
            reason = str(exc)
        parcel = self._parcels.popleft()
        self._written -= 1
        self._unanswered -= len(parcel.entries)
        if reason is not None:
            self._refused += self._named(reason, parcel.entries)

    def _named(self, reason: str, entries: list[bytes]) -> list[RefusedMessage]:
        """Each message once, to however many queues it was going."""
        messages = {
            (message.delivery_id, message.task_id): message
            for message in (refused_of(reason, entry) for entry in entries)
        }
        new = messages.keys() - self._already_named
        self._already_named |= new
        return [message for key, message in messages.items() if key in new]

    # --- the connection ------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None:
            return
        self._lose()
        client = self._client = self._clone()
        # Once for each URL; the pauses between attempts are ours.
        tries = len(client.alt) or 1
        client.ensure_connection(max_retries=tries, interval_start=0, interval_step=0)
        is_sentinel = isinstance(client.transport, SentinelTransport)
        channel = (SentinelBulkChannel if is_sentinel else BulkChannel)(client.connection)
        client.connection.channels.append(channel)
        channel.delays.prepare()
        connection = channel.pool.make_connection()
        connection.connect()
        self.channel, self._connection = channel, connection
        self.connects += 1

    def _lose(self) -> None:
        connection, self._connection = self._connection, None
        client, self._client = self._client, None
        self._written = 0
        for each, leave in ((connection, "disconnect"), (client, "close")):
            if each is not None:
                with suppress(Exception):  # it is gone, whatever it says to that
                    getattr(each, leave)()

    # --- the second thread ---------------------------------------------------------------

    def _want(self) -> None:
        if not self._wanted.is_set():
            self._wanted.set()
            if self._thread.ident is None:
                self._thread.start()

    def _send_in_time(self) -> None:
        pause_seconds = LINGER_SECONDS
        while self._wanted.wait() and not self._closed.wait(pause_seconds):
            pause_seconds = LINGER_SECONDS
            with self.lock:
                if self._closed.is_set():
                    break
                try:
                    if self._held and monotonic() - self._held_since >= LINGER_SECONDS:
                        self._close_batch()
                    if self._parcels:
                        self._write()
                        self._read_ready()
                except (*LOST, NativeDelayError):
                    self._lose()
                    pause_seconds = _PAUSE_SECONDS
                if not self._held and not self._parcels:
                    self._wanted.clear()
