"""Ctrl-C in a driver, while it sends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("pyspark")

from celery_native_delay.spark import FanOut
from tests.waiting import wait_until


def test_an_interrupted_driver_logs_what_it_has_sent(
    spark: Any,
    make_app: Callable[..., str],
    native_delay_redis: Any,
    native_delay_redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Executors stop, and Spark's job ends."""
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
        # The connection to the JVM that Ctrl-C broke takes its thread's active session along,
        # without which format("celery") is unknown to later tests; this sets it again.
        spark.createDataFrame([], "id long")
    presses.join()
    account = r"run r was interrupted: ([\d,]+) sent, ([\d,]+) confirmed, ([\d,]+) in doubt"
    (found,) = re.finditer(rf"{account}; tasks that were sent will run", caplog.text)
    sent, confirmed, in_doubt = (int(count.replace(",", "")) for count in found.groups())
    assert (sent, confirmed, in_doubt) == (arrived(), arrived(), 0)
    assert 100 <= sent < 20_000
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds())
