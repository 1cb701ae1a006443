"""``celery delay ls | show | cancel | reschedule | run-now | rates``: questions, errors and output.

They are the same on every broker, so these tests use Redis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_native_delay import Delay, Rate, SettingsError, install
from celery_native_delay.app.delay import adopt_rates
from celery_native_delay.app.retrying import _hold
from celery_native_delay.cli.group import delay as group
from celery_native_delay.rates.line import Asked, places_in
from celery_native_delay.records.waiting import PLACE
from celery_native_delay.testing import PrivateRedis
from tests.integration.project import APP, Project
from tests.lines import fill
from tests.traffic import send_task

pytestmark = pytest.mark.parametrize("server_name", ["redis"], indirect=True)


RATES = {"shop.call_api": "10/h"}


@pytest.fixture
def shop(tmp_path: Path, empty_redis: PrivateRedis) -> Project:
    return Project(tmp_path).write(APP, empty_redis.url, rates=RATES)


@pytest.fixture
def app(empty_redis: PrivateRedis) -> Iterator[Celery]:
    with install(Celery("shop", broker=empty_redis.url, set_as_current=False), rates=RATES) as app:
        yield app


def test_tasks_are_listed_cancelled_moved_and_run(app: Celery, delay: Delay, shop: Project) -> None:
    for number in range(6):
        send_task(app, number, countdown=1000 + number)
    listed = shop.told("ls", "--search", "käse", "--limit", "2")
    assert [task["id"] for task in listed["tasks"]] == ["order-1", "order-3"]
    assert shop.lines("ls", "-n", "1")[-1] == "1 of 6 waiting"
    assert shop.told("show", "order-2")["kwargs"] == "{'order': 2, 'text': 'wurst'}"
    assert shop.delay("cancel", "--search", "käse", answer="n\n").returncode == 1
    assert delay.count() == 6
    done = shop.delay("cancel", "--search", "käse", answer="y\n")
    assert "Cancel 3 task(s)?" in done.stderr
    assert done.stdout == "3 task(s) cancelled\n"
    (said,) = shop.lines("reschedule", "order-0", "--countdown", "5000")
    assert said.startswith("order-0 is due 2")
    before = delay.show("order-0")[0].due_us
    assert shop.told("reschedule", "order-0", "--by", "+2h")["done"] == 1
    assert delay.show("order-0")[0].due_us == before + 7_200_000_000
    changed = shop.lines("update", "order-0", "--args", '["bob"]', "--expires", "2d")
    assert (changed, delay.show("order-0")[0].args) == (["order-0 updated"], "['bob']")
    assert shop.told("update", "order-1", "--priority", "5", status=1)["verdict"] == "unknown"
    assert shop.told("run-now", "order-1", "order-2", status=1) == {
        "done": 1,
        "outcomes": [{"id": "order-1", "verdict": "unknown"}, {"id": "order-2", "verdict": "done"}],
    }
    assert [task.id for task in delay.ls().tasks if task.id != "order-2"] == ["order-4", "order-0"]
    assert shop.delay("cancel").returncode == 2


@pytest.mark.ci
def test_no_command_prints_control_characters(app: Celery, delay: Delay, shop: Project) -> None:
    """A terminal would run an escape sequence, and reverse text after a bidirectional override."""
    hostile, shown = "\x1b[2J\x9b\u202eexe", r"\x1b[2J\x9b\u202eexe"
    name, task_id, queue = (f"{what}{hostile}" for what in "niq")
    app.send_task(name, (hostile,), task_id=task_id, countdown=1000, queue=queue)
    for arguments, times in ((("ls",), 4), (("cancel", task_id), 1), (("show", task_id), 1)):
        done = shop.delay(*arguments)
        said = done.stdout + done.stderr
        assert said.count(shown) >= times, (arguments, said)
        assert said.replace("\n", "").isprintable(), (arguments, said)


@pytest.mark.ci
def test_show_prints_an_object_for_one_id_and_a_list_for_several(
    shop: Project, app: Celery
) -> None:
    for number, countdown in ((1, 4230), (2, 1000), (2, 900)):
        send_task(app, number, countdown=countdown)
    one = shop.told("show", "order-1")
    assert (one["id"], one["kwargs"]) == ("order-1", "{'order': 1, 'text': 'käse'}")
    assert "others" not in one
    (other,) = shop.told("show", "order-2")["others"]
    assert other["id"] == "order-2"
    nobody = shop.told("show", "nobody", status=1)
    assert (nobody["id"], nobody["waits"]) == ("nobody", False)
    assert "`delay doctor`" in nobody["story"][0]
    assert (one["waits"], "sent by" in one["story"][0]) == (True, True)
    several = shop.told("show", "order-1", "nobody", "order-2", status=1)
    assert [(each["id"], each["waits"]) for each in several] == [
        ("order-1", True),
        ("nobody", False),
        ("order-2", True),
    ]
    assert several[2]["due"] < several[2]["others"][0]["due"]
    due = next(line for line in shop.lines("show", "order-1") if line.startswith("due "))
    assert re.fullmatch(r"due \S+ \(1 h (10|9) min\)", due)
    done = shop.delay("show", "order-1", "nobody")
    assert done.returncode == 1
    assert "\n\nnobody: nothing waits under this id\n- not found. It may be" in done.stdout


@pytest.mark.ci
def test_ls_show_and_search_know_the_key_of_a_task(
    shop: Project, app: Celery, delay: Delay
) -> None:
    send_task(app, 1, countdown=1000)
    assert shop.lines("ls")[0] == "due in task id queue args kwargs"
    result = delay.unique(app.signature("shop.import"), key="user:7", countdown=2000)
    assert shop.lines("ls")[0] == "due in task id queue args kwargs key"
    assert shop.lines("ls", "--search", "key:user:7")[1].endswith(" user:7")
    assert {"key user:7", "kind unique"} < {*shop.lines("show", result.id)}
    told = {task["id"]: (task["key"], task["kind"]) for task in shop.told("ls")["tasks"]}
    assert told == {"order-1": ("", ""), result.id: ("user:7", "unique")}
    assert shop.lines("cancel", "--yes", "-s", "key:user:7")[-1] == "1 task(s) cancelled"
    assert delay.ids() == ["order-1"]


def test_questions_are_asked_on_standard_error(shop: Project, app: Celery, delay: Delay) -> None:
    for number in range(2):
        send_task(app, number, countdown=1000)
    for arguments in (
        ("cancel", "--search", "ada"),
        ("run-now", "--search", "ada"),
        ("reschedule", "--search", "ada", "--countdown", "1h"),
        ("purge",),
        ("parked", "purge"),
    ):
        done = shop.delay(*arguments, "--json", answer="n\n")
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert "? [y/N]: " in done.stderr
    done = shop.delay("purge")  # whose standard input is at its end
    assert (done.returncode, done.stdout) == (1, "")
    assert delay.count() == 2
    done = shop.delay("cancel", "--search", "ada", "--json", answer="y\n")
    assert (done.returncode, done.stdout[0], json.loads(done.stdout)["done"]) == (0, "{", 2)


def test_moving_a_task_into_the_past_needs_yes(shop: Project, app: Celery, delay: Delay) -> None:
    """The task would run at once; the error names `run-now`."""
    send_task(app, 1, countdown=1000)
    past = (datetime.now(UTC) - timedelta(days=3)).isoformat()
    for option, told in (("--countdown=-90", "1 min 30 s ago"), (f"--eta={past}", "3 d ago")):
        done = shop.delay("reschedule", "order-1", option)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert "`run-now`" in done.stderr
    assert delay.count() == 1
    assert shop.delay("reschedule", "order-1", "--countdown=-90", "--yes").returncode == 0
    assert delay.count() == 0


def test_commands_read_and_show_times_in_the_apps_time_zone(
    app: Celery, delay: Delay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the offset, so that a shown time can be given back; only --json has UTC."""

    def lines(*arguments: str) -> list[str]:
        done = CliRunner().invoke(group, arguments, obj=SimpleNamespace(app=app))
        assert done.exit_code == 0, (done.output, done.exception)
        return [" ".join(line.split()) for line in done.stdout.splitlines()]

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    app.conf.timezone = "Asia/Kathmandu"
    send_task(app, 1, countdown=1000)
    year = datetime.now(UTC).year + 1
    noon = f"{year}-01-02T12:00:00"
    assert lines("reschedule", "order-1", "--eta", noon) == [f"order-1 is due {noon}.000+05:45"]
    assert delay.show("order-1")[0].due == datetime(year, 1, 2, 6, 15, tzinfo=UTC)
    for edges in (
        ("--from", noon, "--until", f"{year}-01-02T12:00:01"),
        ("--from", f"{noon}+05:45", "--until", f"{year}-01-02T06:15:01Z"),
    ):
        assert lines("ls", *edges)[1].startswith(f"{noon}+05:45 ")
    assert any(line.startswith(f"due {noon}.000+05:45 (") for line in lines("show", "order-1"))
    told = json.loads("\n".join(lines("show", "order-1", "--json")))
    assert told["due"] == f"{year}-01-02T06:15:00.000+00:00"


