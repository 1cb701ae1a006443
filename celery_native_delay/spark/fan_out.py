"""``FanOut``: send the rows of a DataFrame as delayed Celery tasks."""

from __future__ import annotations

import logging
import pickle
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import monotonic
from typing import Any, Unpack
from uuid import uuid4

from pyspark.errors import PySparkException
from pyspark.sql import Observation
from pyspark.sql import functions as f

from ..app.runs import Run, open_run
from ..durations import duration
from ..errors import FanOutFailed, InvalidFanOut, StoreUnavailable
from ..now import moment
from . import encode
from .app import AppFacts, Call, describe, on_app
from .encode import SENT_COLUMNS, Tell
from .live_counts import LiveCounts, context_of, tell_encoded
from .options import FanOutKeywords, FanOutOptions
from .plan import Plan, make_plan
from .sending import (
    ANSWERS,
    LEDGER_COLUMNS,
    Failure,
    Receipt,
    SendJob,
    answers_of,
    asker,
    close_try,
    sender,
    warn_of_late_sending,
)

logger = logging.getLogger(__name__)

#: A function of the present time, in a plan of Spark.
_NOW = re.compile(r"\b(current_timestamp|current_date|now|localtimestamp)\(")


@dataclass(frozen=True)
class FanOutResult:
    """The result of :meth:`FanOut.send`: counts, and the tasks without a confirm."""

    run_id: str
    seconds: float
    receipts: list[Receipt]
    """The counts of each partition."""
    failures: list[Failure] = field(repr=False)
    """One :class:`Failure` per task that the broker has not confirmed."""

    app: str = field(repr=False, default="")

    @property
    def run(self) -> Run:
        """The run, to look after its tasks, if this process can import the app."""
        return Run(self.run_id, app=self.app)

    @property
    def rows(self) -> int:
        """The number of rows of the DataFrame."""
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def sent(self) -> int:
        """The number of tasks that were sent."""
        return sum(receipt.sent for receipt in self.receipts)

    @property
    def confirmed(self) -> int:
        """The number of tasks that the broker has confirmed."""
        return sum(receipt.confirmed for receipt in self.receipts)

    @property
    def done(self) -> int:
        """The number of tasks that an earlier try has sent, and that have run; not sent again."""
        return sum(receipt.done for receipt in self.receipts)

    @property
    def sent_after_due(self) -> int:
        """The number of tasks that were sent after their due time, and therefore run late."""
        return sum(receipt.sent_after_due for receipt in self.receipts)

    @property
    def rejects(self) -> dict[str, int]:
        """The number of rejected rows by reason, most frequent first."""
        total: Counter[str] = sum((receipt.rejected for receipt in self.receipts), Counter())
        return dict(total.most_common())

    @property
    def rejected(self) -> int:
        """The number of rejected rows, which cannot become tasks."""
        return sum(self.rejects.values())

    def __str__(self) -> str:
        failed = Counter(failure.outcome for failure in self.failures)
        more = "".join(f", {count:,} {outcome}" for outcome, count in failed.items())
        more = (f", {self.done:,} done before" if self.done else "") + more
        late = self.sent_after_due
        after = f"; {late:,} were sent after they were due" if late else ""
        return (
            f"run {self.run_id}: {self.rows:,} rows, {self.confirmed:,} confirmed, "
            f"{self.rejected:,} rejected{more} in {duration(self.seconds)} "
            f"({self.confirmed / (self.seconds or 1):,.0f} rows/s){after}"
        )


