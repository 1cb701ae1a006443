"""What executors do in mapInArrow(): answer the driver, and send rows with ``bulk(app)``."""

from __future__ import annotations

import json
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from time import monotonic, sleep, time_ns
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from ..app.runs import have_run
from ..bulk.batch import Bulk
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
from .app import load_app
from .encode import SENT_COLUMNS

logger = logging.getLogger(__name__)

#: Rows of a repeated run that are looked up at once.
_LOOKED_AT = 1000

Batches = Iterator[Any]

#: The schema of a DataFrame whose rows are pickled answers of executors.
ANSWERS = "answer binary"

#: The columns of an encoded row that a ledger has, apart from *id_cols*.
LEDGER_COLUMNS = ("task_id", "due_us", "queue")

#: The largest number of answers in one Arrow batch.
_MOST_ANSWERS = 10_000


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


@dataclass(frozen=True)
class SendJob:
    """The options of a Spark job that sends rows, such as the Celery app and the task."""

    app: str
    task: str
    max_rate: float | None
    """The largest number of Celery tasks per second on one connection; None is no limit."""
    once: bool = False
    """True if workers run each task a single time, even if Spark sends it twice."""
    run: RunRecord | None = None
    """The stored state of the run; None if it is not stored."""


def send_rows(rows: Iterable[tuple[Any, ...]], job: SendJob, receipt: Receipt) -> Iterator[Failure]:
    """Send encoded rows as Celery tasks; yield each Failure, and write the counts to *receipt*.

    An outage of the broker does not fail the Spark task, because Spark would send all rows again.
    After a minute of outage, no more rows of this partition are sent. For each row that was not
    sent, this function yields a Failure with the outcome "unsent".
    """
    started = monotonic()
    headers: dict[str, Any] = {ONCE: True} if job.once else {}
    if job.run is not None:
        headers[RUN] = job.run.run_id
    pace = Pace(job.max_rate)
    options: dict[Any, dict[str, Any]] = {}
    #: The broker's error by queue. Other rows of this queue are refused without asking the broker.
    error_of_queue: dict[str | None, str] = {}
    moved_us = 0 if job.run is None else job.run.moved_us
    with Bulk(load_app(job.app), check=False, headers=headers) as batch:
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
            due_us += moved_us
            eta = _utc_text(due_us)
            if eta > receipt.last_eta:  # as texts, because all have the same format
                receipt.last_eta = eta
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
    run = job.run
    if run is None or run.tries == 1 or not job.once:
        yield from rows
        return
    app, remaining = load_app(job.app), iter(rows)
    while some := list(islice(remaining, _LOOKED_AT)):
        now_us = time_ns() // 1000
        due = [row[0] for row in some if row[-1] is None and row[1] + run.moved_us <= now_us]
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
        receipt = Receipt(TaskContext.get().partitionId())
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
