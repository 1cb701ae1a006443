"""``reconcile``: each planned task gets one verdict, by its telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from pyspark.sql import DataFrame, SparkSession

from celery_native_delay import install
from celery_native_delay.app.installation import installation_of
from celery_native_delay.spark import read_events, reconcile
from celery_native_delay.worker.telemetry import FIELDS, Telemetry
from tests.documents import only

DUE = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)
NOW = DUE + timedelta(minutes=10)

Line = dict[str, Any]


def at(seconds: float) -> datetime:
    return DUE + timedelta(seconds=seconds)


def ended(outcome: str, start: float = 0.1, **more: Any) -> list[Line]:
    """The two lines of an attempt that started *start* seconds after its due time."""
    begin = {"started": at(start), "retries": 0, "worker": "w@one", "pid": 1} | more
    return [{**begin, "retry_due": None}, {**begin, "finished": at(start + 1), "outcome": outcome}]


def open_(start: float = 0.1, **more: Any) -> list[Line]:
    """The line of an attempt that has not ended."""
    return ended("", start, **more)[:1]


def noted(outcome: str, **more: Any) -> list[Line]:
    """The line of the worker's main process about a task that it lost or did not start."""
    return [
        {"finished": at(2), "outcome": outcome, "retries": 0, "worker": "w@one", "pid": 9} | more
    ]


#: Task to its verdict and the lines about it; all are due at DUE but for "later" and "young".
CASES: dict[str, tuple[str, list[Line]]] = {
    "done": ("ok", ended("success")),
    "nobody": ("missing", []),
    "without a due time": ("missing", []),
    "later": ("pending", []),
    "young": ("pending", []),
    "twice": ("duplicate", ended("success") + ended("success", 0.4, pid=2)),
    "twice at once": ("duplicate", ended("success") + ended("success", pid=2)),
    "twice failed": ("duplicate", ended("failure") + ended("failure", 9)),
    "lines twice": ("ok", ended("success") * 3),
    "too early": ("early", ended("success", -0.0011)),
    "early and open": ("early", open_(-60)),
    "rounded": ("ok", ended("success", -0.001)),
    "raised": ("failed", ended("failure")),
    "rejected": ("failed", ended("rejected")),
    "revoked": ("failed", noted("revoked")),
    "killed": ("failed", open_() + noted("lost")),
    "timed out": ("failed", open_() + noted("timeout", retries=None)),
    "timed out, and said so": ("failed", ended("lost") + noted("timeout") * 2),
    "ended by a cold shutdown": ("ok", ended("lost") + ended("success", 5, pid=2)),
    "at work": ("running", open_()),
    "at work again": ("running", ended("retry", retry_due=at(2)) + open_(2, retries=1)),
    "redelivered": ("ok", open_() + ended("success", 5, pid=2)),
    "redelivered, at work": ("running", open_() + open_(5, pid=2)),
    "requeued": ("ok", ended("requeued", retry_due=at(1)) + ended("success", 2)),
    "replaced": ("ok", ended("ignored") + ended("success", 3)),
    "retried": ("ok", ended("retry", retry_due=at(2)) + ended("success", 2, retries=1)),
    "retried after a kill": ("pending", open_() + ended("retry", 3, pid=2, retry_due=at(900))),
    "retry to come": ("pending", ended("retry", retry_due=at(900))),
    "retry within grace": ("pending", ended("retry", retry_due=at(541))),
    "retry that never came": ("missing", ended("retry", retry_due=at(2))),
    "in time": ("ok", ended("success", waited=True)),
    "sent late": ("ok", ended("success", 50, waited=False)),
    "retried late": (
        "ok",
        ended("retry", waited=True, retry_due=at(2)) + ended("success", 2, retries=1, waited=False),
    ),
    "not planned": ("unplanned", ended("success")),
}


