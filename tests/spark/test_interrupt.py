"""Ctrl-C in a driver, while it sends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Thread
from time import sleep
from typing import Any

import pytest

pytest.importorskip("pyspark")

from celery_native_delay.spark import FanOut
from tests.waiting import wait_until


def test_an_interrupted_driver_stops_the_executors(
    spark: Any,
    make_app: Callable[..., str],
    native_delay_redis: Any,
    native_delay_redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    df = spark.range(20_000, numPartitions=2).selectExpr("id as number", "0D as wait")
    fan_out = FanOut(
        df,
        app=make_app(native_delay_redis_url),
        task="shop.remind",
        countdown="wait",
        past="send",
        kwargs=["number"],
        run_id="r",
        max_rate=200,
    )

    def arrived() -> int:
        return int(native_delay_redis.client.llen("plain"))

    def interrupt() -> None:
        try:
            wait_until(lambda: arrived() >= 100)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    presses = Thread(target=interrupt)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fan_out.send()
    finally:
        # The connection to the JVM that Ctrl-C broke takes its thread's active session along;
        # this sets it again for later tests.
        spark.createDataFrame([], "id long")
    presses.join()
    assert "run r has failed: tasks that were sent will run" in caplog.text
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds())

    def stopped() -> bool:
        before = arrived()
        sleep(1)
        return arrived() == before

    wait_until(stopped)
    assert 100 <= arrived() < 20_000
