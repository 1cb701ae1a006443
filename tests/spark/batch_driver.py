"""The job of a nightly run, with the app's import path and the number of rows as arguments."""

import sys

from pyspark.sql import SparkSession

from celery_native_delay.spark import FanOut

app, rows = sys.argv[1], int(sys.argv[2])
spark = (
    SparkSession.builder.master("local[2,4]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .getOrCreate()
)
df = spark.range(rows).selectExpr("id as number", "id % 3 as wait")
fan_out = FanOut(
    df,
    app=app,
    task="note",
    countdown="wait",
    args=["number"],
    id_cols=["number"],
    run_id="nightly",
    max_rate=rows / 8,  # so that there is time to kill this process
)
result = fan_out.send()
sys.stdout.write(f"{result}\n")
sys.exit(0 if result.confirmed + result.done == rows else 1)
