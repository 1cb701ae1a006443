"""Send the rows of a partition with ``bulk(app)``, and check the app, on executors."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from time import monotonic, sleep, time_ns
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkFiles, TaskContext

from ..app.runs import close_run, have_run
from ..bulk.batch import Bulk
from ..due_time import due_us
from ..errors import (
    NativeDelayError,
    NotPermitted,
    PublishRefused,
    SettingsError,
    StoreUnavailable,
    TopologyMismatch,
    UnsupportedBroker,
)
from ..message import ONCE
from ..now import moment
from ..records.runs import RunRecord
from ..records.waiting import RUN
from .app import load_app, on_app
from .encode import SENT_COLUMNS
from .live_counts import Reporter
from .options import FanOutOptions

logger = logging.getLogger(__name__)

Batches = Iterator[Any]

#: The schema of a DataFrame whose rows are pickled answers of executors.
ANSWERS = "answer binary"

#: The columns of an encoded row that a ledger has, apart from *id_cols*.
LEDGER_COLUMNS = ("task_id", "due_us", "queue")

#: The largest number of answers in one Arrow batch.
_MOST_ANSWERS = 10_000

#: Rows of a repeated run that are looked up at once.
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Failure:
    """A row whose task the broker has not confirmed.

    *outcome* is "refused" (the broker refused the task, or the task cannot be delayed), "in doubt"
    (the broker may have received the task) or "unsent".
    """

    task_id: str
    outcome: str
    reason: str


@dataclass
class Receipt:
    """The numbers of sent and rejected rows of one partition, reported to the driver."""

    partition: int
    attempt: int
    """The id of the attempt of Spark's task, which no other attempt has."""
    rows: int = 0
    sent: int = 0
    confirmed: int = 0
    done: int = 0
    """The number of tasks that an earlier try has sent, and that have run; not sent again."""
    by_template: int = 0
    """The number of tasks that were sent as copies of an encoded message."""
    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    """The number of rejected rows by reason."""
    broken: str = ""
    """The reason why sending stopped before the last row; "" if all rows were handled."""
    last_eta: str = ""
    """The latest due time of the sent tasks, in ISO 8601."""
    sent_after_due: int = 0
    """The number of tasks that were sent after their due time."""


def close_try(
    app: str,
    run_id: str,
    receipts: Sequence[Receipt],
    ask: Callable[[Callable[[], None]], object] = lambda call: call(),
) -> None:
    """Store the numbers of one try of a run; *ask* makes the call, where the store can be reached.

    If the store does not answer, log a warning: the tasks are sent.
    """
    counts = {
        "rows": sum(each.rows for each in receipts),
        "sent": sum(each.confirmed + each.done for each in receipts),
        "rejected": sum(each.rejected.total() for each in receipts),
    }
    last_us = max((due_us(each.last_eta) for each in receipts if each.last_eta), default=0)
    try:
        ask(partial(on_app, app, close_run, run_id, counts, last_us))
    except NativeDelayError as exc:
        logger.warning("native delay: the state of run %s is older: %s", run_id, exc)


@dataclass(frozen=True)
class SendJob:
    """The options of a Spark job that sends rows, such as the Celery app and the task."""

    app: str
    task: str
    max_rate: float | None
    """The largest number of Celery tasks per second on one connection; None is no limit."""
    once: bool = False
    """True if workers run each task a single time, even if Spark sends it twice."""
    run: str | None = None
    """The name of the run, whose state is stored; None if it is not."""
    is_repeated: bool = False
    """True if this is not the run's first try. Due tasks that ran are not sent again."""
    moved_us: int = 0
    """The time by which the tasks of the run were rescheduled."""
    id: str = ""
    """The id of the Spark job; each batch of a stream has its own id."""
    driver: tuple[str, int] | None = None
    """The host and port to which executors report counts; None if the driver does not listen."""

    @classmethod
    def of(
        cls,
        options: FanOutOptions,
        run: RunRecord | None,
        job_id: str,
        max_rate: float | None = None,
        driver: tuple[str, int] | None = None,
    ) -> SendJob:
        """Return the job that sends rows; *run* is the stored state of its run, if there is one."""
        job = cls(options.app, options.task, max_rate, bool(options.once), id=job_id, driver=driver)
        if run is None:
            return job
        once, again = options.once is not False, run.tries > 1
        return replace(job, once=once, run=run.run_id, is_repeated=again, moved_us=run.moved_us)