class FanOut:
    """Send the rows of a DataFrame as delayed tasks of a Celery app.

    >>> fan_out = FanOut(
    ...     orders,
    ...     app="shop.app:app",
    ...     task="shop.remind",
    ...     eta="remind_at",
    ...     kwargs=["order_id"],
    ...     id_cols=["order_id"],
    ...     run_id="reminders-2026-11-20",
    ... )  # doctest: +SKIP
    >>> print(fan_out.plan())  # doctest: +SKIP
    >>> print(fan_out.send(ledger="ledger"))  # doctest: +SKIP

    Creating a ``FanOut`` object starts no Spark job.

    Args:
        df: the DataFrame.
        **options: see :class:`~celery_native_delay.spark.options.FanOutOptions`.

    Raises:
        InvalidFanOut: an option or a column is wrong.
    """

    def __init__(self, df: Any, **options: Unpack[FanOutKeywords]) -> None:
        try:
            self.options = FanOutOptions(**options)
        except TypeError as exc:
            known = ", ".join(FanOutOptions.__dataclass_fields__)
            raise InvalidFanOut(f"expected options among {known}: {exc}") from exc
        self._df = df
        self._has_run_id = "run_id" in options
        self._has_warned = False
        self._inputs, _ = encode.inputs(df, self.options)

    @property
    def run_id(self) -> str:
        """The name of this run. With the same *run_id*, the same row has the same task id."""
        return self.options.run_id

    @cached_property
    def facts(self) -> AppFacts:
        """Facts about the Celery app, such as its queues; the first access starts a Spark job.

        Raises:
            InvalidFanOut: an executor cannot import the app, or the app lacks the task or a queue.
        """
        facts: AppFacts = self._ask(partial(describe, Call.of(self.options)))
        self._check_queues(facts)
        return facts

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer of *question*, which one executor calls, or raise its error."""
        one = self._df.sparkSession.range(1).coalesce(1)
        try:
            (answer,) = answers_of(one.mapInArrow(asker(question), ANSWERS))
        except PySparkException as exc:
            raise InvalidFanOut(
                "expected celery_native_delay, pyarrow and the app's packages in the executors' "
                f"Python (see PYSPARK_PYTHON), got {_last_line(exc)}"
            ) from exc
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def encoded(self) -> Any:
        """A DataFrame with one encoded task per row; a rejected row has the reason in ``error``."""
        return self._encoded(self.options)

    def _encoded(self, options: FanOutOptions, *keep: str, tell: Tell | None = None) -> Any:
        longest_seconds, spread = self.facts.longest_seconds, self.facts.spread
        more: Any = {"longest_seconds": longest_seconds, "spread": spread}
        return encode.encoded(self._df, options, **more, keep=keep, tell=tell)

    def plan(self) -> Plan:
        """Count the tasks that :meth:`send` would send, without a connection to the broker.

        Raises:
            InvalidFanOut: an executor cannot import the app, or the app lacks the task or a queue.
        """
        self._warn_if_volatile()
        return make_plan(self.encoded, self.facts, self.options, self._senders)

    def rejected(self) -> Any:
        """Return a DataFrame of the rejected rows; the added column ``_error`` has the reason."""
        self._warn_if_volatile()
        earlier = f.col("row").dropFields("_error")  # of rows that were rejected before
        return (
            self._encoded(self.options, "row")
            .where("error is not null")
            .select(earlier.alias("row"), "error")
            .select("row.*", f.col("error").alias("_error"))
        )

    def send(self, *, ledger: str | None = None) -> FanOutResult:
        """Send all accepted rows as tasks, and return when the broker has confirmed the tasks.

        The same rows may be sent any number of times with the same *run_id*, whole or in part, if
        the app has a Redis broker or ``native_delay_store``: each task runs once. All tries reject
        what the first one rejected, and count a *countdown* from its beginning. Tasks that have run
        are not sent again.

        If the Spark job fails or is interrupted, the log has three numbers: tasks sent, confirmed,
        and in doubt (the broker may have received these tasks).

        Args:
            ledger: the path to which Spark appends the tasks of this job, as Parquet, when it ends:
                ``task_id``, ``run_id``, ``task``, ``due``, ``queue`` and the columns *id_cols*, for
                :func:`reconcile`. An id column with such a name becomes ``id_due``, for example.

        Raises:
            InvalidFanOut: an executor cannot import the app, or the app lacks the task or a queue,
                or the run was cancelled. Nothing was sent.
            FanOutFailed: the broker has not confirmed some tasks, which the error's *result* lists.
                Or the store or the Redis broker does not answer: nothing was sent.
            pyspark.errors.PySparkException: the Spark job failed.
        """
        options, spark, job_id = self.options, self._df.sparkSession, uuid4().hex
        _ = self.facts  # checks the app first
        opening = partial(
            on_app, options.app, open_run, self.run_id, options.task, options.now_us, job_id
        )
        try:
            run = self._ask(opening)
        except StoreUnavailable as exc:
            raise FanOutFailed(f"nothing was sent, as the state of runs is away: {exc}") from exc
        self._warn_if_volatile()
        self._warn_of_repeats(run is not None)
        if run is not None:
            options = replace(options, now=moment(run.began_us))
        keys = self._keys if ledger is not None else {}
        rate, senders = options.max_rate, self._senders
        started = monotonic()
        with LiveCounts(spark, job_id) as counts:
            tell = None if counts.address is None else partial(tell_encoded, counts.address, job_id)
            frame = self._encoded(options, *keys, tell=tell)
            # A shuffle, and no coalesce(): the rows are computed with all slots of the cluster, and
            # sent by few tasks. By id, so that a repeated task of Spark has the same rows. In the
            # order of due times, so that few are late.
            frame = frame.select(*keys, *SENT_COLUMNS).repartition(senders, "task_id")
            frame = frame.sortWithinPartitions("due_us")
            each = None if rate is None else rate / senders
            job = SendJob.of(options, run, job_id, max_rate=each, driver=counts.address)
            try:
                answers = self._sent(frame, job, keys, ledger)
            except BaseException as exc:
                ended = "was interrupted" if isinstance(exc, KeyboardInterrupt) else "failed"
                logger.error(
                    "native delay: run %s %s: %s; tasks that were sent will run",
                    self.run_id,
                    ended,
                    counts.stop(),
                )
                raise
        receipts = sorted(
            (answer for answer in answers if isinstance(answer, Receipt)),
            key=lambda receipt: receipt.partition,
        )
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if again := counts.sent_again({(each.partition, each.attempt) for each in receipts}):
            logger.warning(
                "native delay: Spark repeated a part of the job, so %s tasks or more were sent "
                "twice; they run %s",
                f"{again:,}",
                "once" if job.once else "twice",
            )
        seconds = monotonic() - started
        result = FanOutResult(self.run_id, seconds, receipts, failures, options.app)
        warn_of_late_sending(result.sent_after_due, result.sent)
        if run is not None:
            close_try(options.app, self.run_id, receipts, self._ask)
        if failures:
            raise FanOutFailed(
                f"{result}; the first: {failures[0].reason}; send the same rows again with the "
                f"same run_id, which gives them the same task ids",
                result,
            )
        return result

    @property
    def _senders(self) -> int:
        """The number of Spark tasks that send. If some had to wait, their rows would be late."""
        context, most = context_of(self._df.sparkSession), self.options.connections
        return most if context is None else min(most, context.defaultParallelism)

    @property
    def _keys(self) -> dict[str, str]:
        """The names of the columns *id_cols* in a ledger, by their names inside ``FanOut``."""
        names = {
            f"key{number}": column.replace("`", "")
            for number, column in enumerate(self.options.id_cols)
            if isinstance(column, str)
        }
        taken = ("task_id", "run_id", "task", "due", "queue")
        return {key: f"id_{one}" if one.lower() in taken else one for key, one in names.items()}

    def _sent(
        self, frame: Any, job: SendJob, keys: dict[str, str], ledger: str | None
    ) -> list[Any]:
        """Send the rows of *frame*; return the answers of executors."""
        if ledger is None:
            return answers_of(frame.mapInArrow(sender(job), ANSWERS))
        types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        kept = ", ".join(f"{name} {types[name]}" for name in (*keys, *LEDGER_COLUMNS))
        told = Observation()
        rows = frame.mapInArrow(sender(job, (*keys, *LEDGER_COLUMNS)), f"{kept}, {ANSWERS}")
        rows = rows.observe(told, f.collect_list("answer").alias("answers"))
        tasks = rows.where("answer is null").select(
            "task_id",
            f.lit(self.run_id).alias("run_id"),
            f.lit(self.options.task).alias("task"),
            f.timestamp_micros("due_us").alias("due"),
            f.coalesce("queue", f.lit(self.facts.route)).alias("queue"),
            *(f.col(slot).alias(name) for slot, name in keys.items()),
        )
        tasks.write.mode("append").parquet(ledger)
        return [pickle.loads(answer) for answer in told.get["answers"]]

    def _warn_if_volatile(self) -> None:
        """Log a warning, once, if Spark computes other values each time. Connect does not tell."""
        with suppress(Exception):  # _jdf is no public name of Spark
            analyzed = self._df._jdf.queryExecution().analyzed()
            is_volatile = not analyzed.deterministic() or _NOW.search(analyzed.toString())
            if is_volatile and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "native delay: rows of run %s differ each time Spark computes them, as they "
                    "contain uuid(), rand(), current_timestamp() or the like: plan() and "
                    "rejected() show other rows than send() sends, and a repeated send() may send "
                    "other task ids; write the rows down first, for example as Parquet",
                    self.run_id,
                )

    def _warn_of_repeats(self, is_stored: bool) -> None:
        if not self._has_run_id:
            logger.warning(
                "native delay: run %s has a random name, so a repeated job sends all its tasks "
                "again, and they run again: give run_id, such as the name and day of the job, and "
                "id_cols",
                self.run_id,
            )
        elif not is_stored:
            logger.warning(
                "native delay: without native_delay_store or a Redis broker, tasks of run %s that "
                "are sent again run again",
                self.run_id,
            )

    def _check_queues(self, facts: AppFacts) -> None:
        if self.options.queue is None or not self.options.check_queue:
            return
        asked = self._inputs.select("queue").distinct().limit(10_000).collect()
        names = {row["queue"] for row in asked} - {None, ""}
        if unknown := sorted(names.difference(facts.queues)):
            raise InvalidFanOut(
                f"expected queues that the app's configuration names ({', '.join(facts.queues)}), "
                f"got {', '.join(unknown[:10])}; add them to task_queues, or say check_queue=False"
            )


def _last_line(error: Exception) -> str:
    """Return the last line of a Python worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line and not line.startswith("at ")]
    return (named or lines or [type(error).__name__])[-1]
