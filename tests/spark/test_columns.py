"""The encoding of rows: task ids, due times, arguments and reasons of rejection."""

from __future__ import annotations

import doctest
import json
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql import types as t

from celery_native_delay import InvalidFanOut, Rate
from celery_native_delay.rates.line import Line
from celery_native_delay.spark import FanOut, ids, task_id_of
from celery_native_delay.spark.encode import Encoder, encoded
from celery_native_delay.spark.options import EPOCH, FanOutOptions
from celery_native_delay.spark.spreading import Spread

NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)
LONGEST_SECONDS = 90 * 86_400.0


def encode(df: Any, **options: Any) -> list[Any]:
    """The encoded rows, in their order."""
    whole = {"app": "shop:app", "task": "shop.remind", "run_id": "r", "now": NOW} | options
    frame = encoded(df, FanOutOptions(**whole), longest_seconds=LONGEST_SECONDS, keep=["row"])
    return frame.collect()  # type: ignore[no-any-return]


def eta(row: Any) -> datetime:
    return EPOCH + timedelta(microseconds=row.due_us)


def test_the_task_id_in_the_docs_is_right() -> None:
    """It must never change, because users keep ids of earlier releases."""
    assert doctest.testmod(ids) == (0, 1)


def test_a_task_id_depends_on_run_task_and_key_only(spark: Any) -> None:
    """Neither partitions nor time zones matter; ``task_id_of`` gives the same id without Spark."""
    keys = [
        (7, "plain", True, date(2026, 3, 29), NOW),
        (-1, 'é 🎉 % "quoted" \\', False, date(1999, 12, 31), datetime(1999, 1, 1, tzinfo=UTC)),
        (0, "", True, date(2026, 1, 1), NOW.astimezone(ZoneInfo("Asia/Kolkata"))),
    ]
    names = ["number", "text", "flag", "day", "at"]
    df = spark.createDataFrame(
        keys, "number long, text string, flag boolean, day date, at timestamp"
    )
    options: dict[str, Any] = {"countdown": f.lit(60), "id_cols": names}
    expected = {task_id_of("r", "shop.remind", *key) for key in keys}
    for rows in (df, df.repartition(3)):
        assert {row.task_id for row in encode(rows, **options)} == expected
    with pytest.raises(InvalidFanOut, match=r"with a time zone in the key.*add the zone"):
        task_id_of("r", "shop.remind", NOW.replace(tzinfo=None))
    others = [{"run_id": "s"}, {"task": "shop.charge"}, {"id_cols": ["text", "number"]}]
    for other in others:
        assert not expected & {row.task_id for row in encode(df, **options | other)}


def test_without_id_cols_the_task_id_depends_on_all_that_is_sent(spark: Any) -> None:
    df = spark.sql("select * from values (1, 5.0D), (1, 5.0D), (1, 6.0D), (2, 5.0D) as t(a, wait)")
    one, again = (
        [r.task_id for r in encode(df, countdown="wait", kwargs=["a"], now=now)]
        for now in (NOW, NOW + timedelta(days=1))
    )
    assert one == again
    assert one[0] == one[1]
    assert len(set(one)) == 3


def test_due_times_do_not_depend_on_time_zones_of_session_and_executors(spark: Any) -> None:
    """The zones of session and executors are neither UTC nor the due times' zone."""
    df = spark.sql("""select *, cast(text as timestamp_ntz) as naive from values
        ('2026-11-20 08:30:00', 'Europe/Berlin', '2026-11-20T07:30:00'),
        ('2026-10-25 02:30:00', 'Europe/Berlin', null),
        ('2026-11-01 01:30:00.250', 'Asia/Kolkata', '2026-10-31T20:00:00.25'),
        ('2026-12-01T00:00:00', 'America/New_York', '2026-12-01T05:00:00')
        as t(text, zone, utc)""")
    for options in (
        {"eta": "text", "eta_zone": f.col("zone")},
        {"eta": "naive", "eta_zone": f.col("zone")},
        {"eta": f.expr("cast(concat(text, ' ', zone) as timestamp)")},
    ):
        for row in encode(df, **options):
            assert row.error is None
            if row.row.utc:
                assert eta(row) == datetime.fromisoformat(row.row.utc).replace(tzinfo=UTC)
    (row,) = encode(df.limit(1), eta="text", eta_zone="UTC")
    assert eta(row) == datetime(2026, 11, 20, 8, 30, tzinfo=UTC)
    offsets = spark.sql(
        "select explode(array('2026-11-20T08:30:00+02:00', '2026-11-20 06:30:00Z')) e"
    )
    for row in encode(offsets, eta="e", eta_zone="Asia/Tokyo"):
        assert eta(row) == datetime(2026, 11, 20, 6, 30, tzinfo=UTC)


