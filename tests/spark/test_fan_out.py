"""FanOut on a real Spark and a real RabbitMQ."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from time import time_ns
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from celery import Celery
from pyspark.sql import functions as f

from celery_native_delay import Delay, FanOutFailed, InvalidFanOut, install
from celery_native_delay.spark import FanOut, task_id_of
from celery_native_delay.spark.app import Call, describe
from celery_native_delay.spark.sending import Receipt, SendJob, send_rows
from celery_native_delay.testing import private_rabbitmq
from celery_native_delay.transports import outbox
from tests.brokers import installed_rabbitmq
from tests.integration import redis_traffic
from tests.integration.redis_traffic import promoting
from tests.integration.traffic import Arrival, inbox
from tests.spark.conftest import LEVELS
from tests.waiting import PATIENCE_SECONDS, wait_until

MakeApp = Callable[..., str]


def number_of(arrival: Arrival) -> int:
    args, kwargs, _ = arrival.body
    return int(args[0] if args else kwargs["number"])


def reminders(df: Any, app: str, **options: Any) -> FanOut:
    """A fan-out of tasks that are due in a minute; the first column has their numbers."""
    given = {"countdown": f.lit(60), "kwargs": {"number": df.columns[0]}}
    return FanOut(df, app=app, task="shop.remind", **given | options)


@pytest.mark.ci
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_five_thousand_tasks_arrive_once_and_never_early_in_their_queues(
    spark: Any, make_app: MakeApp, request: pytest.FixtureRequest, broker: str
) -> None:
    """Due times in two zones, executors in a third one, and some bad rows."""
    url = request.getfixturevalue(f"native_delay_{broker}_url")
    delaying = partial(redis_traffic.delaying, url, namespace="tests")
    promotes = promoting(delaying) if broker == "redis" else nullcontext()
    count = 5_000
    begin_us = time_ns() // 1000 + 15_000_000
    etas = (
        spark.range(count, numPartitions=3)
        .selectExpr(
            "id as number",
            "id % 1000 != 999 as good",
            f"timestamp_micros({begin_us}) + make_dt_interval(0, 0, 0, id % 50 / 10) as at",
            "if(id % 2 = 0, 'plain', 'vip') as queue",
            "if(id % 3 = 0, 'Asia/Kolkata', 'Europe/Berlin') as zone",
            "concat('é ', id) as text",
        )
        .withColumn(
            "eta",
            f.expr("if(good, cast(convert_timezone(zone, to_timestamp_ntz(at)) as string), null)"),
        )
    )
    fan_out = FanOut(
        etas,
        app=make_app(url, levels=12),
        task="shop.remind",
        eta="eta",
        eta_zone=f.col("zone"),
        args=["number"],
        kwargs=["text"],
        queue="queue",
        id_cols=["number"],
        past="send",  # on a busy machine some are due before they are sent
    )
    result = fan_out.send()
    good = [n for n in range(count) if n % 1000 != 999]
    assert result.rejects == {"no due time, or none that can be read": count // 1000}
    assert (result.rows, result.confirmed, result.failures) == (count, len(good), [])
    with promotes, inbox(url, "plain", "vip") as letters:
        came = letters.wait_for(len(good))
    assert sorted(map(number_of, came)) == good
    for arrival in came:
        number, headers = number_of(arrival), arrival.message.headers
        assert arrival.queue == ("plain", "vip")[number % 2]
        assert headers["id"] == task_id_of(fan_out.run_id, "shop.remind", number)
        assert arrival.body[1] == {"text": f"é {number}"}
        assert arrival.at >= datetime.fromisoformat(headers["eta"]).timestamp()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"app": "nowhere.at_all:app"}, "importable.*No module named 'nowhere'.*pyFiles"),
        ({"app": "os.path:join"}, "to be a Celery app, got function"),
        ({"app": "tests.spark.plain_app:app"}, "celery_native_delay.install"),
        ({"app": "tests.spark.needy_app:app"}, "set spark.executorEnv.SHOP_BROKER_URL"),
        ({"task": "shop.remynd"}, "registers .*shop.remind.*, got 'shop.remynd'"),
        ({"kwargs": {"nombre": "id"}}, "that task 'shop.remind' takes.*nombre"),
        ({"queue": f.lit}, r"configuration names .plain, vip.*got emails.*task_queues"),
    ],
    ids=["missing", "no app", "not installed", "variable", "task", "arguments", "queue"],
)
def test_a_wrong_app_task_argument_or_queue_is_one_error_before_sending(
    spark: Any, make_app: MakeApp, options: dict[str, Any], message: str
) -> None:
    """No broker is needed: none listens on that port."""
    if "queue" in options:
        options = {"queue": f.when(f.col("id") == 9, "emails").otherwise("vip")}
    defaults = {"app": make_app("amqp://127.0.0.1:1"), "task": "shop.remind"}
    fan_out = FanOut(spark.range(10), countdown=f.lit(5), **defaults | options)
    with pytest.raises(InvalidFanOut, match=message):
        fan_out.send()


def test_queues_of_every_kind_of_route_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    app = install(Celery("shop", broker="redis://127.0.0.1:1", set_as_current=False))
    app.conf.task_routes = (
        {"shop.*": "reminders", "bill.*": {"queue": "bills"}, re.compile("x"): {"queue": "xs"}},
        {"mail.send": "mails", "mail.open": {"priority": 3}},
        [("hook.*", {"queue": "hooks"})],
        lambda name, *_, **__: None,
    )

    @app.task(name="shop.remind", shared=False)
    def remind() -> None: ...

    monkeypatch.setitem(sys.modules, "routed_shop", SimpleNamespace(app=app))
    facts = describe(Call("routed_shop:app", "shop.remind", 0, (), check_task=True))
    assert facts.route == "reminders"
    assert set(facts.queues) == {"celery", "reminders", "bills", "xs", "mails", "hooks"}


def test_unknown_tasks_and_queues_are_allowed_without_checks(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    result = FanOut(
        spark.range(10),
        app=make_app(native_delay_rabbitmq_url),
        task="elsewhere.task",
        countdown=f.lit(1),
        kwargs=["id"],
        queue=f.lit("elsewhere"),
        check_task=False,
        check_queue=False,
        expires=f.lit(60),
        priority=f.lit(3),
        max_rate=100.0,
    ).send()
    assert result.confirmed == 10
    with inbox(native_delay_rabbitmq_url, "elsewhere") as letters:
        came = letters.wait_for(10)
    assert {a.message.headers["task"] for a in came} == {"elsewhere.task"}
    assert {a.message.properties["priority"] for a in came} == {3}
    for arrival in came:
        eta, expires = (
            datetime.fromisoformat(arrival.message.headers[n]) for n in ("eta", "expires")
        )
        assert (expires - eta).total_seconds() == 59


def test_small_partitions_share_a_connection(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    """With any number of partitions; and no more connections than slots, else rows would wait."""
    app, df = make_app(native_delay_rabbitmq_url), spark.range(60, numPartitions=60)
    result = reminders(df, app, connections=3).send()
    assert (result.confirmed, len(result.receipts)) == (60, 2)


def test_max_rate_is_kept_and_shared_by_all_connections(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    """Also if the rows come in one partition: each of two slots sends half."""
    app, df = make_app(native_delay_rabbitmq_url), spark.range(200, numPartitions=1)
    receipts = reminders(df, app, max_rate=100).send().receipts
    assert sum(receipt.sent for receipt in receipts) == 200
    assert min(receipt.sent for receipt in receipts) > 0
    for receipt in receipts:
        assert receipt.sent <= 50 * (receipt.seconds + 0.2) + 1


def test_slots_that_a_cluster_gains_while_a_job_starts_do_not_exceed_max_rate(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many connections send as share the rate."""
    slots = iter((1, 2, 4))
    monkeypatch.setattr(FanOut, "_senders", property(lambda _: next(slots)))
    app, df = make_app(native_delay_rabbitmq_url), spark.range(60, numPartitions=4)
    (receipt,) = reminders(df, app, max_rate=100).send().receipts
    assert receipt.sent == 60 <= 100 * (receipt.seconds + 0.2) + 1


