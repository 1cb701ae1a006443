"""A million reminders from Spark, spread over an hour, each accounted for."""

import os

from celery import Celery

from celery_native_delay import install
from celery_native_delay.spark import FanOut

app = Celery("letters", broker=os.environ.get("BROKER_URL", "amqp://"))
install(app)


@app.task(name="letters.remind")
def remind(customer):
    print(f"dear {customer}")


def reminders(customers, day):
    """Rows with the same day and customer are the same task, however often the job runs."""
    return FanOut(
        customers,
        app="million:app",  # the executors import it
        task="letters.remind",
        eta="remind_at",
        kwargs=["customer"],
        id_cols=["customer"],
        run_id=f"reminders-{day}",
        smear=3600,  # seconds over which they become due
        once=True,  # a row that Spark sends twice runs once; workers need a store
    )


def send(customers, day, folder):
    run = reminders(customers, day)
    run.rejected().write.parquet(f"{folder}/rejected")
    run.ledger().write.parquet(f"{folder}/ledger")  # what `delay reconcile` compares
    return run.send()


def test_each_row_is_sent_or_rejected(spark, tmp_path):
    customers = spark.range(1000).selectExpr(
        "concat('customer ', id) as customer",
        "if(id = 7, null, current_timestamp() + interval 1 day) as remind_at",
    )
    result = send(customers, "2026-11-28", tmp_path)
    assert (result.confirmed, result.rejected, result.failures) == (999, 1, [])
    assert spark.read.parquet(f"{tmp_path}/ledger").select("task_id").distinct().count() == 999
