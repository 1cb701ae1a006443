"""Metrics: a real exporter with real brokers and a worker with events on. Then
Prometheus, the alerts and the dashboard evaluate its samples."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from celery_native_delay import Delay
from celery_native_delay.testing import (
    BrokerMissing,
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
    vhost_name,
)
from celery_native_delay.testing.processes import claim_ports, port_of
from pytest_celery_native_delay import installed
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.hanging import hung
from tests.lines import fill
from tests.processes import output_of, running
from tests.waiting import PATIENCE_SECONDS, wait_until

MONITORING = Path(__file__).parents[2] / "monitoring"


# ---- the exporter, and Prometheus ------------------------------------------------------------


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Exporter:
    """A running exporter process."""

    url: str

    def samples(self) -> Samples:
        """All samples of this package that it serves now, by name and labels."""
        with urlopen(self.url, timeout=PATIENCE_SECONDS) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if family.name.startswith("celery_delay")
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one sample of this package; None if it is not served."""
        return self.samples().get((f"celery_delay_{name}", frozenset(labels.items())))

    def wait_for(self, name: str, expected: float | None, **labels: str) -> None:
        """Wait until a sample has the value *expected*; None waits until it is not served."""
        wait_until(
            lambda: self.value(name, **labels) == expected,
            telling=lambda: f"{name} {labels} is {self.value(name, **labels)}",
        )


@contextmanager
def exporter_of(fleet: Fleet, **conf: Any) -> Iterator[Exporter]:
    """An exporter on the broker of *fleet*; SIGTERM ends it at the end of the block."""
    options = ["--port=0", "--interval=0.3", "--loglevel=INFO", "--json"]
    exporter = fleet.command("delay", "exporter", *options, **conf)
    url = wait_until(lambda: re.search(r'"url": "(\S+)"', exporter.log))
    yield Exporter(url[1])
    exporter.stop()
    assert exporter.process.returncode == 0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    if path := shutil.which(name):
        return path
    raise BrokerMissing(f"{name} is missing: install the package prometheus")


