"""Move due messages from the database to the broker's queues.

Every worker and ``delay promote`` runs this loop; there is no leader. The loop reads the next due
time every 0.05 s (SQLite) or 0.25 s (database server). A message that the same process stores wakes
the loop at once. Another process's message can be late if its delay is shorter than this interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic
from typing import Any

from ...backoff import Backoff
from ...errors import NativeDelayError, RecordsUnavailable, StoreUnavailable
from ...now import time_ns
from ..aliases import OPTION
from ..virtual.watching import Sign
from .handover import HandOver, hand_over_on
from .rows import DispatchBatch
from .store import Store

logger = logging.getLogger(__name__)

#: Seconds between two looks for due messages: at a SQLite file, and at a database server.
FILE_LOOK_SECONDS = 0.05
SERVER_LOOK_SECONDS = 0.25

#: Seconds between attempts to reach the database: the first pause, and the longest.
RETRY_SECONDS = (0.1, 5.0)

#: Seconds until the next look, if other dispatchers have locked the due messages.
_TAKEN_PAUSE_SECONDS = 0.02

#: After a batch the SQLite file is left to other processes, for this part of the time that the
#: batch took. SQLite's waiting processes look every 0.1 s, and give up after 5 s.
_LEFT_TO_OTHERS = 0.25

_FETCHING, _DISPATCHING = "fetching what is due", "dispatching what is due"


class Dispatcher:
    """A loop that moves due messages from the database to the broker."""

    def __init__(self, store: Store, connect: Callable[..., Any]) -> None:
        """*connect* is a function that opens a kombu connection."""
        self.promoted = 0
        self.parked = 0
        self._store = store
        self._connect = connect
        self._connection: Any = None
        self._hand_over: HandOver | None = None
        self._stopping = Event()
        #: An item in this queue ends the present pause, or else the next pause. Signal handlers may
        #: use this queue.
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._sign = Sign(store.show_dispatching, RecordsUnavailable)
        self._sleeps_until_us = 0
        self._backoff = Backoff(*RETRY_SECONDS)
        #: The activity that failed last, for the log; "" if the last one succeeded.
        self._failing = ""

    def run(self) -> None:
        """Move due messages until :meth:`stop` is called; retry after errors."""
        self._store.on_add = self._note_added
        try:
            while not self._stopping.is_set():
                self._step()
        finally:
            self._store.on_add = lambda due_us: None
            self._disconnect()

    def stop(self) -> None:
        self._stopping.set()
        self._alarm.put(None)

    def _note_added(self, due_us: int) -> None:
        if due_us < self._sleeps_until_us:
            self._alarm.put(None)

    def _pause(self, seconds: float) -> None:
        """Sleep for *seconds*; a new message with an earlier due time ends the sleep."""
        with suppress(Empty):
            self._alarm.get(timeout=max(seconds, 0))
            while True:
                self._alarm.get_nowait()

    def _step(self) -> None:
        try:
            self._store.prepare()
            self._sign.keep_up()
            # From here on, every message that this process stores wakes the dispatcher.
            self._sleeps_until_us = 1 << 62
            next_us = self.next_due_us()
        except Exception as error:  # the loop must survive any error of a driver
            self._wait_for(_FETCHING, error)
            return
        self._works(_FETCHING)
        now_us = time_ns() // 1000
        if next_us is None or next_us > now_us:
            self._works(_DISPATCHING)  # another dispatcher may have done it
            self._sleep(next_us, now_us)
            return
        try:
            away = self._hand_over_batch()
        except StoreUnavailable as error:
            # The store can be read but not written, so the broker connection is kept.
            self._wait_for(_DISPATCHING, error)
            return
        except Exception as error:
            away = error
        if away is None:
            self._works(_DISPATCHING)
        else:
            self._disconnect()
            self._wait_for(_DISPATCHING, away)

    def _sleep(self, next_us: int | None, now_us: int) -> None:
        look_seconds = FILE_LOOK_SECONDS if self._store.is_file else SERVER_LOOK_SECONDS
        until_us = now_us + round(look_seconds * 1_000_000)
        if next_us is not None:
            until_us = min(until_us, next_us)
        self._sleeps_until_us = until_us
        if not self._stopping.is_set():
            self._pause((until_us - time_ns() // 1000) / 1_000_000)

    def _hand_over_batch(self) -> Exception | None:
        """Deliver one batch; return the error if the broker is unreachable.

        With SQLite, the method then pauses, so that other processes can lock the file.
        """
        began = monotonic()
        found, away = self.deliver_batch()
        if self._store.is_file:
            self._stopping.wait((monotonic() - began) * _LEFT_TO_OTHERS)
        if not found and away is None:
            # Other dispatchers have locked the due messages, and may release them.
            self._pause(_TAKEN_PAUSE_SECONDS)
        return away

    def next_due_us(self) -> int | None:
        return self._store.next_due_us()

    def deliver_batch(self) -> tuple[int, Exception | None]:
        """Deliver a batch; return its size, and the error if the broker is unreachable."""
        if self._hand_over is None:
            self._hand_over = self._connected()
        with self._store.taking(until_us=time_ns() // 1000) as batch:
            away = self._hand_over(batch, park=False)
        self.promoted += len(batch.delivered)
        if batch.refused:
            self._tell_of(batch)
        return len(batch.messages), away

    def _tell_of(self, batch: DispatchBatch) -> None:
        parked = sum(each["due"] is None for each in batch.refused)
        self.parked += parked
        reason = batch.refused[-1]["why"]
        if parked:
            logger.error(
                "native delay: parked %d message(s) that their queue has refused 8 times: %s; see "
                "`celery -A PROJ delay parked list`",
                parked,
                reason,
            )
        if later := len(batch.refused) - parked:
            logger.warning(
                "native delay: %d message(s) were refused by their queue and are tried again: %s",
                later,
                reason,
            )

    def _connected(self) -> HandOver:
        # This is kombu's own channel, because our channel would delay the messages once more.
        self._connection = self._connect(transport_options={OPTION: False})
        # One attempt is made for each URL, because the pauses between attempts are made here.
        tries = len(self._connection.alt) or 1
        self._connection.ensure_connection(max_retries=tries, interval_start=0, interval_step=0)
        return hand_over_on(self._connection.default_channel, self._store)

    def _disconnect(self) -> None:
        connection, self._connection, self._hand_over = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # the connection is given up anyway
                connection.close()

    def _works(self, what: str) -> None:
        if self._failing == what:
            self._failing = ""
            self._backoff.reset()
            logger.warning("native delay: %s works again", what)

    def _wait_for(self, what: str, error: Exception) -> None:
        if self._stopping.is_set():
            return
        expected = isinstance(error, NativeDelayError | OSError) or self._connection is None
        logger.warning(
            "native delay: %s failed, next attempt in %.1f s: %s: %s",
            what,
            self._backoff.seconds,
            type(error).__name__,
            error,
            exc_info=None if expected else error,
        )
        self._failing = what
        self._sleeps_until_us = 0
        self._pause(self._backoff.failed())