def test_all_countdowns_count_from_the_same_time(spark: Any) -> None:
    df = spark.sql("select explode(array(0, 0.25, 3600, 1e6)) as wait")
    for kind in ("double", "decimal(12,3)"):
        rows = encode(df.withColumn("wait", f.col("wait").cast(kind)), countdown="wait")
        expected = [NOW + timedelta(seconds=n) for n in (0, 0.25, 3600, 1e6)]
        assert list(map(eta, rows)) == expected


def test_the_smear_of_a_task_depends_on_its_id(spark: Any) -> None:
    df = spark.range(2_000)
    options: dict[str, Any] = {"countdown": f.lit(60), "id_cols": ["id"], "smear": 10}
    due = NOW.timestamp() * 1_000_000 + 60_000_000
    later = {row.task_id: row.due_us - due for row in encode(df, **options)}
    assert later == {r.task_id: r.due_us - due for r in encode(df.repartition(3), **options)}
    assert 0 <= min(later.values()) < 500_000
    assert 9_500_000 < max(later.values()) < 10_000_000


def test_arguments_are_sent_as_json(spark: Any) -> None:
    """Also nulls; text is not escaped; whole numbers keep all digits."""
    df = spark.sql("""select 9007199254740993L as big, 0.1D as tenth, cast(null as string) as none,
        'é "x" \\\\ \\n /' as text, true as yes, array(1, null) as list,
        map('a', cast(0.1 as float)) as table,
        named_struct('inner', named_struct('deep', cast(null as int))) as tree""")
    (row,) = encode(
        df,
        countdown=f.lit(1),
        args=["big", "text", f.lit(None), "list"],
        kwargs={"tenth": "tenth", "none": "none", "yes": f.col("yes"), "m": "table", "t": "tree"},
    )
    args, kwargs = json.loads(row.body)
    assert args == [9007199254740993, 'é "x" \\ \n /', None, [1, None]]
    assert kwargs == {
        **{"tenth": 0.1, "none": None, "yes": True, "m": {"a": 0.1}},
        "t": {"inner": {"deep": None}},
    }
    (row,) = encode(df, countdown=f.lit(1))
    assert json.loads(row.body) == [[], {}]


def test_bad_rows_are_rejected_with_a_reason_and_other_rows_are_sent(spark: Any) -> None:
    df = spark.sql("""select * from values
        (1, 60D, 1.0D, array(1D), 'ok', 5, 90D),
        (null, 60D, 1D, array(1D), 'id_cols[0] (column \\'key\\') is null', 5, null),
        (3, null, 1D, array(1D), 'no due time', 5, null),
        (4, double('NaN'), 1D, array(1D), 'countdown (column \\'wait\\') is NaN', 5, null),
        (5, double('-Infinity'), 1D, array(1D), 'is NaN or infinite', 5, null),
        (6, -1D, 1D, array(1D), 'the due time has passed', 5, null),
        (7, 1e7D, 1D, array(1D), 'beyond the longest delay of 90 d', 5, null),
        (8, 1e300D, 1D, array(1D), 'beyond the longest delay', 5, null),
        (9, 60D, double('NaN'), array(1D), '(column \\'price\\') is NaN', 5, null),
        (10, 60D, 1D, array(1D, double('Infinity')), 'kwargs[\\'prices\\']', 5, null),
        (11, 60D, 1D, array_repeat(1D, 500), 'more than 1,000 bytes', 5, null),
        (12, 60D, 1D, array(1D), 'the priority', 256, null),
        (13, 60D, 1D, array(1D), 'it expires', 5, 60D),
        (14, 60D, null, null, 'ok', null, null)
        as t(key, wait, price, prices, expected, priority, expires)""")
    rows = encode(
        df,
        countdown="wait",
        kwargs=["price", "prices"],
        id_cols=["key"],
        max_body_bytes=1_000,
        priority="priority",
        expires="expires",
    )
    assert len(rows) == 14
    for row in rows:
        assert row.row.expected in (row.error or "ok"), row
        assert (row.error is None) == (row.row.expected == "ok")
        assert (row.due_us is None) == (row.body is None) == (row.error is not None)
    now_us = round(NOW.timestamp() * 1_000_000)
    assert [row.expires_us for row in rows if not row.error] == [now_us + 90_000_000, None]
    late = encode(df.where("key = 6"), countdown="wait", past="send")[0]
    assert (late.error, late.due_us) == (None, now_us - 1_000_000)
    texts = spark.sql("""select explode(array('soon', '2026-13-01 00:00:00', '', null,
        '2026-12-01T08:00:00 Mars/Olympus')) as eta""")
    nulls = spark.sql("select cast(null as timestamp) as eta")
    for row in (*encode(texts, eta="eta", eta_zone="Europe/Berlin"), *encode(nulls, eta="eta")):
        assert row.error == "no due time, or none that can be read"


