"""Spark Connect, whose client has neither a JVM nor executors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")
pytest.importorskip("pyspark.sql.datasource", reason="of Spark 4")

from celery_native_delay.spark import task_id_of
from tests.integration.traffic import inbox
from tests.spark.conftest import driver_environ
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.ci


def test_fan_out_and_sink_work_through_spark_connect(
    make_app: Callable[..., str], apps_folder: Path, tmp_path: Path, native_delay_rabbitmq_url: str
) -> None:
    app = make_app(native_delay_rabbitmq_url)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("connect_client.py")), app],
        cwd=tmp_path,
        env=driver_environ(apps_folder),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kind"] == "pyspark.sql.connect.dataframe"
    assert (said["accepted"], said["confirmed"], said["rejected"]) == (1_999, 1_999, 7)
    for error, words in zip(said["errors"], ("nowhere", "'soon'"), strict=True):
        assert words in error
    with inbox(native_delay_rabbitmq_url, "plain") as letters:
        came = letters.wait_for(1_999 + 9)
    ids = {arrival.message.headers["id"] for arrival in came}
    numbers = [n for n in range(2_000) if n != 7]
    assert ids == {task_id_of("connect", "shop.remind", n) for n in numbers} | {
        task_id_of("sink", "shop.remind", n) for n in numbers[:9]
    }
