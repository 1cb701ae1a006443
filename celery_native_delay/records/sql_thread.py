"""A thread for database queries, so that producers and workers wait at most 0.3 s."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Engine, exc, text

from ..errors import RecordsUnavailable, errors_ignored
from .database import is_about_a_row, reason_of
from .interface import PATIENCE_SECONDS
from .link_failures import LinkFailures

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The largest number of rows that one query inserts, and of rows that wait for their insertion.
_AT_ONCE = 500
_MOST_NOTES = 2000

Row = Mapping[str, Any]
Job = tuple[Callable[[Connection], Any], "Future[Any] | None"]


class SqlThread:
    """A thread that runs database queries on one connection, one after another."""

    def __init__(
        self,
        engine: Engine,
        where: str,
        prepare: Callable[[], None],
        write: Callable[..., None],
    ) -> None:
        """Set the functions *prepare* (creates the tables) and *write* (inserts rows)."""
        self._engine = engine
        self._prepare = prepare
        self._write = write
        self._failures = LinkFailures(f"the records at {where}")
        self._jobs: SimpleQueue[Row | Job | None] = SimpleQueue()
        self._starting = Lock()
        self._thread: Thread | None = None
        self._connection: Connection | None = None
        self._busy_since: float | None = None
        self.missed = 0

    def note(self, row: Row) -> None:
        """Queue a row for insertion.

        If 2000 rows are queued, the caller waits up to 0.3 s. If the database is too slow, the row
        is dropped and counted in *missed*.
        """
        is_full = self._jobs.qsize() >= _MOST_NOTES
        if is_full and (self._is_stuck() or not self.flush()):
            self.missed += 1
        else:
            self._put(row)

    def post(self, work: Callable[[Connection], Any]) -> None:
        self._queue((work, None))

    def ask(
        self, work: Callable[[Connection], T], timeout_seconds: float = PATIENCE_SECONDS
    ) -> T | None:
        """Run a query in the thread, and return its result; None after an error or a timeout."""
        future: Future[T] = Future()
        if not self._queue((work, future)):
            return None
        try:
            return future.result(timeout_seconds)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # the thread has logged it
            self.missed += 1
            return None

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the thread has run all queued queries. Returns False after a timeout."""
        if self._thread is None:
            return True
        wait_seconds = min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS)
        return self.ask(lambda connection: True, wait_seconds) is not None

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(PATIENCE_SECONDS)

    def _is_stuck(self) -> bool:
        """Return True if the current query has been running for over 0.3 s."""
        since = self._busy_since
        return since is not None and monotonic() - since > PATIENCE_SECONDS

    def _queue(self, job: Job) -> bool:
        """Queue a query for the thread. Returns False if the database does not answer."""
        if self._is_stuck():
            self.missed += 1
            return False
        self._put(job)
        return True

    def _put(self, job: Row | Job) -> None:
        self._jobs.put(job)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = Thread(target=self._run, name="native-delay-records", daemon=True)
                    thread.start()
                    self._thread = thread

    # --- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            with suppress(Empty):
                while len(jobs) < _AT_ONCE:
                    jobs.append(self._jobs.get_nowait())
            for are_notes, group in groupby(jobs, lambda job: isinstance(job, Mapping)):
                together: list[Any] = list(group)
                if are_notes:
                    self._write_rows(together)
                    continue
                for job in together:
                    if job is None:
                        self._disconnect()
                        return
                    self._run_job(*job)

    def _write_rows(self, rows: list[Row]) -> None:
        """Insert rows together; if the database refuses one of them, insert each one alone."""
        refusal = self._run_job(partial(self._write, rows=rows), None, len(rows))
        if refusal is None:
            return
        if len(rows) > 1:
            self.missed -= len(rows)
            for row in rows:
                self._write_rows([row])
            return
        logger.warning(
            "native delay: task %r runs as before, but cannot be listed, cancelled or moved: %s",
            rows[0].get("task_id"),
            reason_of(refusal),
        )

    def _run_job(
        self,
        work: Callable[[Connection], Any],
        future: Future[Any] | None,
        count: int = 1,
    ) -> Exception | None:
        """Run a query; return the error if the database refuses the values of a row."""
        refusal = None
        self._busy_since = monotonic()
        try:
            answer = self._try_twice(work)
            self._failures.succeeded()
            if future is not None:
                future.set_result(answer)
        except Exception as error:  # the thread must survive any error of a database
            if is_about_a_row(error):
                refusal = error
            else:
                self._disconnect()
                if not isinstance(error, RecordsUnavailable):
                    error = self._failures.failed(error)
            if future is not None:
                future.set_exception(error)
            else:
                self.missed += count
        finally:
            self._busy_since = None
        return refusal

    def _try_twice(self, work: Callable[[Connection], T]) -> T:
        for last_try in (False, True):
            try:
                connection = self._connected()
                with connection.begin():
                    return work(connection)
            except exc.SQLAlchemyError as error:
                if is_about_a_row(error):
                    raise
                # The server may have closed the connection, or the tables may have been dropped.
                self._disconnect()
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def _connected(self) -> Connection:
        if self._connection is None:
            self._failures.check()
            self._prepare()
            connection = self._engine.connect()
            if connection.dialect.name == "postgresql":
                # A crash of the database may lose the last index entries; their tasks still run.
                connection.execute(text("SET synchronous_commit TO off"))
                connection.commit()
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with errors_ignored():
                connection.invalidate()
                connection.close()