def send_rows(rows: Iterable[tuple[Any, ...]], job: SendJob, receipt: Receipt) -> Iterator[Failure]:
    """Send encoded rows as Celery tasks; yield each Failure, and write the counts to *receipt*.

    An outage of the broker does not fail the Spark task, because Spark would send all rows again.
    After a minute of outage, this executor sends no more rows of this job. For each row that was
    not sent, this function yields a Failure with the outcome "unsent".
    """
    started = monotonic()
    headers: dict[str, Any] = {ONCE: True} if job.once else {}
    if job.run is not None:
        headers[RUN] = job.run
    given_up = GivenUp(job.id)
    receipt.broken = given_up.reason()
    batch = Bulk(load_app(job.app), check=False, headers=headers)
    reporter = Reporter(job.driver, job.id, receipt.partition, receipt.attempt)
    pace = Pace(job.max_rate)
    options: dict[Any, dict[str, Any]] = {}
    #: The broker's error by queue. Other rows of this queue are refused without asking the broker.
    error_of_queue: dict[str | None, str] = {}
    with ExitStack() as stack:
        stack.callback(reporter.end, batch)
        stack.enter_context(batch)
        for task_id, due_us, body, queue, priority, expires_us, error in _not_done(
            rows, job, receipt
        ):
            receipt.rows += 1
            if error is not None:
                receipt.rejected[error] += 1
                continue
            if receipt.broken:
                yield Failure(task_id, "unsent", receipt.broken)
                continue
            if queue in error_of_queue:
                yield Failure(task_id, "refused", error_of_queue[queue])
                continue
            args, kwargs = json.loads(body)
            sent_options = options.get((queue, priority))
            if sent_options is None:
                named = {"queue": queue, "priority": priority}
                sent_options = {name: value for name, value in named.items() if value is not None}
                options[queue, priority] = sent_options
            if expires_us is not None:
                sent_options = {**sent_options, "expires": _utc_text(expires_us)}
            due_us += job.moved_us
            eta = _utc_text(due_us)
            if eta > receipt.last_eta:  # as texts, because all have the same format
                receipt.last_eta = eta
            if reporter.report(batch):
                receipt.broken = "the driver was interrupted"
                given_up.note(receipt.broken)
                break
            pace.wait()
            try:
                batch.send(job.task, args, kwargs, eta=eta, task_id=task_id, **sent_options)
                receipt.sent_after_due += due_us <= time_ns() // 1000
            except PublishRefused as exc:
                receipt.broken = str(exc)
            except Exception as exc:
                error_text = f"{type(exc).__name__}: {exc}"
                if isinstance(exc, _ABOUT_THE_QUEUE):
                    error_of_queue[queue] = error_text
                    yield Failure(task_id, "refused", error_text)
                elif _is_about_the_row(exc):
                    yield Failure(task_id, "refused", error_text)
                else:
                    receipt.broken = error_text
                    if batch.has_given_up:
                        given_up.note(error_text)
                    yield Failure(task_id, "unsent", error_text)
    result = batch.result
    for outcome, messages in (("refused", result.refused), ("in doubt", result.in_doubt)):
        for message in messages:
            yield Failure(message.task_id or "", outcome, message.reason)
    receipt.sent = result.sent
    receipt.confirmed = result.confirmed
    receipt.by_template = result.by_template
    receipt.seconds = monotonic() - started