def test_rejected_rows_may_be_sent_again_with_their_reason(
    spark: Any, make_app: Callable[..., str]
) -> None:
    df = spark.sql("select 7 as number, null as wait, 'earlier' as _Error")
    again = FanOut(
        df.selectExpr("number", "double(wait) as wait", "_Error"),
        app=make_app("amqp://127.0.0.1:1"),
        task="shop.remind",
        countdown="wait",
    )
    found = again.rejected()
    assert found.columns == ["number", "wait", "_error"]
    assert found.first()._error == "no due time, or none that can be read"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either eta= or countdown="),
        ({"eta": "at", "countdown": "wait"}, "got both"),
        ({"eta": "when"}, "expected eta to be a column of this DataFrame .*at.*got column 'when'"),
        ({"eta": "naive"}, "eta_zone"),
        ({"eta": "text"}, r"expected eta \(column 'text'\).*eta_zone=.*got string"),
        ({"eta": "day"}, "expected eta .* a timestamp, got date"),
        ({"eta": "text", "eta_zone": "Berlin"}, "Europe/Berlin"),
        ({"countdown": "text"}, "a number of seconds, got string"),
        ({"countdown": "wait", "eta_zone": "UTC"}, "a countdown has no zone"),
        ({"countdown": "wait", "kwargs": ["price"]}, "cast decimals to string"),
        ({"countdown": "wait", "args": ["at"]}, "date_format"),
        ({"countdown": "wait", "args": [f"array({c})" for c in ("at",)]}, "args"),
        ({"countdown": "wait", "kwargs": "text"}, "kwargs to be a list"),
        ({"countdown": "wait", "kwargs": {"not an argument": "text"}}, "arguments"),
        ({"countdown": "wait", "args": ["same"]}, "fields all have names of their own"),
        ({"countdown": "wait", "args": ["a.b"]}, "got column 'a.b'.*write '`a.b`' with backticks"),
        ({"countdown": "wait", "args": ["twice"]}, "may be any of twice, twice: rename or drop"),
        ({"countdown": "wait", "kwargs": ["name"]}, "may be any of Name, name: rename or drop"),
        ({"countdown": "wait", "id_cols": ["wait"]}, "cast it, got double"),
        ({"countdown": "wait", "queue": "emails"}, "or lit.'emails'. for all rows"),
        ({"countdown": "wait", "priority": "text"}, "a whole number"),
        ({"countdown": "wait", "app": "shop.app"}, "pkg.mod:app"),
        ({"countdown": "wait", "run_id": "a\ud800"}, "expected run_id to be"),
        ({"countdown": "wait", "smear": -1}, "expected smear to be"),
        ({"countdown": "wait", "connections": 0}, "from 1 to 1000, got 0"),
        ({"countdown": "wait", "max_rate": 0}, "tasks per second"),
        ({"countdown": "wait", "past": "drop"}, "reject"),
        ({"countdown": "wait", "now": datetime(2026, 1, 1)}, "aware"),
        ({"countdown": "wait", "prioritty": "text"}, "among .*priority.*prioritty"),
        ({"countdown": "wait", "rate": "often"}, "expected a rate such as.*True for that of"),
        ({"countdown": "wait", "rate": "1/s", "smear": 5}, "either rate= or smear="),
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(
    spark: Any, options: dict[str, Any], message: str
) -> None:
    df = spark.sql("""select timestamp'2026-12-01' as at, timestamp_ntz'2026-12-01' as naive,
        date'2026-12-01' as day, '2026' as text, 1.5D as wait, 1.10BD as price,
        named_struct('a', 1, 'a', 2) as same, 1 as twice, 2 as twice, 3 as Name, 4 as name,
        5 as `a.b`""")
    with pytest.raises(InvalidFanOut, match=message):
        FanOut(df, **{"app": "shop:app", "task": "shop.remind"} | options)