TENANT = """
import celery

class Task(celery.Task):
    def apply_async(self, args=None, kwargs=None, **options):
        headers = {**(options.pop("headers", None) or {}), "tenant": kwargs["number"] % 7}
        return super().apply_async(args, kwargs, headers=headers, **options)
"""


def test_each_task_has_the_header_of_its_own_apply_async(
    spark: Any, make_app: MakeApp, apps_folder: Path, native_delay_rabbitmq_url: str
) -> None:
    """The app has its own task class, which adds a header."""
    name = make_app(native_delay_rabbitmq_url)
    module = apps_folder / f"{name.partition(':')[0]}.py"
    source = module.read_text().replace("set_as_current", "task_cls=Task, set_as_current")
    module.write_text(TENANT + source)
    df = spark.range(40, numPartitions=2).selectExpr("id as number")
    fan_out = reminders(df, name, countdown=f.lit(1))
    result = fan_out.send()
    assert result.confirmed == 40
    assert sum(receipt.by_template for receipt in result.receipts) == 0
    with inbox(native_delay_rabbitmq_url, "plain") as letters:
        came = letters.wait_for(40)
    tenants = {number_of(each): each.message.headers["tenant"] for each in came}
    assert tenants == {number: number % 7 for number in range(40)}


@pytest.mark.ci
def test_restarts_and_a_memory_alarm_of_the_broker_lose_no_task(
    spark: Any, make_app: MakeApp
) -> None:
    """Python workers survive a restart between jobs; during an outage the job waits."""
    installed_rabbitmq()
    with private_rabbitmq(management=False) as broker:
        app = make_app(broker.url, levels=16)
        df = spark.range(2_000).selectExpr("id as number")

        def send(run_id: str, **options: Any) -> None:
            options |= {"countdown": f.lit(600), "id_cols": ["number"], "run_id": run_id}
            result = reminders(df, app, **options).send()
            assert result.confirmed == 2_000
            # All but what each partition learns from.
            assert sum(receipt.by_template for receipt in result.receipts) > 1_000

        send("first")
        broker.stop()
        broker.start()
        send("second")

        def waiting() -> int:
            listed = broker.rabbitmqctl("list_queues", "messages", "--silent", "--no-table-headers")
            return sum(int(line) for line in listed.split() if line.isdigit())

        before = waiting()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(send, "third", max_rate=80.0)
            wait_until(lambda: waiting() > before)
            broker.rabbitmqctl("set_vm_memory_high_watermark", "absolute", "1MB")
            assert not job.done()
            broker.rabbitmqctl("set_vm_memory_high_watermark", "0.4")
            assert not job.done()
            broker.stop()
            broker.start()
            job.result(timeout=PATIENCE_SECONDS)
        wait_until(lambda: waiting() >= 6_000)  # quorum queues report their counts later


