"""Leases (locks with an expiry) of unique tasks and ``concurrent`` limits, for one process.

A worker's main process renews the leases of all tasks that the worker has received. The process
that runs a task renews the task's leases, too, in case the main process dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_logger

from ..app.broker import bounded_connection
from ..app.keyed import key_records
from ..errors import StoreUnavailable, described, errors_ignored
from ..keyed import rules
from ..keyed.records import KeyRecords
from ..keyed.rules import RENEWED_EVERY_SECONDS, Rule, Step
from ..per_process import PerProcess
from .in_time import in_time

logger = get_logger(__name__)

#: Seconds until a failed write is tried again.
RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class Held:
    """A task's lock on a unique key or a ``concurrent`` limit, which this process renews.

    - *name*: the name of the key's stored state.
    - *is_here*: returns True while this process has the task's message or runs the task.
    - *token*: a random id, new at each attempt to lock the key.
    - *runs*: True in the process that runs the task.
    """

    name: str
    task_id: str
    is_here: Callable[[], bool]
    token: str
    runs: bool = False


class Leases:
    """The locks of tasks that this process renews for one app. Thread-safe."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connecting = Lock()
        self._connection: Any = None
        self._records: KeyRecords | None = None
        self._changed = Condition()
        self._held: list[Held] = []
        #: Changes of keys that could not be written yet.
        self._unwritten: list[tuple[str, Rule]] = []
        self._thread: Thread | None = None

    # --- one task ------------------------------------------------------------------------

    def begin(
        self, name: str, task_id: str, is_here: Callable[[], bool], rule: Callable[..., Step]
    ) -> tuple[str, Step]:
        """Try to lock the key *name* for a task; return the lock's token and a :class:`.Step`.

        *rule* is a function of ``keyed/rules.py`` that locks the key. If no lock is free, *free_us*
        of the Step is the time of the next attempt. After success, *free_us* is None.
        """
        token = token_hex(8)
        step = self._change(name, partial(rule, task_id=task_id, token=token))
        if step.free_us is None:
            self.hold(Held(name, task_id, is_here, token))
        return token, step

    def begin_in_time(
        self, name: str, task_id: str, is_here: Callable[[], bool], rule: Callable[..., Step]
    ) -> tuple[str, Step]:
        """Call :meth:`begin` as :func:`in_time` does; free a lock that comes too late."""

        def undo(taken: tuple[str, Step]) -> None:
            token, step = taken
            if step.free_us is None and step.stands is None:
                # The task comes again, and a unique one keeps its key until then.
                rule = partial(rules.end, token=token, retry=(task_id, 0))
                self.settle(name, rule, token=token)

        return in_time(lambda: self.begin(name, task_id, is_here, rule), undo=undo)

    def hold(self, held: Held) -> None:
        """Renew a task's lock until the task has left this process."""
        with self._changed:
            self._held.append(held)
            self._work()

    def settle(self, name: str, rule: Rule, *, token: str | None = None) -> None:
        """Change a key's stored state by the function *rule*; stop renewing the lock *token*.

        If *token* is None, no renewal stops. A failed change is tried again every two seconds.
        """
        self._let_go(token)
        try:
            self._change(name, rule)
        except Exception as exc:
            logger.warning(
                "native delay: the key %s is not free until its record can be written: %s",
                name,
                described(exc),
            )
            self._write_later(name, rule)
            if isinstance(exc, SoftTimeLimitExceeded):
                raise

    def settle_in_time(self, name: str, rule: Rule, *, token: str | None = None) -> None:
        """Call :meth:`settle` in the consumer's thread, which must not wait for the store."""
        try:
            in_time(partial(self.settle, name, rule, token=token))
        except StoreUnavailable:
            self._let_go(token)
            self._write_later(name, rule)

    def lost(self, task_id: str, *, retry_us: int | None = None) -> None:
        """Free the locks of a task whose process was killed, or whose message was rejected.

        If *retry_us* (microseconds until the retry) is given, a unique task keeps its key.
        """
        with self._changed:
            gone = [held for held in self._held if held.task_id == task_id]
        retry = None if retry_us is None else (task_id, retry_us)
        for held in gone:
            rule = partial(rules.end, token=held.token, retry=retry)
            self.settle_in_time(held.name, rule, token=held.token)

    def _let_go(self, token: str | None) -> None:
        with self._changed:
            self._held = [held for held in self._held if token is None or held.token != token]

    def _write_later(self, name: str, rule: Rule) -> None:
        with self._changed:
            self._unwritten.append((name, rule))
            self._work()

    # --- the thread ----------------------------------------------------------------------

    def _work(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="native-delay-leases", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        next_round = monotonic() + RENEWED_EVERY_SECONDS
        while True:
            with self._changed:
                if not self._held and not self._unwritten and monotonic() >= next_round:
                    self._thread = None
                    break
                pause_seconds = next_round - monotonic()
                if self._unwritten:
                    pause_seconds = min(pause_seconds, RETRY_SECONDS)
                self._changed.wait(max(pause_seconds, 0))
                unwritten, self._unwritten = self._unwritten, []
            for name, rule in unwritten:
                self.settle(name, rule)
            if monotonic() >= next_round:
                pause_seconds = RENEWED_EVERY_SECONDS if self._renew_all() else RETRY_SECONDS
                next_round = monotonic() + pause_seconds
        self._disconnect()

    def _renew_all(self) -> bool:
        with self._changed:
            self._held = [held for held in self._held if held.is_here()]
            tasks = list(self._held)
        renewed = True
        for held in tasks:
            try:
                step = self._change(held.name, partial(rules.renew, token=held.token))
            except Exception as exc:
                logger.warning(
                    "native delay: cannot renew the lease of task %s for the key %s: %s",
                    held.task_id,
                    held.name,
                    described(exc),
                )
                renewed = False
                continue
            if step.record is None or step.record.run_of(held.token) is None:
                self._lapsed(held)
        return renewed

    def _lapsed(self, held: Held) -> None:
        with self._changed:
            if held not in self._held:
                return  # it has just ended
            self._held.remove(held)
        if held.runs:
            logger.error(
                "native delay: the lease of task %s for the key %s has expired, another task may "
                "run beside it: it could not be renewed for %d s, or its record is lost",
                held.task_id,
                held.name,
                rules.LEASE_US // 1_000_000,
            )

    # --- the store -----------------------------------------------------------------------

    def _change(self, name: str, rule: Rule) -> Step:
        while True:
            # No thread holds the lock while it asks the store, which may hang.
            records, is_new = self._connected()
            try:
                return records.change(name, rule)[1]
            except Exception as exc:
                self._disconnect(records)
                if is_new or isinstance(exc, SoftTimeLimitExceeded):
                    raise

    def _connected(self) -> tuple[KeyRecords, bool]:
        """Return the states of keys, and True if their connection is new."""
        with self._connecting:
            if self._records is not None:
                return self._records, False
            connection = bounded_connection(self._app)
            try:
                connection.ensure_connection(max_retries=1)
                records = key_records(self._app, connection)
            except BaseException:
                with errors_ignored():
                    connection.close()
                raise
            if not records.needs_connection:
                connection.close()
            self._connection, self._records = connection, records
            return records, True

    def _disconnect(self, records: KeyRecords | None = None) -> None:
        """Close the connection; if *records* is given, only if they still use it."""
        with self._connecting:
            if records not in (None, self._records):
                return
            connection, self._connection, self._records = self._connection, None, None
        if connection is not None:
            with errors_ignored():  # it may be broken
                connection.close()


_leases: PerProcess[Any, Leases] = PerProcess()


def leases_of(app: Any) -> Leases:
    return _leases.get(app, lambda: Leases(app))


def forget_leases(app: Any) -> None:
    """Use a new connection for the leases of *app*, because the app's broker has changed."""
    _leases.forget(app)