def test_a_column_in_the_wrong_case_is_refused_if_spark_is_case_sensitive(spark: Any) -> None:
    df = spark.sql("select 1.5D as Wait, 7 as Number")
    right = {"app": "shop:app", "task": "shop.remind", "countdown": "Wait", "kwargs": ["Number"]}
    wrong: list[dict[str, Any]] = [{"countdown": "wait"}, {"kwargs": {"number": f.col("number")}}]
    for options in wrong:
        FanOut(df, **right | options)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        FanOut(df, **right)
        for options in wrong:
            with pytest.raises(InvalidFanOut, match=r"a column of this DataFrame .Wait, Number."):
                FanOut(df, **right | options)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_row_with_text_that_is_no_utf8_is_rejected(spark: Any) -> None:
    """Spark itself would send U+FFFD. Other rows of the batch are sent."""
    df = spark.sql("""select id, cast(if(id = 2, X'FF41', encode('é', 'UTF-8')) as string) as text,
        '2026-12-01 08:00:00' as eta from range(0, 4, 1, 1)""")
    whole: dict[str, Any] = {"eta": "eta", "eta_zone": "UTC", "id_cols": ["id"]}
    nested = f.create_map(f.lit("a"), f.array(f.struct("text")))
    for name, options in {
        "args[0] (column 'text')": {"args": ["text"]},
        "kwargs['a'] (Column": {"kwargs": {"a": nested}},
        "id_cols[0] (column 'text')": {"id_cols": ["text"]},
        "queue (column 'text')": {"queue": "text"},
        "eta (Column": {"eta": f.when(f.col("id") == 2, f.col("text")).otherwise(f.col("eta"))},
    }.items():
        rows = encode(df, **whole | options)
        assert [row.error is None for row in rows] == [True, True, False, True], name
        assert rows[2].error.startswith(name)
        assert rows[2].error.endswith("is not valid UTF-8")
    (row,) = encode(df.where("id = 1"), **whole, kwargs={"a": nested})
    assert json.loads(row.body) == [[], {"a": {"a": [{"text": "é"}]}}]


@pytest.mark.parametrize(
    ("kind", "values"),
    [("string", ["é", "", "x" * 300, None]), ("long", [7, -1]), ("boolean", [True, False])],
    ids=str,
)
def test_the_rate_key_of_a_row_is_the_one_that_workers_compute(
    kind: str, values: list[Any]
) -> None:
    rate = Rate("1/s", key="tenant")
    options = FanOutOptions(app="shop:app", task="t", countdown="wait", kwargs=["tenant"])
    types = {"due_in": t.LongType(), "kwarg0": t.StructType().add("a", kind)["a"].dataType}
    encoder = Encoder(options, types, longest_seconds=LONGEST_SECONDS)
    columns = [pa.array([60] * len(values)), pa.array(values)]
    sent = [json.loads(row[2]) for row in encoder.rows(columns, "r")]
    at_workers = [rate.key_of(args, kwargs, {}) for args, kwargs in sent]
    assert encoder.texts(columns, "kwarg0") == at_workers


@pytest.mark.parametrize("rate", [Rate("10/s"), Rate("100/m", burst=10)], ids=str)
def test_with_a_rate_tasks_fall_due_when_workers_may_start_them(spark: Any, rate: Rate) -> None:
    """Each may start when it is due, and has the same due time if it is sent again.

    Rows that are rejected, due long ago, or due later than all others are among them.
    """
    df = spark.range(600).selectExpr(
        "id", "concat('t', id % 3) as tenant",
        "case when id % 11 = 0 then null when id % 13 = 0 then -500.0D when id < 500 then 1.0D "
        "else id * 3.0D end as wait",
    )  # fmt: skip
    options = FanOutOptions(
        app="shop:app", task="shop.call", run_id="r", now=NOW, past="send",
        countdown="wait", kwargs=["id", "tenant"], id_cols=["id"],
    )  # fmt: skip
    spread = Spread.of(rate, "kwarg1")
    given: dict[str, Any] = {"longest_seconds": LONGEST_SECONDS, "spread": spread, "keep": ["row"]}
    rows = encoded(df, options, **given).where("error is null").collect()
    again = encoded(df.repartition(5), options, **given).where("error is null").collect()
    assert {row.task_id: row.due_us for row in rows} == {row.task_id: row.due_us for row in again}
    assert len(rows) == len([n for n in range(600) if n % 11])
    lines: dict[str, Line] = defaultdict(Line)
    for row in sorted(rows, key=lambda row: row.due_us):
        assert row.due_us >= options.now_us + row.row.wait * 1_000_000
        tenant, now_us = row.row.tenant, max(row.due_us, options.now_us)
        lines[tenant], turn = lines[tenant].ask(rate, now_us, None)
        assert turn.starts
    backlog = [row.due_us for row in rows if row.row.wait <= 1 and row.row.tenant == "t0"]
    allowed = (max(backlog) - min(*backlog, options.now_us)) / rate.period_us * rate.count
    assert len(backlog) >= 0.97 * allowed


