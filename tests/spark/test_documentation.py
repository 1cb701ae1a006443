"""The examples of the docs about Spark: they run, and print what the docs show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no data sources in Python")

from celery_native_delay import Delay, InvalidFanOut, install
from celery_native_delay.spark import task_id_of
from tests.documents import code_beside, only
from tests.integration.traffic import inbox

SHOP = """
from celery import Celery
from celery_native_delay import install

app = install(Celery("shop", broker={url!r}, set_as_current=False))

@app.task(name="shop.remind", shared=False)
def remind(order_id, email):
    pass
"""


def test_the_examples_send_the_same_tasks(
    spark: Any,
    apps_folder: Path,
    tmp_path: Path,
    native_delay_rabbitmq_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FanOut and the sink send the same 990 of 1,000 reminders."""
    (apps_folder / "shop.py").write_text(SHOP.format(url=native_delay_rabbitmq_url))
    orders = spark.range(1_000).selectExpr(
        "id as order_id",
        "concat('user', id, '@example.com') as email",
        "if(id % 100 = 7, null, current_timestamp() + make_dt_interval(0, 0, 0, 20)) as remind_at",
    )
    orders.write.parquet(str(tmp_path / "orders.parquet"))
    names: dict[str, Any] = {"spark": spark}
    fan_out = only("spark-fan-out").text
    for name in ("orders.parquet", "rejected"):
        fan_out = fan_out.replace(f'parquet("{name}")', f"parquet({str(tmp_path / name)!r})")
    fan_out = fan_out.replace('ledger="ledger"', f"ledger={str(tmp_path / 'ledger')!r}")
    # On a busy machine, the plan alone may take longer than until the due times.
    exec(fan_out.replace("smear=900", 'smear=2, past="send"'), names)
    shown = code_beside("spark-fan-out", "print(result)").removesuffix(" …")
    printed = capsys.readouterr().out
    assert shown in printed
    assert "10  no due time" in printed
    sink = only("spark-sink").text
    names["orders"] = names["orders"].where("remind_at is not null")
    exec(sink.replace(".mode(", '.option("past", "send").mode('), names)
    expected = {
        task_id_of("reminders-2026-11-20", "shop.remind", n) for n in range(1_000) if n % 100 != 7
    }
    assert {
        row.task_id for row in spark.read.parquet(str(tmp_path / "ledger")).collect()
    } == expected
    assert spark.read.parquet(str(tmp_path / "rejected")).count() == 10
    with inbox(native_delay_rabbitmq_url, "celery") as letters:
        came = letters.wait_for(2 * 990)
    assert {arrival.message.headers["id"] for arrival in came} == expected


def test_the_airflow_example_may_be_retried(
    spark: Any,
    apps_folder: Path,
    tmp_path: Path,
    native_delay_redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its function, called three times, sends each reminder once; then the run is cancelled."""
    calls: list[Callable[..., str]] = []

    def task(**options: Any) -> Callable[..., Any]:
        assert options["retries"] == 2
        return lambda function: lambda: calls.append(function)

    sdk = SimpleNamespace(dag=lambda **_: lambda function: function, task=task)
    monkeypatch.setitem(sys.modules, "airflow", SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    monkeypatch.setitem(sys.modules, "pendulum", SimpleNamespace(datetime=lambda *_, **__: None))
    text = only("airflow-dag").text.replace("shop:app", "night_shop:app")
    for name in ("orders", "ledger"):
        text = text.replace(f'f"{name}/{{ds}}"', f'f"{tmp_path}/{name}/{{ds}}"')
    (apps_folder / "night_shop.py").write_text(SHOP.format(url=native_delay_redis_url))
    orders = spark.range(100).selectExpr(
        "id as order_id", "'x@example.com' as email", "timestamp'2031-01-01' as remind_at"
    )
    orders.write.parquet(str(tmp_path / "orders/2026-11-20"))
    exec(text, {"__name__": "dag"})
    (send,) = calls
    assert [send("2026-11-20").split(" in ")[0] for _ in range(3)] == [
        "run reminders-2026-11-20: 100 rows, 100 confirmed, 0 rejected"
    ] * 3
    ledger = spark.read.parquet(str(tmp_path / "ledger/2026-11-20"))
    assert (ledger.count(), ledger.distinct().count()) == (300, 100)
    app = install(Celery("shop", broker=native_delay_redis_url, set_as_current=False))
    before = {each.due for each in Delay(app).ls("run:reminders-2026-11-20")}
    names: dict[str, Any] = {"app": app}
    exec(only("spark-run").text, names)
    assert {each.due for each in Delay(app).ls("run:reminders-2026-11-20")} == {
        due + timedelta(hours=1) for due in before
    }
    status = names["run"].status()
    assert (status.tries, status.planned, status.sent, status.cancelled) == (3, 100, 100, True)
    with pytest.raises(InvalidFanOut, match="choose another run_id"):
        send("2026-11-20")


RATED = """
from celery import Celery
from celery_native_delay import Rate, install

app = install(Celery("shop", broker="amqp://127.0.0.1:1", set_as_current=False),
              rates={"shop.call_api": Rate("100/m", key="tenant", burst=10)})

@app.task(name="shop.call_api", shared=False)
def call_api(tenant, path):
    pass
"""


def test_the_example_of_a_rate_spreads_due_times(spark: Any, apps_folder: Path) -> None:
    (apps_folder / "rated_shop.py").write_text(RATED)
    customers = spark.range(100).selectExpr(
        "concat('tenant', id % 2) as tenant", "concat('/', id) as path", "60 as wait"
    )
    names: dict[str, Any] = {"customers": customers}
    exec(only("spark-rate").text.replace("shop:app", "rated_shop:app"), names)
    plan = names["calls"].plan()
    assert plan.accepted == 100
    # Ten at once for each of two tenants, and each 0.6 s one more.
    assert 0.6 * 40 <= (plan.last_due - plan.first_due).total_seconds() <= 0.62 * 41
