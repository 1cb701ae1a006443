"""What the README says is true: its code runs, its commands exist, its output is theirs."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_native_delay import Delay, DelaySettings, install, store_outage
from celery_native_delay.testing import (
    PrivateRedis,
    private_sqs,
    require_rabbitmq,
    require_redis,
    require_sqs,
)
from celery_native_delay.transports.interface import Outage
from celery_native_delay.worker.outage import react
from pytest_celery_native_delay import installed
from tests.processes import processes_of
from tests.waiting import wait_until

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CELERY = str(Path(sys.executable).with_name("celery"))

PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
CONSOLE_LINES = re.findall(r"^\$ (.+?)(?:\s+#.*)?$", README, re.M)
DELAY_COMMANDS = [line for line in CONSOLE_LINES if line.startswith("celery ")]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with the README's app in it, as shop.py."""
    app = next(block for block in PYTHON_BLOCKS if "install(app)" in block)
    (tmp_path / "shop.py").write_text(app)
    return tmp_path


def declare_levels(url: str) -> None:
    """The first delayed publish would, and on a busy machine the delay is over by then."""
    with Connection(url, transport_options={"native_delay": True}) as connection:
        connection.default_channel.delays.prepare()


def test_the_celery_example_is_an_app_whose_delayed_tasks_wait(vhost_url: str) -> None:
    block = next(block for block in PYTHON_BLOCKS if "install(app)" in block)
    names: dict[str, object] = {}
    declare_levels(vhost_url)
    exec(block.replace("amqp://", vhost_url), names)
    app = names["app"]
    app.send_task("shop.remind", countdown=5)  # type: ignore[attr-defined]
    with Connection(vhost_url) as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery") is None
        message = wait_until(lambda: channel.basic_get("celery", no_ack=True))
    assert message.headers["task"] == "shop.remind"


def test_the_kombu_example_publishes_a_message_that_waits(vhost_url: str) -> None:
    block = next(block for block in PYTHON_BLOCKS if "delay_headers" in block)
    declare_levels(vhost_url)
    exec(block.replace("amqp://", vhost_url), {})
    with Connection(vhost_url) as connection:
        channel = connection.default_channel
        assert channel.basic_get("emails") is None
        message = wait_until(lambda: channel.basic_get("emails", no_ack=True))
    assert b"ada@example.com" in bytes(message.body, "utf-8")


def test_what_waits_is_seen_and_changed_as_shown(ledger_redis: PrivateRedis) -> None:
    with install(Celery("shop", broker=ledger_redis.url, set_as_current=False)) as app:
        task_id = app.send_task("shop.remind", ("ada",), countdown=60).id
        block = next(block for block in PYTHON_BLOCKS if "Delay(app)" in block)
        exec(block, {"app": app, "task_id": task_id})
        assert Delay(app).ls().tasks == ()


def test_the_example_of_a_test_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(require_rabbitmq)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(next(block for block in PYTHON_BLOCKS if "def test_" in block))
    pytester.runpytest_subprocess("-Werror").assert_outcomes(passed=1)