@contextmanager
def prometheus_of(exporter_url: str, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Returns a function that asks a Prometheus, which evaluates our alerts every second."""
    (claim,) = claim_ports(1)
    address = f"127.0.0.1:{port_of(claim)}"
    scraped = {"targets": [urlsplit(exporter_url).netloc]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [{"job_name": "celery", "static_configs": [scraped]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(configuration))  # YAML has all of JSON
    command = [installed(program, "prometheus"), f"--config.file={file}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]

    def ask(path: str) -> Any:
        with suppress(ConnectionError, URLError):  # it starts
            with urlopen(f"http://{address}/api/v1/{path}", timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]

    with closing(claim), running(*command, log=folder / "prometheus.log"):
        wait_until(lambda: ask("rules"))
        yield ask


# ---- what they tell ------------------------------------------------------------------------


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_metrics_of_rates_are_by_task_name(own_redis: PrivateRedis, tmp_path: Path) -> None:
    """Waiting tasks, their queues and started tasks are counted by task name, never by key."""
    rates = {"careful": "1/h", "hold": "1/d"}
    with (
        fleet_on(own_redis.url, tmp_path, native_delay_rates=rates) as fleet,
        exporter_of(fleet) as exporter,
    ):
        exporter.wait_for("rate_waiting", 0, task_name="careful")
        exporter.wait_for("events_up", 1)
        fleet.worker(pool="threads", more=("-E",), wait=False)
        app = fleet.app()
        for number in range(5):
            app.tasks["careful"].apply_async((number,))
        exporter.wait_for("rate_starts_total", 1, task_name="careful")
        exporter.wait_for("rate_waiting", 4, task_name="careful")
        exporter.wait_for("pending", 4)
        fill(app, "hold", "ada", "1/d", waiting=0, held_seconds=90_000)
        exporter.wait_for("rate_lines_held", 1, task_name="hold")
        assert exporter.value("rate_lines", task_name="careful") == 1
        assert exporter.value("rate_lines_held", task_name="careful") == 0
        assert exporter.value("rate_starts_total", task_name="hold") == 0
        with hung(own_redis):  # such a server gives no error
            exporter.wait_for("broker_up", 0)
            assert exporter.value("pending") is None
        own_redis.kill()
        exporter.wait_for("rate_waiting", None, task_name="careful")
        assert exporter.value("rate_starts_total", task_name="careful") == 1


@dataclass
class Shop:
    """RabbitMQ with a store, a worker, four tasks due in about ten minutes, and a daily task.

    One of the four waits in the levels.
    """

    fleet: Fleet
    exporter: Exporter
    store: PrivateRedis
    due: float


@pytest.fixture(scope="module")
def shop(rabbitmq: PrivateRabbitMQ, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    url = rabbitmq.new_vhost()
    conf = {
        "native_delay_rates": {"careful": "1/h"},
        "native_delay_schedules": True,
        "native_delay_store_tasks": ["note"],  # others wait in the levels
        "beat_schedule": {"daily": {"task": "note", "schedule": 86_400.0}},
    }
    folder = tmp_path_factory.mktemp("shop")
    with (
        private_redis() as store,
        fleet_on(url, folder, native_delay_store=store.url, **conf) as fleet,
        ExitStack() as started,
    ):
        Delay(fleet.app()).hold("shop.nothing")
        worker = fleet.worker(more=("-E",), wait=False)
        exporter = started.enter_context(exporter_of(fleet))
        exporter.wait_for("events_up", 1)
        worker.wait_ready()
        exporter.wait_for("schedule_late_seconds", 0, entry="daily")
        note = fleet.app().tasks["note"]
        note.apply_async(("runs",), countdown=1, queue="side")
        note.apply_async(("expires",), countdown=1, expires=0.5, queue="side")
        cancelled = note.apply_async(("never",), countdown=3600, queue="side")
        assert Delay(fleet.app()).cancel(cancelled.id)
        for name in ("matured_total", "cancelled_total", "expired_total", "lateness_seconds_count"):
            exporter.wait_for(name, 1, queue_name="side")
        due = time() + 600
        for number in range(3):
            note.apply_async((number,), countdown=600 + number)
        fleet.app().tasks["again"].apply_async((0, 0), countdown=600)
        yield Shop(fleet, exporter, store, due)
    rabbitmq.delete_vhost(vhost_name(url))


@on_one_version
def test_metrics_of_tasks_on_rabbitmq(shop: Shop) -> None:
    exporter = shop.exporter
    exporter.wait_for("store_messages", 4)  # the fourth is the next run of the schedule entry
    exporter.wait_for("pending", 5)
    assert exporter.value("messages", level="level-00", ttl_seconds="0.125") == 0
    assert exporter.value("overdue_seconds") == 0
    assert shop.due <= exporter.value("next_due_timestamp_seconds") <= time() + 600
    assert exporter.value("lateness_seconds_sum", queue_name="side") > 0

    shop.store.kill()
    exporter.wait_for("store_up", 0)
    assert exporter.value("overdue_seconds") is exporter.value("store_messages") is None
    assert exporter.value("pending") == 1
    shop.store.start()
    exporter.wait_for("store_up", 1)


@pytest.mark.ci
@on_one_version
def test_every_expression_of_dashboard_and_alerts_has_data(shop: Shop, tmp_path: Path) -> None:
    """Prometheus returns data for every expression; the reference names every served metric."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) >= len(dashboard["panels"])
    values = {"$job": "celery", "$queue": ".*", "$__rate_interval": "1m"}
    with prometheus_of(shop.exporter.url, tmp_path) as ask:

        def query(expression: str) -> list[dict[str, Any]]:
            """The current values, one dict for each series."""
            return ask(f"query?query={quote(expression)}")["result"]

        def rules() -> list[dict[str, Any]]:
            return [rule for group in ask("rules")["groups"] for rule in group["rules"]]

        for expression in expressions:
            asked = re.sub(r"\$\w+", lambda found: values[found[0]], expression)
            wait_until(lambda asked=asked: query(asked) != [])
        (waits,) = (
            panel["targets"][0]["expr"].replace("$job", "celery")
            for panel in dashboard["panels"]
            if (panel["title"], panel["type"]) == ("Waiting", "stat")
        )

        wait_until(lambda: [float(found["value"][1]) for found in query(waits)] == [5.0])
        wait_until(lambda: all(rule["health"] == "ok" for rule in rules()))
        served = {name for name, _ in shop.exporter.samples()}
        reference = (MONITORING.parent / "docs/reference/metrics.md").read_text()
        for name in re.findall(r"^\| `(celery_delay_\w+)`", reference, re.M):
            assert {name, f"{name}_bucket"} & served, name
        base = {re.sub("_(bucket|sum|count|created)$", "", name) for name in served}
        shown = _metrics_of(json.dumps(expressions))
        assert base <= {re.sub("_bucket$", "", name) for name in shown}, "has no panel"
        alerted = {name for rule in rules() for name in _metrics_of(rule["query"])}
        assert {name for name in served if name.endswith("_up")} <= alerted, "has no alert"
        for rule in rules():
            assert _metrics_of(rule["query"]) <= served
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used - {"__rate_interval"} == variables


def _metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"celery_delay_\w+", expression))


def test_each_alert_fires_exactly_under_its_condition() -> None:
    promtool = installed(program, "promtool")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        output_of(promtool, *command, cwd=MONITORING)
