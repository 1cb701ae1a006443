"""The cookbook's program for Spark does what its own test says, beside a real broker."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from celery_native_delay import Delay
from tests.documents import ROOT, only

PROGRAM = ROOT / "docs/cookbook/million.py"


def test_its_reminders_wait(
    spark: Any, apps_folder: Path, tmp_path: Path, native_delay_redis_url: str
) -> None:
    text = PROGRAM.read_text().replace('os.environ.get("BROKER_URL", "redis://")', "URL")
    program = apps_folder / PROGRAM.name  # whose processes do not have this test's environment
    program.write_text(text.replace("import os\n", f"URL = {native_delay_redis_url!r}\n"))
    spec = importlib.util.spec_from_file_location("million", program)
    assert spec is not None
    assert spec.loader is not None
    million = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(million)
    million.test_each_row_is_sent_or_rejected(spark, tmp_path)
    assert Delay(million.app).count() == 999
    run = only("spark-run").text.replace("2026-11-20", "2026-11-28")
    names: dict[str, Any] = {"app": million.app}
    exec(run, names)
    assert names["run"].status().cancelled