@pytest.fixture(scope="module")
def ledger(spark: SparkSession) -> DataFrame:
    dues = {"later": at(3600), "young": at(541), "without a due time": None}
    names = [name for name in CASES if name != "not planned"]
    rows = [(name, dues.get(name, DUE), "mail", number) for number, name in enumerate(names)]
    rows.append(("done", at(3600), "mail", 99))  # the ledger was written twice
    return spark.createDataFrame(
        rows, "task_id string, due timestamp, queue string, `order.id` int"
    )


@pytest.fixture(scope="module")
def events(spark: SparkSession) -> DataFrame:
    rows = [
        tuple(({"id": name, "task": "remind", "queue": "post"} | line).get(key) for key in FIELDS)
        for name, (_, lines) in CASES.items()
        for line in lines
    ]
    return spark.createDataFrame(rows, ", ".join(f"{key} {kind}" for key, kind in FIELDS.items()))


@pytest.fixture(params=["UTC", "Australia/Lord_Howe"])
def zone(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[str]:
    name = "spark.sql.session.timeZone"
    before = spark.conf.get(name)
    spark.conf.set(name, request.param)
    yield request.param
    spark.conf.set(name, str(before))


@pytest.mark.usefixtures("zone")
def test_each_task_gets_one_verdict(ledger: DataFrame, events: DataFrame) -> None:
    result = reconcile(ledger, events, as_of=NOW)
    rows = result.verdicts.select("task_id", "verdict").collect()
    assert {row.task_id: row.verdict for row in rows} == {
        name: verdict for name, (verdict, _) in CASES.items()
    }
    assert len(rows) == len(CASES)


def test_a_verdict_shows_when_and_where(ledger: DataFrame, events: DataFrame) -> None:
    result = reconcile(ledger, events, as_of=NOW)
    assert result.verdicts.columns == [
        *ledger.columns,
        "verdict",
        "late_seconds",
        "sent_after_due",
        "ran",
    ]
    rows = {row.task_id: row for row in result.verdicts.drop("due").collect()}
    assert rows["nobody"].ran is None
    assert rows["nobody"].late_seconds is None
    assert rows["not planned"].queue is None
    row = rows["at work again"]
    assert row.late_seconds == 0.1
    assert (row.ran.worker, row.ran.queue, row.ran.outcome) == ("w@one", "post", "retry")
    assert (row.ran.retries, row.ran.attempts) == (1, 2)
    assert rows["redelivered"].ran.attempts == 2
    assert (rows["revoked"].ran.attempts, rows["revoked"].ran.started) == (0, None)
    late = {name: rows[name].sent_after_due for name in ("in time", "sent late", "retried late")}
    assert late == {"in time": False, "sent late": True, "retried late": False}
    assert rows["done"].sent_after_due is None, "nobody can tell"


def test_missing_tasks_can_be_sent_again(ledger: DataFrame, events: DataFrame) -> None:
    missing = reconcile(ledger, events, as_of=NOW).missing()
    assert missing.schema.simpleString() == ledger.schema.simpleString()
    expected = ledger.where("task_id in ('nobody', 'without a due time', 'retry that never came')")
    assert sorted(missing.collect(), key=str) == sorted(expected.collect(), key=str)


def test_grace_seconds_and_early_seconds_change_verdicts(
    ledger: DataFrame, events: DataFrame
) -> None:
    result = reconcile(ledger, events, as_of=NOW, grace_seconds=1, early_seconds=0.5)
    rows = result.verdicts.select("task_id", "verdict").collect()
    found = {row.task_id: row.verdict for row in rows}
    assert found["young"] == found["retry within grace"] == "missing"
    assert found["too early"] == "ok"
    assert found["early and open"] == "early"


def test_summaries(ledger: DataFrame, events: DataFrame, tmp_path: Path) -> None:
    """Tasks that were sent after they were due do not count as late."""
    result = reconcile(ledger, events, as_of=NOW).stored(str(tmp_path / "verdicts"))
    counts = result.counts()
    assert sum(counts.values()) == len(CASES)
    assert (counts["duplicate"], counts["unplanned"]) == (3, 1)
    (whole,) = result.summary().collect()
    assert {verdict: whole[verdict] for verdict in counts} == counts
    assert (whole.tasks, whole.late_p50, whole.late_max) == (len(CASES), 0.1, 0.1)
    assert whole.sent_after_due == 1
    by_queue = {row.queue: row for row in result.summary("queue", "worker").collect()}
    assert by_queue["mail"].tasks == 5  # those that never started
    assert by_queue["post"].missing == 1
    due = [row.tasks for row in result.summary("due", due_seconds=600).collect()]
    assert due == [2, len(CASES) - 3, 1]  # unplanned or without one, DUE, and "later"
    assert [row["order.id"] for row in result.summary("order.id").tail(1)] == [len(CASES) - 2]
    with pytest.raises(ValueError, match=r"expected some of task_id, due, .*, got quueue"):
        result.summary("quueue")


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("due", "timestamp_ntz", "expected a column due of type timestamp in the ledger, got time"),
        ("task_id", "bigint", "expected a column task_id of type string in the ledger, got bigint"),
        ("id", "string", "expected a column task_id of type string in the ledger, got id, "),
        ("verdict", "string", "expected a ledger without the columns verdict: rename them"),
    ],
)
def test_a_ledger_without_its_columns_is_refused(
    spark: SparkSession, events: DataFrame, column: str, kind: str, message: str
) -> None:
    columns = {"task_id": "string", "due": "timestamp"} | {column: kind}
    if column == "id":
        del columns["task_id"]
    schema = ", ".join(f"{name} {kind}" for name, kind in reversed(columns.items()))
    with pytest.raises(ValueError, match=message):
        reconcile(spark.createDataFrame([], schema), events)


