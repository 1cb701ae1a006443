"""Compare planned tasks with the workers' telemetry, and give each task one verdict.

A task gets the first verdict of this table that fits:

========== ========================================================================
unplanned  a worker reported the task, and the ledger (planned tasks) lacks the task
duplicate  the task's function ended twice with the same ``request.retries``
early      the task started before it was due
ok         the task succeeded, or raised ``Ignore``
failed     the task failed, timed out, expired, was rejected or revoked, or its pool process died
running    a worker reported the task's start, and no end; the worker may have been killed
pending    the task (or its retry) is not due, or overdue by at most *grace_seconds*
missing    the task (or its retry) is overdue by more than *grace_seconds*, without a start
========== ========================================================================

Spark computes the verdicts only for an action, such as ``count()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from ..due_time import due_us
from ..worker.telemetry import ATTEMPT_KEY, COMES_AGAIN, DONE, FIELDS, GIVEN_UP, RAN_TO_ITS_END

VERDICTS = ("ok", "missing", "pending", "duplicate", "early", "failed", "running", "unplanned")

#: The columns that a verdict adds to the columns of the ledger.
ADDED = ("verdict", "late_seconds", "sent_after_due", "ran")

#: Celery rounds an ETA to milliseconds: a task that starts this much earlier is not early.
ROUNDING_SECONDS = 0.001

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999}

_NEVER_US = 1 << 62

#: Fields of the telemetry that are in only some of an attempt's lines.
_OF_AN_ATTEMPT = ("finished", "outcome", "queue", "retry_due", "waited")

#: Spark's default accuracy of 10,000 is too coarse for the p99.9 of millions of tasks.
_QUANTILE_ACCURACY = 100_000


def read_events(spark: SparkSession, path: str | list[str]) -> DataFrame:
    """Read the telemetry of workers (``native_delay_telemetry``) into a DataFrame.

    Args:
        spark: the session.
        path: the folder of the telemetry, or several folders. Subfolders are read, too.

    Returns:
        One row per start or end of an attempt to run a task, with the columns of
        ``celery_native_delay.worker.telemetry.FIELDS``. Incomplete JSON lines (from a full disk)
        are skipped.
    """
    schema = ", ".join(f"{name} {kind}" for name, kind in FIELDS.items())
    lines = spark.read.schema(schema).option("recursiveFileLookup", "true").json(path)
    return lines.where("id is not null and pid is not null")


def reconcile(
    ledger: DataFrame,
    events: DataFrame,
    *,
    as_of: datetime | None = None,
    grace_seconds: float = 60.0,
    early_seconds: float = ROUNDING_SECONDS,
) -> Reconciliation:
    """Compare planned tasks with the workers' telemetry, and give each task one verdict.

    Args:
        ledger: the planned tasks: ``task_id`` (string), ``due`` (timestamp), and any other columns.
            If a ``task_id`` has several rows, the earliest due time counts. A row without a due
            time is due at once.
        events: the telemetry, from :func:`read_events`. Tasks that are not in *ledger* get the
            verdict ``unplanned``. To exclude these tasks, filter *events* before the call, for
            example by the column ``task`` (the task's name).
        as_of: the time (an aware datetime) up to which *events* are complete. The default is the
            current time.
        grace_seconds: if no worker reports a task, the task is ``pending`` until this many seconds
            after its due time, and then ``missing``. Workers write telemetry with a delay.
        early_seconds: a start up to this many seconds before the due time is not ``early``,
            because clocks differ.

    Raises:
        ValueError: a column is missing or has the wrong type, *as_of* has no time zone, or
            *ledger* has a column that this function adds (``verdict``, ``late_seconds``,
            ``sent_after_due`` or ``ran``).
    """
    _check_columns("ledger", ledger, {"task_id": "string", "due": "timestamp"})
    _check_columns("events", events, FIELDS)
    if taken := [name for name in ledger.columns if name.lower() in ADDED]:
        raise ValueError(f"expected a ledger without the columns {', '.join(taken)}: rename them")
    as_of = datetime.now(UTC) if as_of is None else as_of
    if as_of.tzinfo is None:
        raise ValueError(f"expected as_of with a time zone, got {as_of!r}: add tzinfo=UTC")

    columns = ledger.columns
    row = F.min_by(F.struct(*map(_quoted, columns)), _micros("due", none=_NEVER_US))
    planned = ledger.repartition("task_id").groupBy("task_id").agg(row.alias("planned"))
    both = planned.join(_tasks(events), planned["task_id"] == F.col("id"), "full_outer")
    due = F.unix_micros("planned.due")
    late_us = F.unix_micros("first.started") - due
    overdue_us = due_us(as_of) - round(grace_seconds * 1e6)
    awaited_us = F.when(F.col("id").isNull(), _micros("planned.due", none=0)).otherwise(
        F.unix_micros("retry_due")
    )
    verdict = (
        F.when(F.col("planned").isNull(), "unplanned")
        .when(F.col("most_runs") > 1, "duplicate")
        .when(late_us < -round(early_seconds * 1e6), "early")
        .when(F.col("is_done"), "ok")
        .when(F.col("is_given_up"), "failed")
        .when(F.col("latest.is_open"), "running")
        .when(awaited_us < overdue_us, "missing")
        .otherwise("pending")
    )
    ran = F.struct(
        F.col("first.started").alias("started"),
        "finished",
        F.col("first.worker").alias("worker"),
        F.col("first.queue").alias("queue"),
        "outcome",
        "retries",
        "attempts",
    )
    kept = [F.col("planned").getField(name).alias(name) for name in columns if name != "task_id"]
    return Reconciliation(
        both.select(
            F.coalesce("task_id", "id").alias("task_id"),
            *kept,
            verdict.alias("verdict"),
            (late_us / 1e6).alias("late_seconds"),
            (~F.col("first.waited")).alias("sent_after_due"),
            F.when(F.col("id").isNotNull(), ran).alias("ran"),
        ),
        tuple(columns),
    )


@dataclass(frozen=True)
class Reconciliation:
    """One verdict per task, such as ``ok`` or ``missing``, and the counts of the verdicts.

    Every Spark action computes the verdicts again. To avoid this, call :meth:`stored`.
    """

    verdicts: DataFrame
    """One row per task: the ledger's columns, ``verdict``, ``late_seconds`` (of the first start),
    ``sent_after_due`` (null if unknown) and ``ran`` (null if no worker reported the task). ``ran``
    has ``started`` (first start), ``finished`` (last end), ``worker`` and ``queue`` of the first
    start, ``outcome`` of the last end, ``retries`` and ``attempts``."""
    ledger_columns: tuple[str, ...]

    def stored(self, path: str) -> Reconciliation:
        """Write the verdicts to *path* as Parquet; return a ``Reconciliation`` of these rows."""
        self.verdicts.write.partitionBy("verdict").parquet(path)
        stored = self.verdicts.sparkSession.read.parquet(path)
        columns = map(_quoted, self.verdicts.columns)
        return Reconciliation(stored.select(*columns), self.ledger_columns)

    def counts(self) -> dict[str, int]:
        """Return the number of tasks by verdict."""
        rows = self.verdicts.groupBy("verdict").agg(F.count("*").alias("tasks")).collect()
        found = {row["verdict"]: int(row["tasks"]) for row in rows}
        return {verdict: found.get(verdict, 0) for verdict in VERDICTS}

    def missing(self) -> DataFrame:
        """Return the ledger rows whose tasks have the verdict ``missing``.

        To send these tasks again with the same task ids, send the returned rows.
        """
        return self.verdicts.where("verdict = 'missing'").select(*map(_quoted, self.ledger_columns))

    def summary(self, *by: str, due_seconds: float = 3600.0) -> DataFrame:
        """Count the tasks by verdict, and compute quantiles of the tasks' lateness in seconds.

        The quantiles exclude tasks that were sent after their due time (column ``sent_after_due``),
        because no broker can deliver these tasks on time.

        Args:
            *by: columns to group by: ledger columns, ``"due"``, ``"queue"`` or ``"worker"``. By
                default, all tasks are one group. The queue and the worker come from the task's
                first start. If no worker started the task, the queue is the ledger's ``queue``.
            due_seconds: the length of each ``"due"`` group in seconds. The result shows the start
                of each group.
        """
        known = {name: F.col(_quoted(name)) for name in self.ledger_columns}
        queues = [F.col("ran.queue"), *([known["queue"]] if "queue" in known else [])]
        step_us = round(due_seconds * 1e6)
        known |= {
            "queue": F.coalesce(*queues),
            "worker": F.col("ran.worker"),
            "due": F.timestamp_micros(F.floor(F.unix_micros("due") / step_us) * step_us),
        }
        if unknown := [name for name in by if name not in known]:
            raise ValueError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        groups = self.verdicts.groupBy(*(known[name].alias(name) for name in by))
        in_time = F.when(~F.coalesce("sent_after_due", F.lit(False)), F.col("late_seconds"))
        late = F.percentile_approx(in_time, list(QUANTILES.values()), _QUANTILE_ACCURACY)
        counted = groups.agg(
            F.count("*").alias("tasks"),
            *(F.count_if(F.col("verdict") == verdict).alias(verdict) for verdict in VERDICTS),
            F.count_if("sent_after_due").alias("sent_after_due"),
            late.alias("late"),
            F.max(in_time).alias("late_max"),
        )
        shown = counted.select(
            *map(_quoted, by),
            "tasks",
            *VERDICTS,
            "sent_after_due",
            *(F.col("late")[place].alias(f"late_{name}") for place, name in enumerate(QUANTILES)),
            "late_max",
        )
        return shown.orderBy(*map(_quoted, by)) if by else shown


def _tasks(events: DataFrame) -> DataFrame:
    """Return one row per task; Spark shuffles the events only once, by task id."""
    attempts = (
        events.where("id is not null")
        .repartition("id")
        .groupBy(*ATTEMPT_KEY)
        .agg(*(F.max(name).alias(name) for name in _OF_AN_ATTEMPT))
    )
    started, ended = F.col("started").isNotNull(), F.col("outcome").isNotNull()
    runs = F.count_if(F.col("outcome").isin(*RAN_TO_ITS_END))
    tries = attempts.groupBy("id", "retries").agg(
        runs.alias("runs"),
        F.count_if(started).alias("attempts"),
        # A task that is redelivered after its process was killed has one attempt without an end.
        (F.count_if(started & ~ended) > F.count_if(~started & ended)).alias("has_open"),
        F.count_if(F.col("outcome").isin(*DONE)).alias("done"),
        F.count_if(F.col("outcome").isin(*GIVEN_UP)).alias("given_up"),
        F.min(F.when(started, F.struct("started", "worker", "queue", "waited"))).alias("first"),
        F.max(F.when(ended, F.struct("finished", "outcome", "retry_due"))).alias("last"),
    )
    is_open = (F.col("has_open") & (F.col("runs") == 0)).alias("is_open")
    return (
        tries.groupBy("id")
        .agg(
            F.max("runs").alias("most_runs"),
            F.sum("attempts").alias("attempts"),
            (F.sum("done") > 0).alias("is_done"),
            (F.sum("given_up") > 0).alias("is_given_up"),
            F.min("first").alias("first"),
            F.max("last").alias("last"),
            F.max(F.struct(F.coalesce("retries", F.lit(0)), is_open)).alias("latest"),
            F.max("retries").alias("retries"),
        )
        .select(
            "*",
            F.col("last.finished").alias("finished"),
            F.col("last.outcome").alias("outcome"),
            F.when(F.col("last.outcome").isin(*COMES_AGAIN), F.col("last.retry_due")).alias(
                "retry_due"
            ),
        )
        .drop("last")
    )


def _micros(name: str, *, none: int) -> Column:
    """Convert a timestamp column to microseconds since the epoch; a null becomes *none*."""
    return F.coalesce(F.unix_micros(name), F.lit(none))


def _check_columns(what: str, frame: DataFrame, expected: dict[str, str]) -> None:
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    for name, kind in expected.items():
        if types.get(name) != kind:
            came = f"got {types[name]}" if name in types else f"got {', '.join(types)}"
            raise ValueError(f"expected a column {name} of type {kind} in the {what}, {came}")


def _quoted(name: str) -> str:
    """Return the column *name* in backticks, because the name may have dots."""
    return "`" + name.replace("`", "``") + "`"
