"""A driver whose stream sends each batch by a fan-out that is once; test_once runs and kills it.

Arguments: the app's path, the folder of the source, and the batch after whose sending the driver
dies by itself, before Spark has noted that it is done.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from celery_native_delay.spark import FanOut

app, source, last_batch = sys.argv[1:]

spark = (
    SparkSession.builder.master("local[2,4]")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.adaptive.enabled", "false")
    .config("spark.sql.codegen.wholeStage", "false")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")


def send(batch: Any, batch_id: int) -> None:
    sys.stdout.write(f"batch {batch_id} begins\n")
    sys.stdout.flush()
    result = FanOut(
        batch.repartition(2, "number"),
        app=app,
        task="note",
        countdown="wait",
        past="send",
        args=["number"],
        id_cols=["number"],
        run_id=f"reminders-{batch_id}",
        once=True,
        max_rate=50,
    ).send()
    sys.stdout.write(f"{result}\n")
    sys.stdout.flush()
    if str(batch_id) == last_batch:
        os.killpg(os.getpgrp(), signal.SIGKILL)


rows = spark.readStream.schema("number long, wait double").option("maxFilesPerTrigger", 1)
query = (
    rows.json(source)
    .writeStream.foreachBatch(send)
    .option("checkpointLocation", str(Path(source).with_name("checkpoint")))
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
