"""A fan-out during an outage, or without access to the broker: each job tries it only once."""

from __future__ import annotations

import json
import socketserver
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic, time_ns
from typing import Any

import pytest

pytest.importorskip("pyspark")


from celery_native_delay import FanOutFailed
from celery_native_delay.bulk import Bulk
from celery_native_delay.spark import FanOut
from celery_native_delay.spark.sending import Receipt, SendJob, send_rows
from celery_native_delay.testing import private_redis, require_redis
from celery_native_delay.transports import outbox
from pytest_celery_native_delay import installed

MakeApp = Callable[..., str]

ROWS, PARTITIONS = 40, 8


def fan_out(spark: Any, app: str) -> FanOut:
    """A fan-out of equal partitions; one row in four is rejected."""
    df = spark.range(ROWS, numPartitions=PARTITIONS).selectExpr(
        "id as number", "if(id % 4 = 3, null, 60) as wait"
    )
    return FanOut(df, app=app, task="shop.remind", countdown="wait", kwargs=["number"])


def write(spark: Any, app: str) -> None:
    """Write the same rows by the sink."""
    df = spark.range(ROWS, numPartitions=PARTITIONS).selectExpr("id as number", "60 as wait")
    options = {"app": app, "task": "shop.remind", "countdown_col": "wait"}
    options["kwargs_cols"] = "number"
    df.write.format("celery").options(**options).mode("append").save()


def test_an_unknown_virtual_host_is_an_error_at_once(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq_url: str
) -> None:
    """Each row is a failure or a reject, and no task has waited."""
    nowhere = f"{native_delay_rabbitmq_url.rpartition('/')[0]}/nowhere"
    with pytest.raises(FanOutFailed, match="vhost nowhere not found") as raised:
        fan_out(spark, make_app(nowhere)).send()
    result = raised.value.result
    assert (result.rows, result.confirmed, result.rejected) == (ROWS, 0, ROWS // 4)
    assert len(result.failures) == ROWS - result.rejected
    assert {failure.outcome for failure in result.failures} == {"unsent"}
    assert {failure.reason for failure in result.failures} == {result.failures[0].reason}
    assert max(receipt.seconds for receipt in result.receipts) < outbox.PATIENCE_SECONDS


def test_a_wrong_password_is_tried_once_per_slot(
    spark: Any, make_app: MakeApp, tmp_path: Path
) -> None:
    """Not once per partition or attempt, which could lock the account."""
    installed(require_redis, "redis")
    with private_redis(server="redis", password="secret") as redis:
        app = make_app(redis.url.replace("secret", "wrong"))
        redis.client.acl_log_reset()
        reminders = fan_out(spark, app)
        _ = reminders.facts  # without a connection
        began = monotonic()
        with pytest.raises(FanOutFailed, match=r"nothing was sent.*invalid username-password pair"):
            reminders.send()
        waited_seconds = monotonic() - began
        refusals = sum(int(entry["count"]) for entry in redis.client.acl_log())
    assert waited_seconds < outbox.PATIENCE_SECONDS
    # kombu asks twice before it raises, and two slots may do so at the same time.
    assert 1 <= refusals <= 4


class _HangsUp(socketserver.BaseRequestHandler):
    """Closes each connection, as a load balancer without brokers does."""

    def handle(self) -> None:
        self.server.asked_at.append(monotonic())  # type: ignore[attr-defined]


@contextmanager
def nobody_behind() -> Iterator[Any]:
    """A port that closes each connection and records its time."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _HangsUp) as server:
        server.asked_at = []  # type: ignore[attr-defined]
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.mark.ci
@pytest.mark.parametrize("way", ["FanOut", "sink"])
def test_a_job_waits_for_an_outage_only_once(
    spark: Any, make_app: MakeApp, apps_folder: Path, way: str
) -> None:
    """Eight partitions on two slots, with four attempts each in the sink."""
    patience_seconds = 15
    with nobody_behind() as server:
        app = make_app(f"amqp://127.0.0.1:{server.server_address[1]}")
        module = apps_folder / f"{app.partition(':')[0]}.py"
        impatient = (
            "from celery_native_delay.transports import outbox\n"
            f"outbox.PATIENCE_SECONDS = {patience_seconds}\n"
        )
        module.write_text(module.read_text() + impatient)
        if way == "FanOut":
            with pytest.raises(FanOutFailed, match=f"{ROWS - ROWS // 4} unsent"):
                fan_out(spark, app).send()
        else:
            pytest.importorskip("pyspark.sql.datasource")
            with pytest.raises(Exception, match="tasks are not confirmed"):
                write(spark, app)
        waited_seconds = server.asked_at[-1] - server.asked_at[0]
    # Once for each of four waves of partitions, or attempts, would be 60 s.
    assert patience_seconds - 5 < waited_seconds < 3 * patience_seconds


def test_the_next_job_tries_the_broker_again(
    spark: Any, make_app: MakeApp, native_delay_rabbitmq: Any, native_delay_rabbitmq_url: str
) -> None:
    """Also if it sends the same run."""
    native_delay_rabbitmq.rabbitmqctl("add_user", "late", "late")
    vhost = native_delay_rabbitmq_url.rpartition("/")[2]
    app = make_app(native_delay_rabbitmq_url.replace("//guest:guest@", "//late:late@"))
    reminders = fan_out(spark, app)
    with pytest.raises(FanOutFailed, match="refused for user 'late'"):
        reminders.send()
    native_delay_rabbitmq.rabbitmqctl("set_permissions", "-p", vhost, "late", ".*", ".*", ".*")
    assert reminders.send().confirmed == ROWS - ROWS // 4


def test_a_missing_permission_is_tried_once_per_queue(
    make_app: MakeApp,
    apps_folder: Path,
    native_delay_rabbitmq: Any,
    native_delay_rabbitmq_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function of executors; each row is a failure with the broker's error."""
    native_delay_rabbitmq.rabbitmqctl("add_user", "clerk", "clerk")
    vhost = native_delay_rabbitmq_url.rpartition("/")[2]
    own = ["^(plain|vip)$", ".*", ".*"]  # it may not declare the levels
    native_delay_rabbitmq.rabbitmqctl("set_permissions", "-p", vhost, "clerk", *own)
    monkeypatch.syspath_prepend(str(apps_folder))
    asked = []
    send = Bulk.send

    def noting(self: Bulk, *args: Any, **kwargs: Any) -> str:
        asked.append(kwargs["queue"])
        return send(self, *args, **kwargs)

    monkeypatch.setattr(Bulk, "send", noting)
    app = make_app(native_delay_rabbitmq_url.replace("//guest:guest@", "//clerk:clerk@"), levels=20)
    due_us = time_ns() // 1000 + 3_600_000_000
    rows = [
        (f"id-{n}", due_us, json.dumps([[n], {}]), ("plain", "vip")[n % 2], None, None, None)
        for n in range(20)
    ]
    receipt = Receipt(0, 0)
    failures = list(send_rows(rows, SendJob(app, "shop.remind", None), receipt))
    assert [failure.task_id for failure in failures] == [row[0] for row in rows]
    assert {failure.outcome for failure in failures} == {"refused"}
    assert all("NotPermitted" in failure.reason for failure in failures)
    assert asked == ["plain", "vip"]