def _not_done(
    rows: Iterable[tuple[Any, ...]], job: SendJob, receipt: Receipt
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows whose tasks have not run; count the others as done."""
    if not (job.is_repeated and job.once):
        yield from rows
        return
    app, remaining = load_app(job.app), iter(rows)
    while some := list(islice(remaining, _LOOKED_AT)):
        now_us = time_ns() // 1000
        due = [row[0] for row in some if row[-1] is None and row[1] + job.moved_us <= now_us]
        ran = have_run(app, job.task, due) if due else set()
        left = [row for row in some if row[0] not in ran]
        receipt.rows += len(some) - len(left)
        receipt.done += len(some) - len(left)
        yield from left


@lru_cache(1)  # rows come in the order of their due times
def _utc_text(us: int) -> str:
    return moment(us).isoformat(timespec="microseconds")


#: Errors that concern the queue, so that each row of the same queue would get the same error.
_ABOUT_THE_QUEUE = (NotPermitted, TopologyMismatch, UnsupportedBroker, SettingsError)


def _is_about_the_row(error: Exception) -> bool:
    """Return True if the error concerns one row, not the broker or the connection."""
    about_rows = isinstance(error, NativeDelayError | TypeError | ValueError)
    return about_rows and not isinstance(error, StoreUnavailable)


def warn_of_late_sending(late: int, sent: int) -> None:
    if late:
        logger.warning(
            "native delay: %d of %d tasks were sent after they were due: begin earlier, or raise "
            "max_rate and connections",
            late,
            sent,
        )


class GivenUp:
    """A file on an executor. If the file exists, later Spark tasks of the job send nothing.

    The file contains the reason.
    """

    def __init__(self, job_id: str) -> None:
        # Spark ends the Python process of a failed task, so memory would not keep the reason.
        name = f"celery-native-delay-{job_id}.given-up"
        self._path = Path(SparkFiles.getRootDirectory(), name) if job_id else None

    def reason(self) -> str:
        """Return why an earlier Spark task on this executor stopped sending; "" if none did."""
        if self._path is not None:
            with suppress(OSError):
                return self._path.read_text()
        return ""

    def note(self, reason: str) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.write_text(reason)


class Pace:
    """Limits the tasks sent per second; after a pause, sends the tasks of 0.2 s at once."""

    def __init__(self, per_second: float | None) -> None:
        self._interval = 1 / per_second if per_second else 0.0
        self._next = monotonic()

    def wait(self) -> None:
        if not self._interval:
            return
        now = monotonic()
        if self._next > now:
            sleep(self._next - now)
        self._next = max(self._next, now - 0.2) + self._interval


# ---- for mapInArrow() ----------------------------------------------------------------------------


def asker(question: Callable[[], Any]) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that yields the answer of *question*, or its error."""

    def ask(batches: Batches) -> Batches:
        for _ in batches:
            try:
                yield _batch([question()])
            except NativeDelayError as exc:
                yield _batch([exc])

    return ask


def sender(job: SendJob, kept: Sequence[str] = ()) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that sends rows, and yields failures and counts.

    After them come the columns *kept* of the accepted rows, without answers.
    """

    def send(batches: Batches) -> Batches:
        context = TaskContext.get()
        receipt = Receipt(context.partitionId(), context.taskAttemptId())
        accepted: list[Any] = []

        def rows() -> Iterator[tuple[Any, ...]]:
            for batch in batches:
                if kept:
                    accepted.append(_accepted(batch, kept))
                columns = [batch.column(name).to_pylist() for name in SENT_COLUMNS]
                yield from zip(*columns, strict=True)

        answers = chain(send_rows(rows(), job, receipt), [receipt])
        while batch := list(islice(answers, _MOST_ANSWERS)):
            types = accepted[0].schema.types[:-1] if accepted else [pa.null()] * len(kept)
            nulls = [pa.nulls(len(batch), kind) for kind in types]
            yield _batch(batch, nulls, kept)
        yield from accepted

    return send


def _accepted(batch: Any, kept: Sequence[str]) -> Any:
    """Return the columns *kept* of the rows of *batch* that are not rejected, with null answers."""
    batch = batch.filter(pc.is_null(batch.column("error")))
    columns = {name: batch.column(name) for name in kept}
    columns["answer"] = pa.nulls(batch.num_rows, pa.binary())
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def answers_of(frame: Any) -> list[Any]:
    """Run a DataFrame's Spark job, and unpickle the objects in the column ``answer``."""
    return [pickle.loads(row.answer) for row in frame.collect()]


def _batch(answers: list[Any], nulls: Sequence[Any] = (), kept: Sequence[str] = ()) -> Any:
    pickled = pa.array([pickle.dumps(answer) for answer in answers], pa.binary())
    return pa.RecordBatch.from_arrays([*nulls, pickled], names=[*kept, "answer"])
