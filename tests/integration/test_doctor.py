"""``celery delay doctor`` finds problems and says what to do."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.app.doctor import examine
from celery_native_delay.finding import ADVICE, UNCHECKED, WRONG, Finding
from celery_native_delay.store import database
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys
from example_project.private_sqs import PrivateSqs
from tests.brokers import in_ci
from tests.conformance.brokers import options_of, running_broker, settings_of
from tests.integration.project import APP, Project
from tests.integration.sqs_traffic import SHORT_HOPS
from tests.integration.traffic import SETTINGS, on_all_versions
from tests.waiting import PATIENCE_SECONDS, wait_until

redis_only = pytest.mark.parametrize("server_name", ["redis"], indirect=True)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def app_on(url: str, **settings: Any) -> Celery:
    return install(Celery("shop", broker=url, set_as_current=False), **settings)


def of_level(app: Celery, level: str) -> list[Finding]:
    return [finding for finding in examine(app) if finding.level == level]


def the_wrong(app: Celery, check: str) -> Finding:
    (finding,) = [each for each in of_level(app, WRONG) if each.check == check]
    assert finding.remedy
    return finding


# ---- Redis -------------------------------------------------------------------------------------


def make_overdue(server: PrivateRedis, number: int, *, seconds: float = 60) -> None:
    """Make the first *number* waiting messages *seconds* overdue."""
    due = RedisBrokerKeys("", "celery_delay").due
    (now, _), members = server.client.time(), server.client.zrange(due, 0, number - 1)
    server.client.zadd(due, dict.fromkeys(members, (now - seconds) * 1000000))


@redis_only
def test_redis_overdue_tasks_without_a_promoter_are_found(
    project: Project, empty_redis: PrivateRedis
) -> None:
    project.write(APP, empty_redis.url)
    app = app_on(empty_redis.url)
    for _ in range(3):
        app.send_task("shop.remind", countdown=600)
    make_overdue(empty_redis, 3, seconds=2)

    done = project.delay("doctor")
    assert done.returncode == 1
    wrong, remedy, last = done.stdout.splitlines()
    assert wrong.startswith("wrong: promoting: celery_delay.v2: 3 message(s) overdue, ")
    assert "nothing promotes" in wrong
    assert "run `celery -A PROJ delay promote`" in remedy
    assert last == "1 problem(s) found"
    assert "run `celery -A PROJ delay promote`" in project.delay("status").stdout

    with project.promoting():
        wait_until(lambda: not examine(app))
        assert project.lines("doctor") == ["healthy"]
        assert "promote" not in project.delay("status").stdout


@redis_only
def test_redis_overdue_tasks_beside_a_running_promoter_are_found(empty_redis: PrivateRedis) -> None:
    app = app_on(empty_redis.url)
    app.send_task("shop.remind", countdown=600)
    make_overdue(empty_redis, 1)
    empty_redis.client.set(RedisBrokerKeys("", "celery_delay").promoting, "", ex=60)
    assert "although a promoter runs" in the_wrong(app, "promoting").problem


@redis_only
def test_a_draining_app_is_reminded_of_its_rollback(empty_redis: PrivateRedis) -> None:
    empty_redis.client.set(RedisBrokerKeys("", "celery_delay").promoting, "", ex=60)
    (finding,) = of_level(app_on(empty_redis.url, enabled="drain"), ADVICE)
    assert 'native_delay_enabled is "drain"' in finding.problem
    assert "delay uninstall" in finding.remedy


@redis_only
def test_an_unreachable_broker_is_a_finding(project: Project, own_redis: PrivateRedis) -> None:
    project.write(APP, own_redis.url)
    own_redis.stop()
    told = project.told("doctor", status=1)
    (broker,) = told["findings"]
    assert broker["check"] == "broker"
    assert f"127.0.0.1:{own_redis.port}" in broker["problem"]
    assert "broker_url" in broker["remedy"]


# ---- producers ---------------------------------------------------------------------------------


@redis_only
def test_a_producer_warns_once_that_no_promoter_runs(
    empty_redis: PrivateRedis, project: Project
) -> None:
    """It checks once a minute, hence a new process each time; a running promoter is no warning.

    Nor are tasks overdue for seconds: a worker may be starting, or not show that it promotes.
    """
    project.write(APP, empty_redis.url)
    assert produce(project) == ""
    make_overdue(empty_redis, 1, seconds=3)
    assert produce(project) == ""
    make_overdue(empty_redis, 1)
    said = produce(project)
    assert said.count("nothing promotes") == 1
    assert "1 message(s) overdue, the first for " in said
    assert "run `celery -A PROJ delay promote`" in said

    empty_redis.client.set(RedisBrokerKeys("", "celery_delay").promoting, "", ex=60)
    assert produce(project) == ""  # it promotes, and is late


def produce(project: Project) -> str:
    """The standard error of a process that sends three tasks: two by send_task, one by bulk."""
    code = (
        "from shop import app; from celery_native_delay.bulk import bulk\n"
        "for _ in range(2): app.send_task('shop.remind', countdown=600)\n"
        "with bulk(app) as batch: batch.send('shop.remind', countdown=600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


# ---- RabbitMQ ----------------------------------------------------------------------------------


def test_tasks_that_no_worker_receives_are_found(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, project: Project
) -> None:
    """``delay status`` names the same problem, with the same remedy."""
    settings = {**SETTINGS, "management_url": rabbitmq.management_url}
    project.write(APP, vhost_url, **settings)
    app = app_on(vhost_url, **settings)
    app.conf.task_default_queue = "orders"
    project.delay("declare")
    assert of_level(app, WRONG) == []
    app.send_task("shop.remind", countdown=1)

    (found,) = wait_until(lambda: of_level(app, WRONG) or None, timeout_seconds=PATIENCE_SECONDS)
    assert found.problem == "no worker consumes from orders: 1 message(s) lie there"
    told = project.told("doctor", status=1)
    assert [each["check"] for each in told["findings"] if each["level"] == WRONG] == ["workers"]
    said = project.delay("status").stdout
    assert f"wrong: workers: {found.problem}" in said
    assert f"    {found.remedy}" in said
    assert [each["check"] for each in project.told("status")["findings"]] == ["workers"]


@on_all_versions
@pytest.mark.parametrize(
    ("rights", "named"),
    [
        ({"configure": "orders"}, ["configure"]),
        ({"configure": "", "write": "", "read": ""}, ["configure", "write", "read"]),
    ],
)
def test_rabbitmq_a_missing_right_is_one_finding(
    rabbitmq: PrivateRabbitMQ, vhost: str, rights: dict[str, str], named: list[str]
) -> None:
    """Also without the management API, and not one finding for each queue that is missing."""
    url = rabbitmq.add_user(f"clerk-{vhost}", "secret-word", vhost=vhost, **rights)
    with_credentials = rabbitmq.management_url.replace("://", "://guest:guest@")
    for management_url in (with_credentials, "http://127.0.0.1:9"):
        app = app_on(url, management_url=management_url, **SETTINGS)
        (found,) = of_level(app, WRONG)
        assert found.check == "permissions"
        assert f"may not {' or '.join(named)} ^tests\\." in found.problem
        assert f"grant {' and '.join(named)} on ^tests\\." in found.remedy


@on_all_versions
def test_rabbitmq_who_declared_nothing_needs_no_right_to_configure(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """Another user has declared everything."""
    with app_on(vhost_url, **SETTINGS).connection_for_write() as connection:
        connection.default_channel.delays.prepare()
    url = rabbitmq.add_user(f"clerk-{vhost}", "secret-word", vhost=vhost, configure="")
    with_credentials = rabbitmq.management_url.replace("://", "://guest:guest@")
    assert of_level(app_on(url, management_url=with_credentials, **SETTINGS), WRONG) == []


# ---- SQS ---------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.usefixtures("short_hops")
def test_sqs_a_missing_relay_is_found(project: Project, sqs: PrivateSqs) -> None:
    project.write(APP + SHORT_HOPS, sqs.url)
    app = app_on(sqs.url)
    app.conf.task_default_queue = "orders"
    assert "missing" in the_wrong(app, "delay queues").problem
    project.delay("declare")
    assert of_level(app, WRONG) == []
    (silent,) = of_level(app, UNCHECKED)
    assert "whether anything relays from" in silent.problem
    app.send_task("shop.remind", countdown=60)
    (found,) = wait_until(lambda: of_level(app, WRONG) or None)
    assert found.check == "relaying"
    assert "about 1 message(s) have done their wait" in found.problem
    assert "delay promote" in found.remedy
    assert project.told("doctor", status=1)["findings"][0]["check"] == "relaying"


# ---- stores ------------------------------------------------------------------------------------


@pytest.fixture
def folder_url() -> Iterator[str]:
    with running_broker("filesystem", pytest.fail) as broker:
        yield broker.new_space()


@pytest.fixture
def store_app(folder_url: str) -> Celery:
    return app_on_store(folder_url)


def app_on_store(url: str, **settings: Any) -> Celery:
    app = app_on(url, **settings_of(url), **settings)
    app.conf.broker_transport_options = options_of(url)
    return app


def write_on_store(project: Project, url: str) -> None:
    """Make the project's app the one of :func:`app_on_store`."""
    options = str(options_of(url)).replace("{", "{{").replace("}", "}}")
    source = f"{APP}app.conf.broker_transport_options = {options}\n"
    project.write(source, url, **settings_of(url))


