"""The option *fence* of ``FanOut``: if Spark repeats a partition, each row's task runs once.

Each message names the Spark attempt that sent the message. After the Spark job, the driver stores
the valid attempt of each partition in Redis or a database. Workers run only tasks of valid
attempts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Self

from ..durations import duration
from ..errors import FanOutFailed, NoRecords, RecordsUnavailable
from ..fence.in_records import Runs
from ..fence.run import ABORTED, ALL, COMMITTED, MARGIN_SECONDS, OPEN, Record, Stamp
from ..records.opened import RecordsLocation, records_at

if TYPE_CHECKING:
    from .app import AppFacts
    from .options import FanOutOptions
    from .receipts import Receipt

logger = logging.getLogger(__name__)

#: Seconds to retry while the records are unreachable: before the first task, and after the last.
OPEN_PATIENCE_SECONDS = 10.0
SEAL_PATIENCE_SECONDS = 60.0

_BY = "the driver"


@dataclass(frozen=True)
class Fence:
    """Lets workers run each row's task only once, even if Spark repeats a partition."""

    records: RecordsLocation = field(repr=False)
    run: str
    job: str
    """The id of the Spark job. If several jobs send the same rows, workers run only the tasks of
    the first job that succeeded."""
    timeout_seconds: float
    longest_seconds: float
    """The longest delay of a message, in seconds."""

    @classmethod
    def of(cls, options: FanOutOptions, facts: AppFacts, job: str) -> Self | None:
        """Return the ``Fence`` of the Spark job with the id *job*; None without the option *fence*.

        Raises:
            NoRecords: the app has no records (in Redis or a database).
        """
        if not options.fence:
            return None
        if facts.records is None:
            raise NoRecords(
                f"expected {options.app} to have records, which a fenced run needs: set "
                f'native_delay_records = "redis://…", or the SQLAlchemy URL of a database, in '
                f"workers and producers, or leave fence out; nothing was sent"
            )
        run = f"{options.run_id}:{options.task}"
        return cls(facts.records, run, job, options.fence_timeout, facts.longest_seconds)

    def stamp(self, partition: int, attempt: int) -> Stamp:
        """Return the message header that identifies one attempt to send a partition."""
        # Spark may reuse attempt numbers.
        return Stamp(self.run, partition, f"{attempt}-{token_hex(4)}")

    def open(self) -> Record:
        """Store that the Spark run has begun, and return the run's stored state.

        If the state is COMMITTED, the run succeeded before, and the caller must send nothing.
        Each call extends the deadline of an open run: at least *fence_timeout* seconds (an option
        of ``FanOut``) remain. If the driver stores no result before the deadline,
        ``native_delay_fence_policy`` decides: workers run or drop all tasks.

        Raises:
            RecordsUnavailable: Redis or the database is unreachable; nothing may be sent.
            FanOutFailed: the run was aborted before, for example by a worker after the deadline.
        """
        now = time()
        new = Record(OPEN, now, deadline=now + self.timeout_seconds)
        kept_seconds = self.longest_seconds + MARGIN_SECONDS
        with closing(records_at(*self.records)) as records:
            record = _patiently(
                lambda: Runs(records).open(self.run, new, job=self.job, kept_seconds=kept_seconds),
                OPEN_PATIENCE_SECONDS,
            )
        if record.state == ABORTED:
            raise FanOutFailed(
                f"expected run {self.run} to be open, {record.by} has aborted it; no task of this "
                f"job runs: send the run again"
            )
        return record

    def commit(self, receipts: Sequence[Receipt], *, rows: str = "") -> None:
        """Store each partition's valid Spark attempt; workers run only tasks of valid attempts.

        Args:
            receipts: the report of each partition, which names the valid Spark attempt.
            rows: the count and checksum of all rows, which must be the same in each job of the run.

        Raises:
            FanOutFailed: the attempts could not be stored, a worker had aborted the run, or the
                run succeeded before with other rows.
        """
        stamps = [Stamp.parse(receipt.fence) for receipt in receipts if receipt.fence]
        now = time()
        last = max((receipt.last_eta for receipt in receipts), default="")
        wait_seconds = max(datetime.fromisoformat(last).timestamp() - now, 0) if last else 0.0
        winners = {str(stamp.partition): stamp.attempt for stamp in stamps}
        try:
            record = Record(COMMITTED, now, winners=winners, by=_BY, rows=rows)
            sealed = self._seal(record, wait_seconds)
        except RecordsUnavailable as exc:
            raise FanOutFailed(
                f"run {self.run} is sent but not sealed: {exc}; its tasks wait until "
                f"{duration(self.timeout_seconds)} after it began, then native_delay_fence_policy "
                f"of the workers decides whether they run"
            ) from exc
        if sealed.state == ABORTED:
            raise FanOutFailed(
                f"run {self.run} was given up by {sealed.by}, which dropped its tasks "
                f"(native_delay_fence_policy): it was not sealed within "
                f"{duration(self.timeout_seconds)}; send it again with a longer fence_timeout"
            )
        if sealed.state == COMMITTED and rows and rows != sealed.rows:
            raise FanOutFailed(
                f"run {self.run} was committed before, with other rows, and these are not sent: "
                f"give other rows another run_id, or send them without a fence"
            )
        if sealed.state == COMMITTED and sealed.winners != winners:
            logger.warning(
                "native delay: run %s was committed before; its tasks do not run again", self.run
            )
        if sealed.state == ALL:
            logger.warning(
                "native delay: run %s was given up by %s before it was sealed: a task that Spark "
                "sent twice may run twice; a longer fence_timeout prevents that",
                self.run,
                sealed.by,
            )

    def abort(self) -> str:
        """Store that the Spark job failed. Return a text that says if workers run its tasks."""
        try:
            sealed = self._seal(Record(ABORTED, time(), by=_BY), self.longest_seconds)
        except RecordsUnavailable as exc:
            logger.error(
                "native delay: run %s has failed but could not be sealed; "
                "native_delay_fence_policy of the workers decides whether its tasks run: %s",
                self.run,
                exc,
            )
            return "native_delay_fence_policy of the workers decides which tasks run"
        if sealed.state == ALL:
            return f"tasks that were sent will run, because {sealed.by} had given the run up"
        if sealed.state == COMMITTED:
            return "another job has committed the run"
        return "no task of it runs"

    def _seal(self, record: Record, wait_seconds: float) -> Record:
        kept_seconds = wait_seconds + MARGIN_SECONDS
        with closing(records_at(*self.records)) as records:
            sealed = _patiently(
                lambda: Runs(records).seal(self.run, record, kept_seconds=kept_seconds),
                SEAL_PATIENCE_SECONDS,
            )
            with suppress(RecordsUnavailable):  # the next run sweeps instead
                records.sweep()
        return sealed


def _patiently(ask: Callable[[], Record], patience_seconds: float) -> Record:
    deadline = monotonic() + patience_seconds
    while True:
        try:
            return ask()
        except RecordsUnavailable:
            if monotonic() >= deadline:
                raise
        sleep(0.2)


def rows_of(receipts: Sequence[Receipt]) -> str:
    """Return the count and a checksum of all rows, independent of order and partitions."""
    count, ids = (sum(getattr(receipt, name) for receipt in receipts) for name in ("rows", "ids"))
    return f"{count:,} rows {ids:x}"