def test_the_column_of_a_rates_key_is_found(spark: Any, make_app: Callable[..., str]) -> None:
    """By name or position, for the app's rate and for a given rate."""
    df = spark.range(5).selectExpr("id", "1.0D as wait")
    rate = {"limit": "10/s", "key": "text", "burst": 2}
    app = make_app("amqp://127.0.0.1:1", rates={"shop.remind": rate})

    def spread(**options: Any) -> Spread | None:
        whole = {"app": app, "task": "shop.remind", "countdown": "wait", "rate": True} | options
        return FanOut(df, **whole).facts.spread

    assert spread(kwargs={"number": "id", "text": "id"}) == Spread(102_010, 2, "kwarg1")
    assert spread(args=["id", "id"]) == Spread(102_010, 2, "arg1")
    assert spread(args=["id"]) == Spread(102_010, 2, None)
    assert spread(args=["id"], rate="10/s") == Spread(102_010, 1, None)
    assert spread(args=["id"], rate=None) is None
    plain = make_app("amqp://127.0.0.1:1")
    elsewhere = {"task": "other", "check_task": False, "args": ["id"]}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"app": plain}, "native_delay_rates has none: add it there"),
        ({"rate": Rate("1/s", key="nombre")}, "one of its arguments, number, text, extra"),
        ({"rate": Rate("1/s", key=lambda *_: 1)}, "name of an argument.*a function"),
        (elsewhere | {"rate": Rate("1/s", key="id")}, "among kwargs .none"),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidFanOut, match=message):
            spread(**options)


def test_a_row_that_a_rate_delays_for_too_long_is_rejected(spark: Any) -> None:
    df = spark.range(3).selectExpr("id", "60.0D as wait", "70.0D as until")
    options = FanOutOptions(
        app="shop:app", task="shop.call", now=NOW, countdown="wait", kwargs=["id"], expires="until"
    )
    spread = Spread.of(Rate("8/m"), None)
    rows = encoded(df, options, longest_seconds=90.0, spread=spread).collect()
    assert sorted(row.error or "" for row in rows) == ["", "", "it expires before it is due"]
    rows = encoded(df, options, longest_seconds=62.0, spread=spread).collect()
    late = "the due time is beyond the longest delay of 1 min 2 s"
    assert sorted(row.error or "" for row in rows)[1:] == [late, late]


def test_a_plan_counts_rows_rejects_queues_and_due_times(
    spark: Any, make_app: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan needs no broker. It warns of rows that differ each time."""
    df = spark.range(3_000).selectExpr(
        "id", "id % 2500 as number", "if(id % 7 = 0, null, id % 300 + 0.3D) as wait",
        "if(id % 3 = 0, 'vip', null) as queue",
    )  # fmt: skip
    fan_out = FanOut(
        df,
        app=make_app("amqp://127.0.0.1:1", levels=20, rates={"shop.remind": "10/s"}),
        task="shop.remind",
        countdown="wait",
        kwargs=["number"],
        queue="queue",
        id_cols=["number"],
    )
    plan = fan_out.plan()
    sent = [n for n in range(3_000) if n % 7]
    assert (plan.rows, plan.accepted) == (3_000, len(sent))
    assert plan.rejects == {"no due time, or none that can be read": 3_000 - len(sent)}
    assert plan.duplicates == len(sent) - len({n % 2_500 for n in sent})
    assert plan.queues == {
        "vip": len([n for n in sent if n % 3 == 0]),
        "plain": len([n for n in sent if n % 3]),
    }
    assert plan.last_due - plan.first_due == timedelta(seconds=299)
    assert "have the task id of another row" in str(plan)
    assert fan_out.rejected().count() == 3_000 - len(sent)
    assert fan_out.rejected().columns == [*df.columns, "_error"]
    assert "differ each time" not in caplog.text
    volatile = df.withColumn("number", f.expr("uuid()"))
    other = FanOut(volatile, app=fan_out.options.app, task="shop.remind", countdown="wait")
    for _ in range(2):
        other.rejected()
    assert caplog.text.count("differ each time Spark computes them") == 1