@pytest.mark.ci
def test_missing_and_conflicting_options_are_refused(shop: Project) -> None:
    for arguments, said in (
        (("reschedule", "a"), "give --countdown, --eta or --by, or --spread"),
        (("reschedule", "a", "--countdown", "1h", "--eta", "2099-01-01"), "not several"),
        (("reschedule", "a", "--by", "1h", "--spread", "1h"), "not both"),
        (("update", "a"), "give --args"),
        (("update", "a", "--args", "{}"), "a JSON list"),
        (("cancel",), "give IDs, or a search"),
        (("cancel", "a", "--search", "x"), "not both"),
    ):
        done = shop.delay(*arguments)
        assert (done.returncode, said in done.stderr) == (2, True), arguments


# ---- rates ---------------------------------------------------------------------------------------


def test_rates_are_listed_with_the_longest_queue_first(
    app: Celery, delay: Delay, shop: Project
) -> None:
    assert shop.lines("rates") == ["no rate-limited task has come lately"]
    assert shop.told("rates") == {"lines": [], "more": False}

    fill(app, "shop.call_api", "ada\x1b[31m", "10/h", waiting=7)
    fill(app, "shop.call_api", "bob", "10/h", waiting=30)
    fill(app, "shop.mail", None, "10/d", waiting=0, held_seconds=3600)
    heading, bob, ada, mail, sum_ = shop.lines("rates")
    assert heading == "task key rate waiting next slot utilisation held"
    assert re.fullmatch(r"shop.call_api bob 10/h 30 \d min( \d+ s)? 10 %", bob)
    assert ada.startswith("shop.call_api ada\\x1b[31m 10/h 7 ")
    assert re.fullmatch(r"shop.mail 10/d 1 \d.* 10 % (1 h|59 min.*)", mail)
    assert sum_ == "38 task(s) waiting in 3 line(s)"
    told = shop.told("rates", "--limit", "2")
    assert told["more"]
    assert told["lines"] == [line.as_json() for line in delay.rates(limit=2)]