def test_a_naive_as_of_is_refused(ledger: DataFrame, events: DataFrame) -> None:
    with pytest.raises(ValueError, match=r"expected as_of with a time zone, got .* tzinfo=UTC"):
        reconcile(ledger, events, as_of=NOW.replace(tzinfo=None))
    with pytest.raises(ValueError, match="a column id of type string in the events, got task_id"):
        reconcile(ledger, ledger)


def trace(telemetry_folder: Path, *task_ids: str) -> None:
    """Write telemetry of runs of *task_ids*."""
    app = install(Celery("shop", broker="memory://", set_as_current=False))

    @app.task(name="shop.remind", shared=False)
    def remind() -> None: ...

    run = build_tracer("shop.remind", app.tasks["shop.remind"], app=app)
    consumer = SimpleNamespace(hostname="w@one")
    telemetry = Telemetry(installation_of(app), consumer, str(telemetry_folder))  # type: ignore[arg-type]
    telemetry.connect()
    try:
        for task_id in task_ids:
            request = {"id": task_id, "retries": 0, "eta": DUE.isoformat(), "is_eager": False}
            run(task_id, (), {}, {**request, "delivery_info": {"routing_key": "post"}})
    finally:
        telemetry.disconnect()


def test_the_example_of_the_docs_reads_telemetry(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace(tmp_path / "telemetry" / "host-1", "a", "b")
    trace(tmp_path / "telemetry" / "host-2", "c")
    (half,) = (tmp_path / "telemetry" / "host-2").iterdir()
    half.write_text(half.read_text() + '\n{"id":"d","task":"shop.remind","wor')
    ledger = [(task_id, DUE, "post") for task_id in "abcde"]
    spark.createDataFrame(ledger, "task_id string, due timestamp, queue string").write.parquet(
        str(tmp_path / "ledger")
    )
    block = (
        only("spark-reconcile")
        .text.replace("/var/log/shop", str(tmp_path))
        .replace("/data", str(tmp_path))
    )
    names: dict[str, Any] = {"spark": spark}
    exec(block, names)
    assert "'ok': 3, 'missing': 2, 'pending': 0" in capsys.readouterr().out
    assert sorted(row.task_id for row in names["found"].missing().collect()) == ["d", "e"]
    events = read_events(spark, str(tmp_path / "telemetry"))
    assert {row.queue for row in events.collect()} == {"post"}
