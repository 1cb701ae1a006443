"""``FanOut``: send the rows of a DataFrame as delayed Celery tasks."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any, Unpack, cast
from uuid import uuid4

from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from ..durations import duration
from ..errors import FanOutFailed, InvalidFanOut
from . import encode
from .app import AppFacts, Call
from .encode import SENT_COLUMNS
from .executor import ANSWERS, answers_of, checker, sender
from .live_counts import LiveCounts, context_of
from .options import FanOutKeywords, FanOutOptions
from .plan import Plan, make_plan
from .receipts import Failure, Receipt
from .sending import SendJob, warn_of_late_sending

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FanOutResult:
    """The result of :meth:`FanOut.send`: counts, and the tasks without a confirm."""

    run_id: str
    seconds: float
    receipts: list[Receipt]
    """The counts of each partition."""
    failures: list[Failure] = field(repr=False)
    """One :class:`Failure` per task that the broker has not confirmed."""

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
    >>> fan_out.ledger().write.parquet("ledger")  # doctest: +SKIP
    >>> print(fan_out.send())  # doctest: +SKIP

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
        call = Call.of(self.options)
        one = self._df.sparkSession.range(1).coalesce(1)
        try:
            (facts,) = answers_of(one.mapInArrow(checker(call), ANSWERS))
        except PySparkException as exc:
            raise InvalidFanOut(
                "expected celery_native_delay, pyarrow and the app's packages in the executors' "
                f"Python (see PYSPARK_PYTHON), got {_last_line(exc)}"
            ) from exc
        if isinstance(facts, InvalidFanOut):
            raise facts
        self._check_queues(facts)
        return cast(AppFacts, facts)

    @property
    def encoded(self) -> Any:
        """A DataFrame with one encoded task per row; a rejected row has the reason in ``error``."""
        return self._encoded(self._df)

    def _encoded(self, df: Any, *keep: str) -> Any:
        facts = self.facts
        return encode.encoded(
            df,
            self.options,
            longest_seconds=facts.longest_seconds,
            spread=facts.spread,
            keep=keep,
        )

    def plan(self) -> Plan:
        """Count the tasks that :meth:`send` would send, without a connection to the broker.

        Raises:
            InvalidFanOut: an executor cannot import the app, or the app lacks the task or a queue.
        """
        return make_plan(self.encoded, self.facts, self.options)

    def rejected(self) -> Any:
        """Return a DataFrame of the rejected rows; the added column ``_error`` has the reason."""
        return (
            self._encoded(self._df, "row")
            .where("error is not null")
            .select("row.*", f.col("error").alias("_error"))
        )

    def ledger(self) -> Any:
        """Return a DataFrame of the tasks to send. Store this DataFrame before :meth:`send`.

        The columns are ``task_id``, ``run_id``, ``task``, ``due``, ``queue``, and the
        columns in the option *id_cols*. :func:`reconcile` compares these rows with the workers'
        telemetry. To send missing tasks again at the same due times, make a ``FanOut`` of the
        stored rows.
        """
        keys = {
            f"key{number}": column.replace("`", "")
            for number, column in enumerate(self.options.id_cols)
            if isinstance(column, str)
        }
        return (
            self._encoded(self._df, *keys)
            .where("error is null")
            .select(
                "task_id",
                f.lit(self.run_id).alias("run_id"),
                f.lit(self.options.task).alias("task"),
                f.timestamp_micros("due_us").alias("due"),
                f.coalesce("queue", f.lit(self.facts.route)).alias("queue"),
                *(f.col(slot).alias(name) for slot, name in keys.items()),
            )
        )

    def send(self, *, check: bool = True) -> FanOutResult:
        """Send all accepted rows as tasks, and return when the broker has confirmed the tasks.

        If an executor is lost, Spark sends the partition again, with the same task ids. With the
        option *once*, workers still run each task a single time.

        If the Spark job fails or is interrupted, the log has three numbers: tasks sent, confirmed,
        and in doubt (the broker may have received these tasks).

        Args:
            check: if True, unconfirmed tasks cause FanOutFailed. If False, the method returns the
                result, which lists these tasks.

        Raises:
            InvalidFanOut: an executor cannot import the app, or the app lacks the task or a queue.
                Nothing was sent.
            FanOutFailed: the broker has not confirmed some tasks, which the error's *result* lists.
            pyspark.errors.PySparkException: the Spark job failed.
        """
        spark = self._df.sparkSession
        connections = self.options.connections
        context = context_of(spark)
        slots = connections if context is None else context.defaultParallelism
        rate = self.options.max_rate
        job_id = uuid4().hex
        started = monotonic()
        # Few partitions, because each opens a connection; done again, as a rate shuffles the rows.
        encoded = self._encoded(self._df.coalesce(connections)).coalesce(connections)
        with LiveCounts(spark, job_id) as counts:
            job = SendJob(
                self.options.app,
                self.options.task,
                rate / min(connections, slots) if rate else None,
                self.options.once,
                job_id,
                counts.address,
            )
            report = encoded.select(*SENT_COLUMNS).mapInArrow(sender(job), ANSWERS)
            try:
                answers = answers_of(report)
            except BaseException as exc:
                ended = "was interrupted" if isinstance(exc, KeyboardInterrupt) else "failed"
                logger.error(
                    "native delay: run %s %s: %s; tasks that were sent will run",
                    self.run_id,
                    ended,
                    counts.stop(),
                )
                raise
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        receipts.sort(key=lambda receipt: receipt.partition)
        seconds = monotonic() - started
        result = FanOutResult(self.run_id, seconds, receipts, failures)
        warn_of_late_sending(result.sent_after_due, result.sent)
        if check and failures:
            then = "send these rows again with the same run_id, which gives them the same task ids"
            if self.options.rate:
                then += (
                    ", and with eta='due' of ledger() instead of rate, which would give them the "
                    "due times of other tasks"
                )
            raise FanOutFailed(f"{result}; the first: {failures[0].reason}; {then}", result)
        return result

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