def test_the_rate_of_a_key_is_set_and_unset(app: Celery, delay: Delay, shop: Project) -> None:
    fill(app, "shop.call_api", "ada", "10/h", waiting=7)
    (said,) = shop.lines("rates", "set", "shop.call_api", "20/m", "--key", "ada")
    assert said == "set to 20/m; 0 waiting task(s) moved"
    assert shop.lines("rates")[1].startswith("shop.call_api ada 20/m * 7 ")
    fill(app, "shop.call_api", "ada", "10/h", waiting=0)
    (line,) = delay.rates()
    assert (line.rate, line.waiting, line.overridden) == ("20/m", 8, True)
    (said,) = shop.lines("rates", "unset", "shop.call_api", "--key", "ada")
    assert said.startswith("the limit in native_delay_rates applies again")
    (line,) = delay.rates()
    assert (line.rate, line.waiting, line.overridden) == ("10/h", 8, False)
    told = shop.told("rates", "set", "shop.call_api", "30/m", "--key", "bob")
    assert told == {"name": "shop.call_api", "key": "bob", "limit": "30/m", "moved": 0}
    told = shop.told("rates", "unset", "shop.call_api", "--key", "bob")
    assert told == {"name": "shop.call_api", "key": "bob", "limit": None, "moved": 0}
    with pytest.raises(SettingsError, match=r"\(shop.call_api\), got 'shop.cal'"):
        delay.set_rate("shop.cal", "ada", "1/s")
    with pytest.raises(SettingsError, match="expected a rate such as"):
        delay.set_rate("shop.call_api", "ada", "fast")


def test_a_rate_is_set_for_the_keys_that_tasks_have(app: Celery, delay: Delay) -> None:
    """A task's key may be a number; its line then has the number's text."""
    fill(app, "shop.call_api", "1", "10/h", waiting=7)
    set_rate: Any = delay.set_rate
    set_rate("shop.call_api", 1, "20/m")
    (line,) = delay.rates()
    assert (line.key, line.rate) == ("1", "20/m")
    for key, expected in (("\ud800", "without lone surrogates"), (b"1", "str, int, bool")):
        with pytest.raises(SettingsError, match=f"expected .*{expected}"):
            set_rate("shop.call_api", key, "20/m")


def test_a_worker_that_starts_changes_all_queues_to_its_rates_except_set_ones(
    app: Celery, delay: Delay
) -> None:
    assert adopt_rates(app) is None
    for key in ("ada", "bob"):
        fill(app, "shop.call_api", key, "5/h", waiting=3)
    delay.set_rate("shop.call_api", "ada", "20/m")
    move = adopt_rates(app)
    assert move is not None
    assert move() == 0, "no message waits"
    rates = {line.key: line.rate for line in delay.rates()}
    assert rates == {"ada": "20/m", "bob": "10/h"}


def test_retry_after_puts_its_task_first_in_the_queues_of_all_its_limits(
    app: Celery, delay: Delay
) -> None:
    limits = [Asked("shop.call_api", "ada", Rate("10/h")), Asked("all", None, Rate("5000/d"))]
    for limit in limits:
        fill(app, limit.name, limit.key, limit.rate.limit, waiting=7)
    headers: dict[str, Any] = {}
    for limit in limits:
        _hold(app, limit.name, limit, 30, headers)
    assert places_in(headers[PLACE]) == {limit.line: 0 for limit in limits}
    assert [line.waiting for line in delay.rates()] == [8, 8]
