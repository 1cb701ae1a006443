"""``FanOut``: a DataFrame's rows as delayed tasks."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any, cast
from uuid import uuid4

from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from ..durations import duration
from ..errors import FanOutFailed, InvalidFanOut
from ..fence.run import COMMITTED
from . import encode
from .app import AppFacts, Call
from .encode import SENT_COLUMNS
from .executor import ANSWERS, answers_of, checker, sender
from .fencing import Fence, rows_of
from .live_counts import LiveCounts, context_of
from .options import FanOutOptions
from .plan import Plan, make_plan
from .receipts import Failure, Receipt
from .sending import SendJob, warn_of_late_sending

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FanOutResult:
    """The account of a whole fan-out: counts, and every row that is not confirmed."""

    run_id: str
    seconds: float
    receipts: list[Receipt]
    failures: list[Failure] = field(repr=False)
    """Every row that was to be sent and is not confirmed, by its id."""
    was_committed: bool = False
    """True if a fenced run was committed before, with the same rows: nothing was sent."""

    @property
    def rows(self) -> int:
        """Rows of the DataFrame."""
        return sum(receipt.rows for receipt in self.receipts)

    @property
    def sent(self) -> int:
        """Tasks that went out."""
        return sum(receipt.sent for receipt in self.receipts)

    @property
    def confirmed(self) -> int:
        """Tasks that the broker has taken responsibility for."""
        return sum(receipt.confirmed for receipt in self.receipts)

    @property
    def sent_after_due(self) -> int:
        """Tasks that had fallen due before they were sent: late, whatever the broker does."""
        return sum(receipt.sent_after_due for receipt in self.receipts)

    @property
    def rejects(self) -> dict[str, int]:
        """Rows that were not to be sent, by reason; most frequent first."""
        total: Counter[str] = Counter()
        for receipt in self.receipts:
            total += receipt.rejected
        return dict(total.most_common())

    @property
    def rejected(self) -> int:
        """Number of rows that were not to be sent."""
        return sum(self.rejects.values())

    def __str__(self) -> str:
        if self.was_committed:
            return f"run {self.run_id}: {self.rows:,} rows, all sent before; nothing was sent again"
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
    """The rows of a DataFrame as delayed tasks of a Celery app.

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

    Nothing happens before one of these is called. The arguments are those of
    :class:`~celery_native_delay.spark.options.FanOutOptions`.

    Raises:
        InvalidFanOut: an option, a column or its type will not do.
    """

    def __init__(self, df: Any, **options: Any) -> None:
        try:
            self.options = FanOutOptions(**options)
        except TypeError as exc:
            known = ", ".join(FanOutOptions.__dataclass_fields__)
            raise InvalidFanOut(f"expected options among {known}: {exc}") from exc
        self._df = df
        self._inputs, _ = encode.inputs(df, self.options)

    @property
    def run_id(self) -> str:
        """The name of this run; give it to another FanOut to send the same tasks again."""
        return self.options.run_id

    @cached_property
    def facts(self) -> AppFacts:
        """The app as an executor describes it; asked once, in a job of one task.

        Raises:
            InvalidFanOut: the app cannot be imported there, does not know the task, or one of the
                queues.
        """
        call = Call.of(self.options)
        one = self._df.sparkSession.range(1).coalesce(1)
        try:
            (facts,) = answers_of(one.mapInArrow(checker(call), ANSWERS))
        except PySparkException as exc:
            raise InvalidFanOut(
                "expected executors with celery_native_delay, pyarrow and the app's packages in "
                f"their Python (PYSPARK_PYTHON says which), got {_last_line(exc)}"
            ) from exc
        if isinstance(facts, InvalidFanOut):
            raise facts
        self._check_queues(facts)
        return cast(AppFacts, facts)

    @property
    def encoded(self) -> Any:
        """The rows as they are going to be sent, or why not: the DataFrame behind all others."""
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
        """Count what sending would do, and what falls due before it can end; no broker is asked.

        Raises:
            InvalidFanOut: see :attr:`facts`.
        """
        return make_plan(self.encoded, self.facts, self.options)

    def rejected(self) -> Any:
        """The rows that are not sent: the DataFrame's own columns and the reason, ``_error``."""
        return (
            self._encoded(self._df, "row")
            .where("error is not null")
            .select("row.*", f.col("error").alias("_error"))
        )

    def ledger(self) -> Any:
        """The tasks that are sent: ``task_id``, ``run_id``, ``task``, ``due``, ``queue``, the key.

        Write it down before :meth:`send`: with it you can tell later which tasks have not run, and
        send these again at the due times that a rate gave them.
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
        """Send every row that is not rejected; return when the broker has confirmed them.

        Spark may run a part of it again, when an executor is lost: the same tasks then go out
        twice, under the same ids. With *fence* one of them runs, and none if the job fails; a run
        that was committed is not sent again.

        Args:
            check: False: leave what was not confirmed to the result instead of raising.

        If the job is interrupted or fails, an error in the log says how many were sent, confirmed
        and in doubt, as far as executors could tell.

        Raises:
            InvalidFanOut: see :attr:`facts`; nothing was sent.
            FanOutFailed: some rows are not confirmed, which the error's *result* names: with
                *fence* nothing of the run runs then. Or the fence was not sealed, or the run was
                committed before, with other rows.
            RecordsUnavailable: with *fence*, if the records are away; nothing was sent.
            NoRecords: with *fence*, if the app has no records; nothing was sent.
            pyspark.errors.PySparkException: the job failed, for a reason of the DataFrame's own.
        """
        spark = self._df.sparkSession
        connections = self.options.connections
        context = context_of(spark)
        slots = connections if context is None else context.defaultParallelism
        rate = self.options.max_rate
        job_id = uuid4().hex
        fence = Fence.of(self.options, self.facts, job_id)
        started = monotonic()
        # Each partition pays for a connection, and before that for a Python that encodes it. A rate
        # shuffles in between.
        encoded = self._encoded(self._df.coalesce(connections)).coalesce(connections)
        was_committed = fence is not None and fence.open().state == COMMITTED
        with LiveCounts(spark, job_id) as counts:
            job = SendJob(
                self.options.app,
                self.options.task,
                rate / min(connections, slots) if rate else None,
                fence,
                job_id,
                counts.address,
            )
            report = encoded.select(*SENT_COLUMNS).mapInArrow(sender(job), ANSWERS)
            try:
                answers = answers_of(report)
            except BaseException as exc:
                ended = "was interrupted" if isinstance(exc, KeyboardInterrupt) else "failed"
                then = fence.abort() if fence is not None else "what was sent stays sent"
                logger.error(
                    "native delay: run %s %s: %s; %s", self.run_id, ended, counts.stop(), then
                )
                raise
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        receipts.sort(key=lambda receipt: receipt.partition)
        seconds = monotonic() - started
        result = FanOutResult(self.run_id, seconds, receipts, failures, was_committed)
        warn_of_late_sending(result.sent_after_due, result.sent)
        if check and failures:
            then = (
                "what is not confirmed may be sent again with the same run_id, under the same ids"
            )
            if self.options.rate:
                then += (
                    ", and with eta='due' of ledger() instead of rate: it would let them fall due "
                    "in front of the others"
                )
            if fence is not None:
                then = f"{fence.abort()}; send all of it again with the same run_id"
            raise FanOutFailed(f"{result}; the first: {failures[0].reason}; {then}", result)
        if fence is not None:
            try:
                fence.commit(receipts, rows=rows_of(receipts))
            except FanOutFailed as exc:
                raise FanOutFailed(f"{result}; {exc}", result) from exc
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
    """Last line of a Python worker's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line and not line.startswith("at ")]
    return (named or lines or [type(error).__name__])[-1]