def test_the_private_brokers_are_as_shown(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(require_rabbitmq)
    installed(require_redis)
    installed(require_redis, embedded=True)
    monkeypatch.chdir(short_path)
    exec(next(block for block in PYTHON_BLOCKS if "embedded_broker" in block), {})
    said = capsys.readouterr().out
    assert f"redis+socket://{short_path}/var/broker/redis.sock\n" in said
    assert "sqs://private:private@127.0.0.1:" in said


def test_the_line_for_development_runs_a_broker_that_keeps_what_waits(short_path: Path) -> None:
    """Ctrl-C ends it in good order; the next time the task still waits."""
    installed(require_redis, embedded=True)
    (line,) = (line for line in CONSOLE_LINES if "celery_native_delay.testing" in line)
    command = [sys.executable, *shlex.split(line)[1:]]
    for time in (1, 2):
        with subprocess.Popen(
            command, cwd=short_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url == f"redis+socket://{short_path}/var/broker/redis.sock"
            with install(Celery("shop", broker=url, set_as_current=False)) as app:
                if time == 1:
                    app.send_task("shop.remind", countdown=600)
                assert Delay(app).count() == 1
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
    assert processes_of(short_path.name) == []


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_the_redis_example_is_an_app_whose_delayed_tasks_wait(empty_redis: PrivateRedis) -> None:
    block = next(block for block in PYTHON_BLOCKS if 'broker="redis://"' in block)
    names: dict[str, object] = {}
    exec(block.replace("redis://", empty_redis.url), names)
    names["app"].send_task("shop.remind", countdown=60)  # type: ignore[attr-defined]
    assert empty_redis.client.zcard("celery_delay.v2.due") == 1
    assert empty_redis.client.llen("celery") == 0


@pytest.mark.ci
def test_the_sqs_example_is_an_app_whose_delayed_tasks_wait() -> None:
    installed(require_sqs)
    block = next(block for block in PYTHON_BLOCKS if 'broker="sqs://"' in block)
    names: dict[str, Any] = {}
    with private_sqs() as sqs:
        exec(block.replace("sqs://", sqs.url), names)
        names["app"].send_task("shop.remind", countdown=60)
        waiting = "ApproximateNumberOfMessagesDelayed"
        url = sqs.client.get_queue_url(QueueName="celery")["QueueUrl"]
        found = sqs.client.get_queue_attributes(QueueUrl=url, AttributeNames=[waiting])
        assert found["Attributes"][waiting] == "1"


def test_the_store_example_is_an_app_whose_delayed_tasks_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next(block for block in PYTHON_BLOCKS if 'broker="filesystem://"' in block)
    names: dict[str, Any] = {}
    exec(block.replace("/var/lib/shop", str(tmp_path)), names)
    app = names["app"]
    (tmp_path / "queues").mkdir()
    app.send_task("shop.remind")
    app.send_task("shop.remind", countdown=60)
    assert Delay(app).count() == 1
    assert len(list((tmp_path / "queues").iterdir())) == 1
    exec(next(block for block in PYTHON_BLOCKS if "store_outage" in block), names)
    react(app, Outage("storing", 120, "OSError: it is away"), pytest.fail)
    assert capsys.readouterr().out == "storing has failed for 120 s: OSError: it is away\n"
    store_outage.disconnect(names["go_on_and_call_somebody"])


def test_the_bulk_example_sends_tasks_that_wait(
    vhost_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install_block = next(block for block in PYTHON_BLOCKS if "install(app)" in block)
    block = next(block for block in PYTHON_BLOCKS if "bulk(app)" in block)
    names: dict[str, object] = {}
    exec(install_block.replace("amqp://", vhost_url), names)
    exec(block, names)
    shown = re.findall(r"print\(batch.result\)  # (.+ in) ", README)[0]
    assert capsys.readouterr().out.startswith(shown)
    with Connection(vhost_url) as connection:
        assert connection.default_channel.basic_get("reminders") is None


def test_the_flush_example_runs() -> None:
    exec(next(block for block in PYTHON_BLOCKS if "flush_delayed" in block), {})


@pytest.mark.parametrize("line", DELAY_COMMANDS)
def test_every_delay_command_exists(line: str, shop: Path) -> None:
    words = [CELERY, *shlex.split(line)[1:]]
    done = subprocess.run([*words, "--help"], cwd=shop, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = "celery flower" if "delay flower" in line else "--json"
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("command", "shown"), re.findall(r"\$ celery (-A shop delay plan .*)\n((?:[^$]+?))```", README)
)
def test_the_plan_shown_is_what_the_command_prints(shop: Path, command: str, shown: str) -> None:
    done = subprocess.run(
        [CELERY, *shlex.split(command)], cwd=shop, capture_output=True, text=True, check=True
    )
    assert done.stdout == shown


def test_the_settings_table_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `native_delay_(\w+)` \| `(.+?)` \|", README, re.M)
    expected = [
        (field.name, str(field.default).replace("'", '"') if field.name else "")
        for field in fields(DelaySettings)
    ]
    shown = [(name, default.strip('"')) for name, default in rows]
    assert shown == expected


@pytest.mark.parametrize("line", [line for line in CONSOLE_LINES if line.startswith("make ")])
def test_every_make_target_exists(line: str) -> None:
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.M)
