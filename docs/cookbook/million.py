"""A million reminders from Spark, spread over an hour, each accounted for."""

import os

from celery import Celery

from celery_native_delay import Run, install
from celery_native_delay.spark import FanOut

app = Celery("letters", broker=os.environ.get("BROKER_URL", "redis://"))
install(app)  # beside another broker: store="postgresql+psycopg://…"


@app.task(name="letters.remind")
def remind(customer):
    print(f"dear {customer}")


def send(customers, day, folder):
    """Repeat the job as often as you like: each row is one task, and runs once."""
    run = FanOut(
        customers,
        app="million:app",  # the executors import it
        task="letters.remind",
        eta="remind_at",
        kwargs=["customer"],
        id_cols=["customer"],
        run_id=f"reminders-{day}",
        smear=3600,  # seconds over which they become due
    )
    run.rejected().write.mode("overwrite").parquet(f"{folder}/rejected")
    return run.send(ledger=f"{folder}/ledger")


def call_off(day):
    Run(f"reminders-{day}", app=app).cancel()


def test_each_row_is_sent_or_rejected(spark, tmp_path):
    customers = spark.range(1000).selectExpr(
        "concat('customer ', id) as customer",
        "if(id = 7, null, current_timestamp() + interval 1 day) as remind_at",
    )
    result = send(customers, "2026-11-28", tmp_path)
    assert (result.confirmed, result.rejected, result.failures) == (999, 1, [])
    assert spark.read.parquet(f"{tmp_path}/ledger").select("task_id").distinct().count() == 999
