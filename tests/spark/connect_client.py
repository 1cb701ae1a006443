"""A Spark Connect client with its server; the argument is the app's import path."""

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from celery_native_delay import InvalidFanOut
from celery_native_delay.spark import FanOut

spark = (
    SparkSession.builder.remote("local[2]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "1")
    .config("spark.sql.codegen.wholeStage", "false")
    .config("spark.sql.adaptive.enabled", "false")
    .getOrCreate()
)
df = spark.range(2_000).select(
    f.col("id").alias("number"), f.when(f.col("id") != 7, 5).alias("wait")
)
options = {"app": sys.argv[1], "task": "shop.remind", "countdown": "wait", "kwargs": ["number"]}
errors = []
for wrong in ({"app": "nowhere:app"}, {"countdown": "soon"}):
    try:
        FanOut(df, **options | wrong).send()
    except InvalidFanOut as exc:
        errors.append(str(exc))
fan_out = FanOut(df, **options, id_cols=["number"], run_id="connect", smear=2)
plan = fan_out.plan()
result = fan_out.send()
(rejected,) = fan_out.rejected().collect()
sink = {"app": sys.argv[1], "task": "shop.remind", "countdown_col": "wait"}
writer = df.where("number < 10 and number != 7").write.format("celery").options(**sink)
writer.options(kwargs_cols="number", id_cols="number", run_id="sink").mode("append").save()
said = {
    "kind": type(df).__module__,
    "accepted": plan.accepted,
    "confirmed": result.confirmed,
    "rejected": rejected.number,
    "errors": errors,
}
sys.stdout.write(f"{json.dumps(said)}\n")