def file_of(url: str) -> Path:
    return Path(settings_of(url)["store"].partition("///")[2])


def test_a_missing_store_is_found_and_not_created(folder_url: str, store_app: Celery) -> None:
    found = the_wrong(store_app, "store")
    assert "has no tables native_delay_task and native_delay_record" in found.problem
    assert not file_of(folder_url).exists()
    store_app.send_task("shop.remind", countdown=600)
    assert [each.check for each in of_level(store_app, WRONG)] == ["promoting"]


@pytest.mark.parametrize("kind", ["filesystem", in_ci("filesystem-postgresql"), in_ci("sqla")])
def test_a_store_without_a_dispatcher_is_found(kind: str, project: Project) -> None:
    with running_broker(kind, pytest.fail) as broker:
        url = broker.new_space()
        write_on_store(project, url)
        app = app_on_store(url)
        app.send_task("shop.remind", countdown=600)
        assert [each.check for each in examine(app)] == ["promoting"]
        assert produce(project) == ""  # nothing is overdue
        with project.promoting():
            wait_until(lambda: not examine(app))


def test_a_producer_warns_that_no_dispatcher_runs(folder_url: str, project: Project) -> None:
    app_on_store(folder_url).send_task("shop.remind", countdown=600)
    with sqlite3.connect(file_of(folder_url)) as connection:
        connection.execute("UPDATE native_delay_task SET next_us = next_us - 700000000")
    connection.close()
    write_on_store(project, folder_url)
    assert "run `celery -A PROJ delay promote`" in project.delay("status").stdout
    said = produce(project)
    assert said.count("nothing promotes") == 1


