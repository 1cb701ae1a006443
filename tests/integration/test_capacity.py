"""``celery delay capacity``: what is asked, refused and printed; and brokers that are measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from celery import Celery

from celery_native_delay import Delay, install
from celery_native_delay.capacity.service import Service
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.integration.project import Project
from tests.waiting import PATIENCE_SECONDS, wait_until

APP = """
from celery import Celery
from celery_native_delay import install

app = Celery("shop", broker={url!r}, set_as_current=False)
install(app, **{settings!r})
"""

NOWHERE = "amqp://nowhere.invalid"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path).write(APP, NOWHERE)


def test_a_load_is_told_to_scripts_and_no_broker_is_asked(project: Project) -> None:
    told = project.told("capacity", "--rate", "2000", "--delay", "60", "--cores", "8")
    assert (told["hops_per_task"], told["waiting"], told["measured"]) == (2, 120_000, False)
    assert [queue["per_second"] for queue in told["queues"]] == [2000, 2000]
    assert told["saturates_first"]["what"] in {queue["queue"] for queue in told["queues"]}
    assert told["keeps_up"]
    assert told["lateness"]["p50_ms"] < told["lateness"]["p99_ms"]
    assert told == project.told("capacity", "--rate", "2000", "--delay", "60", "--cores", "8")


@pytest.mark.ci
def test_a_load_is_told_to_people_with_bars_and_a_picture(project: Project) -> None:
    file = project.folder / "shop.png"
    done = project.delay(
        *("capacity", "--rate", "500", "--delay", "1m..10m", "--step", "1", "--picture", file.name)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "500 task(s) a second, with delays of 1 min to 10 min" in done.stdout
    assert "█" in done.stdout
    assert "saturates first: " in done.stdout
    assert "--calibrate" in done.stdout
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_load_that_the_broker_cannot_carry_exits_with_1_and_says_what_to_change(
    project: Project,
) -> None:
    told = project.told(
        *("capacity", "--rate", "2000", "--delay", "8", "--service-ms", "32", "--cores", "16"),
        status=1,
    )
    first = told["saturates_first"]
    assert (first["what"].rpartition(".")[2], round(first["at_per_second"])) == ("level-03-8", 1000)
    assert (told["keeps_up"], told["lateness"]["growing"]) == (False, True)
    changes = " ".join(one["change"] for one in told["advice"])
    assert "countdown" in changes
    assert "dead_letter_worker_consumer_prefetch" in changes


@pytest.mark.ci
def test_delays_come_from_a_histogram(project: Project) -> None:
    (project.folder / "delays.csv").write_text("delay,count\n1m,3\n1h,1\n")
    told = project.told("capacity", "--rate", "10", "--histogram", "delays.csv")
    assert told["load"]["mean_delay_seconds"] == 945
    fan_out = {"per_second": 900, "due": [{"from_seconds": 60, "count": 2_000}]}
    (project.folder / "fan-out.json").write_text(json.dumps(fan_out))
    told = project.told("capacity", "--histogram", "fan-out.json", "--cores", "16")
    assert (told["load"]["per_second"], told["waiting"]) == (900, 2_000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say which load"),
        (["--rate", "5"], "say which load"),
        (["--delay", "60"], "--rate"),
        (["--rate", "0", "--delay", "60"], "more than 0"),
        (["--rate", "5", "--delay", "soon"], "expected a duration"),
        (["--rate", "5", "--delay", "100000d"], "native_delay_levels"),
        (["--rate", "5", "--delay", "1", "--from-ledger"], "one of"),
        (["--rate", "5", "--histogram", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--rate", "5", "--delay", "1", "--service", "shop.py"], "--calibrate --json"),
        (["--rate", "5", "--delay", "1", "--cores", "0"], "cores of at least"),
        (["--rate", "5", "--delay", "1", "--picture", "no/where.png"], "cannot be drawn"),
        (["--rate", "5", "--from-ledger"], "nowhere.invalid"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_answered_is_one_sentence(
    project: Project, arguments: list[str], said: str
) -> None:
    done = project.delay("capacity", *arguments)
    assert done.returncode in (1, 2)
    assert (said in done.stderr, done.stdout) == (True, "")


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_on_a_broker_without_levels_it_says_what_waits_and_what_limits(
    project: Project, empty_redis: PrivateRedis
) -> None:
    project.write(APP, empty_redis.url)
    told = project.told("capacity", "--rate", "1000", "--delay", "60")
    assert (told["transport"], told["waiting"]) == ("redis", 60_000)
    assert told["memory_bytes"] > 60_000 * 400
    assert "a script" in told["limit"]
    done = project.delay("capacity", "--calibrate")
    assert done.returncode == 1
    assert "expected RabbitMQ" in done.stderr


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_rate_and_delays_come_from_what_waits(project: Project, empty_redis: PrivateRedis) -> None:
    """300 tasks lie there as ten a second with a delay of 30 s would have left them."""
    project.write(APP, empty_redis.url)
    with install(Celery("shop", broker=empty_redis.url, set_as_current=False)) as app:
        for number in range(300):
            app.send_task("shop.remind", countdown=600 + number * 60)
        assert Delay(app).count() == 300
    told = project.told("capacity", "--from-ledger")
    # They fill 310 of the minutes until the last is due.
    assert told["waiting"] == pytest.approx(300, rel=0.1)
    assert told["load"]["longest_delay_seconds"] == pytest.approx(310 * 60, rel=0.1)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_broker_is_measured_and_nothing_is_left_of_it(
    tmp_path: Path, vhost_url: str, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    project = Project(tmp_path).write(APP, vhost_url, management_url=rabbitmq.management_url)
    done = project.delay("capacity", "--calibrate", "--json")
    assert done.returncode == 0, done.stderr
    service = Service.from_json(done.stdout)
    # Generous: a machine may be a hundred times slower than another, or than itself.
    assert 50 < service.ceiling_per_second < 200_000
    assert 20 < service.limit_per_second(2) < 500_000
    assert service.cores >= 1
    (tmp_path / "broker.json").write_text(done.stdout)
    told = project.told("capacity", "--rate", "1", "--delay", "60", "--service", "broker.json")
    assert (told["measured"], told["service"]) == (True, json.loads(done.stdout))
    assert left_of(rabbitmq, vhost) == []


@pytest.mark.timeout(300)
@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_measurement_that_is_interrupted(
    tmp_path: Path, vhost_url: str, rabbitmq: PrivateRabbitMQ, vhost: str, number: signal.Signals
) -> None:
    Project(tmp_path).write(APP, vhost_url)
    command = [sys.executable, "-m", "celery", "-A", "shop", "delay", "capacity", "--calibrate"]
    with subprocess.Popen(
        [*command, "--cores", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # not so under nohup
    ) as measuring:
        assert measuring.stderr is not None
        line = "  one message in each queue\n"
        assert line in iter(measuring.stderr.readline, "")
        assert left_of(rabbitmq, vhost)
        measuring.send_signal(number)
        measuring.communicate(timeout=PATIENCE_SECONDS)
    assert measuring.returncode
    wait_until(lambda: not left_of(rabbitmq, vhost))


def left_of(rabbitmq: PrivateRabbitMQ, vhost: str) -> list[str]:
    """Queues and exchanges of a measurement that are there."""
    exchanges = rabbitmq.api("GET", f"/exchanges/{quote(vhost, safe='')}")
    names = [one["name"] for one in [*rabbitmq.queues(vhost), *exchanges]]
    return [name for name in names if name.startswith("celery_delay.capacity-")]