@pytest.mark.parametrize("broker", ["redis", "store"])
def test_waiting_tasks_have_the_planned_due_times(
    spark: Any, make_app: MakeApp, request: pytest.FixtureRequest, tmp_path: Path, broker: str
) -> None:
    """On brokers that show due times; executors share the file of a store."""
    url = f"sqla+sqlite:///{tmp_path}/shop.db"
    if broker == "redis":
        url = request.getfixturevalue("native_delay_redis_url")
    df = spark.range(2_000).selectExpr("id as number", "if(id % 100 = 99, null, 500 + id) as wait")
    fan_out = reminders(df, make_app(url, levels=20), countdown="wait", id_cols=["number"])
    result = fan_out.send()
    assert (result.confirmed, result.rejected, result.failures) == (1_980, 20, [])
    app = install(Celery("shop", broker=url, set_as_current=False), **LEVELS)
    due_us = [row.due_us for row in fan_out.encoded.collect() if not row.error]
    assert sorted(task.due_us for task in Delay(app).ls(limit=2_000)) == sorted(due_us)


def test_tasks_sent_after_they_are_due_are_planned_counted_and_logged(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At 5 rows/s 60 rows take 12 s; most of the 40 that are due in 3 s are too late."""
    df = spark.range(60, numPartitions=1).selectExpr(
        "id as number", "if(id % 3 = 0, 200, 3) as wait"
    )
    app = make_app(native_delay_rabbitmq_url, levels=16)
    fan_out = reminders(df, app, countdown="wait", max_rate=5.0, connections=1)
    plan = fan_out.plan()
    assert (plan.send_seconds, plan.due_while_sending) == (12, 40)
    assert "warning: 40 fall due within the 12.0 s that sending takes at 5 tasks/s" in str(plan)
    with caplog.at_level("WARNING", logger="celery_native_delay.spark.sending"):
        result = fan_out.send()
    assert (result.confirmed, result.failures) == (60, [])
    assert 20 <= result.sent_after_due <= 40
    assert f"; {result.sent_after_due} were sent after they were due" in str(result)
    assert f"{result.sent_after_due} of 60 tasks were sent after they were due" in caplog.text
    caplog.clear()
    in_time = reminders(df, app, countdown=f.lit(1000))
    assert (in_time.plan().due_while_sending, "warning" in str(in_time.plan())) == (0, False)
    result = in_time.send()
    assert (result.sent_after_due, "due" in str(result)) == (0, False)
    assert not [each for each in caplog.records if each.name.endswith(".sending")]


@pytest.mark.parametrize(
    ("url", "said"),
    [("amqp://127.0.0.1:1", "refused"), ("sqla+sqlite:////nowhere/shop.db", "StoreUnavailable")],
    ids=["rabbitmq", "store"],
)
def test_during_an_outage_each_unsent_row_is_a_failure(
    make_app: MakeApp, apps_folder: Any, monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    """The function of executors, with a shorter patience."""
    monkeypatch.syspath_prepend(str(apps_folder))
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 0.5)
    app = make_app(url)
    due_us = time_ns() // 1000 + 3_600_000_000
    body = json.dumps([[1], {}])
    rows: list[Any] = [(f"id-{n}", due_us, body, None, None, None, None) for n in range(5)]
    rows.insert(2, ("id-bad", None, None, None, None, None, "no due time"))
    receipt = Receipt(0, 0)
    failures = list(send_rows(rows, SendJob(app, "shop.remind", None), receipt))
    assert [failure.task_id for failure in failures] == [f"id-{n}" for n in range(5)]
    assert {failure.outcome for failure in failures} == {"unsent"}
    assert said in failures[0].reason
    assert (receipt.rows, receipt.sent, receipt.confirmed) == (6, 0, 0)
    assert receipt.rejected == Counter({"no due time": 1})


def test_a_task_that_the_broker_refuses_fails_the_run(spark: Any, make_app: MakeApp) -> None:
    """The error tells how to send the refused rows again."""
    installed_rabbitmq()
    with private_rabbitmq(management=False, config="max_message_size = 100000") as broker:
        df = spark.range(100).selectExpr(
            "id as number", "repeat('x', if(id = 42, 120000, 1)) as text"
        )
        fan_out = reminders(
            df,
            make_app(broker.url),
            kwargs=["number", "text"],
            id_cols=["number"],
            run_id="r",
            rate="100/s",
        )
        told = r"99 confirmed, 0 rejected, 1 refused.*send the same rows again with the same run_id"
        with pytest.raises(FanOutFailed, match=told) as e:
            fan_out.send()
        (failure,) = e.value.result.failures
        assert failure.task_id == task_id_of("r", "shop.remind", 42)
        assert "larger than" in failure.reason