# ---- clocks ------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_clock_that_is_an_hour_slow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a database's; tests/unit/test_redis_server.py has that of a Redis."""
    with running_broker("filesystem-postgresql", pytest.fail) as broker:
        app = app_on_store(broker.new_space())
        app.send_task("shop.remind", countdown=600)
        assert [each for each in examine(app) if each.check == "clocks"] == []
        monkeypatch.setattr(database, "time", lambda: time() - 3600)
        found = the_wrong(app, "clocks")
        assert re.search(r"clock is (59 min|1 h) .*ahead of this machine's", found.problem)


# ---- apps without install() --------------------------------------------------------------------


def test_a_missing_install_and_a_wrong_setting_are_found(project: Project) -> None:
    (project.folder / "shop.py").write_text('from celery import Celery\napp = Celery("shop")\n')
    assert "install(app)" in project.delay("doctor").stderr
    project.write(
        APP.replace("install(app, **{settings!r})", "install(app)\n{settings}"), "redis://"
    )
    source = (project.folder / "shop.py").read_text()
    (project.folder / "shop.py").write_text(f"{source}app.conf.native_delay_declare = 0\n")
    told = project.told("doctor", status=1)
    (finding,) = told["findings"]
    assert finding["check"] == "settings"
    assert "native_delay_declare" in finding["problem"]


# ---- rates -------------------------------------------------------------------------------------


def rated(app: Celery) -> Celery:
    @app.task(name="shop.call_api", shared=False)
    def call_api(tenant: str) -> None: ...

    return app


def of_rates(app: Celery) -> list[Finding]:
    return [each for each in examine(app) if each.check == "rates"]


@redis_only
def test_a_rate_for_an_unknown_task_or_argument_is_found(
    project: Project, empty_redis: PrivateRedis
) -> None:
    def on(rates: dict[str, Any]) -> Celery:
        return rated(app_on(empty_redis.url, rates=rates))

    assert of_rates(on({"shop.call_api": {"limit": "10/s", "key": "tenant"}})) == []
    (found,) = of_rates(on({"shop.cal_api": "10/s"}))
    assert found.level == WRONG
    assert "has shop.cal_api, but this app has no such task" in found.problem
    assert "such as shop.call_api" in found.remedy
    assert found.remedy.endswith("; rates are a matter of workers alone")
    (found,) = of_rates(on({"shop.call_api": {"limit": "10/s", "key": "tenent"}}))
    assert "one of its arguments, tenant; got 'tenent'" in found.problem
    assert found.remedy == "correct the rate; rates are a matter of workers alone"
    project.write(APP, empty_redis.url, rates={"shop.call_api": "10/s"})
    told = project.told("doctor", status=1)
    assert "rates" in [each["check"] for each in told["findings"]]
