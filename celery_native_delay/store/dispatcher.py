"""Publishes tasks of a store when they are due.

Every worker runs a dispatcher, and so does ``delay promote``. One of them leads: it takes each row
when it is due. The others take only rows that are late, so that they help an overloaded leader, and
replace one that was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from secrets import token_hex
from threading import Event, Lock
from time import monotonic
from typing import Any, Protocol

from kombu.exceptions import KombuError

from ..backoff import Backoff
from ..errors import NativeDelayError, StoreUnavailable, errors_ignored
from .entry import StoreEntry
from .interface import Refusal, Store, Taken, TakenRow

logger = logging.getLogger(__name__)

#: Rows, each with None if it was published, or with the reason why the broker refused it.
_Outcomes = list[tuple[TakenRow, str | None]]

#: Seconds between two renewals of the lead, and two looks at leases and pauses that have ended.
_LEAD_SECONDS = 1.5
_RELEASE_SECONDS = 1.0

#: A dispatcher that does not lead looks so often, in seconds, and takes rows so late, in µs.
_SECOND_LOOK_SECONDS = 1.0
_SECOND_LATE_US = 1_000_000

#: Seconds between attempts after a failure: the first pause, and the longest.
RETRY_SECONDS = (0.1, 5.0)
_RELAY_PAUSES_SECONDS = (1.0, 60.0)


class Publisher(Protocol):
    """Publishes due messages to the broker, each where its producer sent it."""

    def publish(self, entries: Sequence[StoreEntry]) -> Mapping[int, str | None]:
        """Publish messages, and wait for the broker's confirms.

        Returns, by the index in *entries*, None for a confirmed message, or the reason of the
        broker's refusal. If the connection is lost on the way, messages in doubt are missing. If
        nothing is known of any message, raises kombu's OperationalError.
        """

    def close(self) -> None: ...


class Dispatcher:
    """A loop that publishes the due tasks of a store."""

    def __init__(self, store: Store, connect: Callable[[], Publisher]) -> None:
        """*connect* opens a connection to the broker."""
        self.promoted = 0
        self.parked = 0
        self._store = store
        self._connect = connect
        self._publisher: Publisher | None = None
        self._id = token_hex(8)
        self._leads = False
        self._lead_at = self._release_at = 0.0
        self._stopping = Event()
        #: An item ends the present pause, or else the next one. Signal handlers may put it.
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._sleeps_until_us = 0
        #: The last batch with its outcomes, until the store has noted them.
        self._unsettled: tuple[Taken, _Outcomes] | None = None
        self._backoff = Backoff(*RETRY_SECONDS)
        self._is_failing = False

    def run(self) -> None:
        """Publish due tasks until :meth:`stop` is called; go on after every error."""
        self._store.on_add = self._note_added
        try:
            while not self._stopping.is_set():
                self._step()
        finally:
            self._store.on_add = lambda due_us: None
            self._disconnect()
            with suppress(NativeDelayError):
                self._settle()
                self._store.resign(self._id)
            self._store.leave_thread()

    def stop(self) -> None:
        """Make :meth:`run` return soon. Any thread or signal handler may call this."""
        self._stopping.set()
        self._alarm.put(None)

    def publish_due(self) -> int:
        """Publish everything that is due now, without a loop; return the number."""
        before = self.promoted
        self._settle()
        while self._deliver(0).rows:
            pass
        return self.promoted - before

    def next_due_us(self) -> int | None:
        """Return the due time of the first waiting task, in microseconds; None if none waits.

        Only for the test clock, whose store is a database.
        """
        store: Any = self._store
        found: int | None = store.next_due_us()
        return found

    # --- one round -------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            self._settle()  # before the rows' lease ends, and they are published again
            self._keep_up()
            if self._leads:  # the first due task shall not wait for a connection
                self._connected()
            # From here on, every row that this process adds wakes the dispatcher.
            self._sleeps_until_us = 1 << 62
            taken = self._deliver(0 if self._leads else _SECOND_LATE_US)
        except Exception as error:  # the loop must survive any error of a driver
            self._disconnect()
            self._wait_after(error)
            return
        if self._is_failing:
            self._is_failing = False
            logger.warning("native delay: the tasks in %s are published again", self._store.where)
        self._backoff.reset()
        if not taken.rows:
            self._sleep(taken)

    def _keep_up(self) -> None:
        now = monotonic()
        if now >= self._lead_at:
            self._leads = self._store.leads(self._id)
            self._lead_at = now + _LEAD_SECONDS
        if now >= self._release_at:
            self._release_at = now + _RELEASE_SECONDS
            if released := self._store.release():
                logger.debug("native delay: %d task(s) are tried again", released)

    def _deliver(self, late_us: int) -> Taken:
        """Take a batch, publish it, and settle it in the store."""
        taken = self._store.take(late_us=late_us)
        if taken.rows:
            self._hand_over(taken)
        return taken

    def _hand_over(self, taken: Taken) -> None:
        outcomes: _Outcomes = []
        self._unsettled = taken, outcomes
        try:
            self._publish(taken.rows, outcomes)
        except BaseException:
            with suppress(StoreUnavailable):  # the next round tries it again
                self._settle()
            raise
        self._settle()

    def _publish(self, rows: Sequence[TakenRow], outcomes: _Outcomes) -> None:
        """Publish rows, and note each outcome."""
        readable: list[tuple[TakenRow, StoreEntry]] = []
        for row in rows:
            try:
                readable.append((row, StoreEntry.decoded(row.entry)))
            except ValueError as exc:
                outcomes.append((row, f"the row cannot be read: {exc}"))
        # A row that was refused before is sent alone, as it may close the channel again.
        batches = [[each for each in readable if not each[0].refusals]]
        batches += [[each] for each in readable if each[0].refusals]
        publisher = self._connected()
        for batch in filter(None, batches):
            told = publisher.publish([entry for _, entry in batch])
            outcomes += [(batch[at][0], reason) for at, reason in told.items()]

    def _settle(self) -> None:
        if self._unsettled is None:
            return
        taken, outcomes = self._unsettled
        published = [row for row, reason in outcomes if reason is None]
        refused = [Refusal.of(row, reason) for row, reason in outcomes if reason is not None]
        self._store.settle(taken, published, refused)
        self._unsettled = None
        self.promoted += len(published)
        if refused:
            self._tell_of(refused)

    def _tell_of(self, refused: Sequence[Refusal]) -> None:
        parked = sum(each.parks for each in refused)
        self.parked += parked
        if parked:
            logger.error(
                "native delay: parked %d task(s) that the broker has refused 8 times: %s; see "
                "`celery -A PROJ delay parked list`",
                parked,
                refused[-1].reason,
            )
        if later := len(refused) - parked:
            logger.warning(
                "native delay: the broker refused %d due task(s), which are tried again: %s",
                later,
                refused[-1].reason,
            )

    # --- pauses ----------------------------------------------------------------------------

    def _note_added(self, due_us: int) -> None:
        if self._leads and due_us < self._sleeps_until_us:
            self._alarm.put(None)

    def _sleep(self, taken: Taken) -> None:
        seconds = self._store.look_seconds if self._leads else _SECOND_LOOK_SECONDS
        until_us = taken.now_us + round(seconds * 1_000_000)
        # A due row that was not taken is locked by another transaction.
        if self._leads and taken.next_us is not None and taken.next_us > taken.now_us:
            until_us = min(until_us, taken.next_us)
        self._sleeps_until_us = until_us
        self._pause((until_us - taken.now_us) / 1_000_000)

    def _pause(self, seconds: float) -> None:
        if self._stopping.is_set():
            return
        with suppress(Empty):
            self._alarm.get(timeout=max(seconds, 0))
            while True:
                self._alarm.get_nowait()

    def _wait_after(self, error: Exception) -> None:
        if self._stopping.is_set():
            return
        is_expected = isinstance(error, NativeDelayError | KombuError | OSError)
        logger.warning(
            "native delay: due tasks wait in %s, next attempt in %.1f s: %s: %s",
            self._store.where,
            self._backoff.seconds,
            type(error).__name__,
            error,
            exc_info=None if is_expected else error,
        )
        self._is_failing = True
        self._sleeps_until_us = 0
        self._lead_at = 0.0
        self._pause(self._backoff.failed())

    def _connected(self) -> Publisher:
        if self._publisher is None:
            self._publisher = self._connect()
        return self._publisher

    def _disconnect(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            with errors_ignored():  # the connection is given up anyway
                publisher.close()


class TransactionRelay(Dispatcher):
    """Publishes the immediate tasks of transactions that this process has committed."""

    def __init__(self, store: Store, connect: Callable[[], Publisher]) -> None:
        super().__init__(store, connect)
        self._one_by_one = Lock()
        self._pauses = Backoff(*_RELAY_PAUSES_SECONDS)
        self._not_before = 0.0
        #: True after a failure, until workers have published the tasks that were given back.
        self._is_behind = False

    def __call__(self, token: str) -> None:
        """Publish the rows that were taken with *token*.

        For a while after a failure, workers publish them, so that no caller waits for the broker,
        and until they have published the earlier ones, so that none overtakes.
        """
        with self._one_by_one:
            try:
                self._settle()
                while (taken := self._store.retake(token)).rows:
                    if monotonic() < self._not_before or self._would_overtake():
                        self._store.settle(taken, (), ())
                        return
                    self._hand_over(taken)
            except BaseException:
                self._not_before = monotonic() + self._pauses.failed()
                self._is_behind = True
                self._disconnect()
                raise
            self._pauses.reset()

    def _would_overtake(self) -> bool:
        """Return True while a worker has to publish earlier tasks."""
        if self._is_behind:
            census = self._store.census()
            self._is_behind = census.overdue > 0 and census.promoting
        return self._is_behind
