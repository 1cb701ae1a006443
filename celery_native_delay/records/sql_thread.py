"""A thread that asks the database for publishers and receivers, who wait for a moment only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, exc, text

from ..errors import RecordsUnavailable
from .away import Away
from .interface import PATIENCE_SECONDS

T = TypeVar("T")

#: So many notes are written together; so many may wait to be written.
_AT_ONCE = 500
_MOST_NOTES = 2000

Row = Mapping[str, Any]
Job = tuple[Callable[[Connection], Any], "Future[Any] | None"]


class SqlThread:
    """A thread with one connection to the database of *engine*; it starts when it is needed."""

    def __init__(
        self,
        engine: Engine,
        where: str,
        prepare: Callable[[], None],
        write: Callable[..., None],
    ) -> None:
        """*prepare* makes the tables, *write* writes notes."""
        self._engine = engine
        self._prepare = prepare
        self._write = write
        self._away = Away(f"the records at {where}")
        self._jobs: SimpleQueue[Row | Job | None] = SimpleQueue()
        self._starting = Lock()
        self._thread: Thread | None = None
        self._connection: Connection | None = None
        self._busy_since: float | None = None
        self.missed = 0

    def note(self, row: Row) -> None:
        """Queue *row* to be written."""
        if self._jobs.qsize() >= _MOST_NOTES and not self._is_stuck() and not self.flush():
            self.missed += 1
        else:
            self._queue(row)

    def post(self, work: Callable[[Connection], Any]) -> None:
        """Queue *work* to be done."""
        self._queue((work, None))

    def ask(
        self, work: Callable[[Connection], T], timeout_seconds: float = PATIENCE_SECONDS
    ) -> T | None:
        """The answer of *work*; None if the database has none within *timeout_seconds*."""
        future: Future[T] = Future()
        if not self._queue((work, future)):
            return None
        try:
            return future.result(timeout_seconds)
        except Exception:  # the thread has logged it
            self.missed += 1
            return None

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """True once everything that was noted before is there; False if that takes too long."""
        if self._thread is None:
            return True
        wait_seconds = min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS)
        return self.ask(lambda connection: True, wait_seconds) is not None

    def close(self) -> None:
        """End the thread after what it was given."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(PATIENCE_SECONDS)

    def _is_stuck(self) -> bool:
        """True if the database owes an answer for too long: others do not wait for it, too."""
        since = self._busy_since
        return since is not None and monotonic() - since > PATIENCE_SECONDS

    def _queue(self, job: Row | Job) -> bool:
        """Give *job* to the thread, which is started; False if it is stuck."""
        if self._is_stuck():
            self.missed += 1
            return False
        self._jobs.put(job)
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = Thread(target=self._run, name="native-delay-records", daemon=True)
                    thread.start()
                    self._thread = thread
        return True

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
                    self._do(partial(self._write, rows=together), None, len(together))
                    continue
                for job in together:
                    if job is None:
                        self._disconnect()
                        return
                    self._do(*job)

    def _do(
        self,
        work: Callable[[Connection], Any],
        future: Future[Any] | None,
        count: int = 1,
    ) -> None:
        self._busy_since = monotonic()
        try:
            answer = self._answer(work)
            self._away.works()
            if future is not None:
                future.set_result(answer)
        except Exception as error:  # the thread must outlive whatever a database says
            self._disconnect()
            if not isinstance(error, RecordsUnavailable):
                error = self._away.failed(error)
            if future is not None:
                future.set_exception(error)
            else:
                self.missed += count
        finally:
            self._busy_since = None

    def _answer(self, work: Callable[[Connection], T]) -> T:
        for last_try in (False, True):
            try:
                connection = self._connected()
                with connection.begin():
                    return work(connection)
            except exc.SQLAlchemyError:
                # The connection may have been closed meanwhile, or the tables dropped.
                self._disconnect()
                if last_try:
                    raise
        raise AssertionError("unreachable")

    def _connected(self) -> Connection:
        if self._connection is None:
            self._away.check()
            self._prepare()
            connection = self._engine.connect()
            if connection.dialect.name == "postgresql":
                # A crash of the database may lose the last notes: their tasks run all the same.
                connection.execute(text("SET synchronous_commit TO off"))
                connection.commit()
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.invalidate()
                connection.close()
