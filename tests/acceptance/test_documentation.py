"""README and docs are correct: their code runs, their commands exist, and their output is shown."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from kombu import Connection
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import celery_native_delay
from benchmarks.command import SCENARIOS
from celery_native_delay import Delay, DelaySettings, Rate, RetryAfter, install
from celery_native_delay.app.install import installation_of
from celery_native_delay.app.schedules import Schedules
from celery_native_delay.cli import delay
from celery_native_delay.clock import Clock
from celery_native_delay.rates.line import Asked
from celery_native_delay.settings import setting_names
from celery_native_delay.testing import PrivateRedis, require_rabbitmq, require_redis
from example_project.private_sqs import private_sqs, require_sqs
from pytest_celery_native_delay import installed
from scripts.reference_pages import REFERENCE
from tests.brokers import on_one_version
from tests.documents import EXAMPLES, PAGES, ROOT, Example, code_beside, only, shown
from tests.lines import lines_of as lines_of_rates
from tests.processes import output_of, processes_of
from tests.waiting import PATIENCE_SECONDS, wait_until

pytest_plugins = ["pytester"]

#: A shell command and the comment after it.
CONSOLE_LINES = [
    (str(example), line)
    for example in EXAMPLES
    if example.language == "console"
    for line in re.findall(r"^\$ (.+?)(?:\s+#.*)?$", example.text, re.M)
]


def lines_of(*programs: str) -> pytest.MarkDecorator:
    """Parametrize a test with each documented command line of *programs*, without duplicates."""
    found = {line: where for where, line in reversed(CONSOLE_LINES) if line.startswith(programs)}
    return pytest.mark.parametrize("line", found)


def test_every_python_example_is_run_by_a_test() -> None:
    """A test runs an example by asking for its name with `only`, `shown` or `ran`."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    asked = set(re.findall(r"(?:shown|only|named|ran)\([\"']([\w-]+)[\"']", tests))
    for example in EXAMPLES:
        if example.language == "python":
            assert example.name in asked, f"{example} has no name that a test asks for"
        else:
            assert example.language in ("console", "text") or example.language.startswith("{")


def ran(name: str, names: dict[str, Any] | None = None, **changed: str) -> dict[str, Any]:
    """Run the only example of a name; the names that it has defined."""
    names = {} if names is None else names
    text = only(name).text
    for before, after in changed.items():
        text = text.replace(before, after)
    exec(text, names)
    return names


@pytest.fixture
def shop(store_redis: PrivateRedis) -> Iterator[Celery]:
    """An app whose tasks wait in Redis."""
    with Celery("shop", broker=store_redis.url, set_as_current=False) as app:
        yield app


def the_message(example: Example, url: str, queue: str) -> Any:
    """Run an example on RabbitMQ; the message that comes to a queue after its wait."""
    with Connection(url, transport_options={"native_delay": True}) as connection:
        # On a busy machine the first publish takes longer than its delay.
        connection.default_channel.delays.prepare()
    names: dict[str, Any] = {}
    exec(example.text.replace("amqp://", url), names)
    if "app" in names:
        names["app"].send_task("shop.remind", countdown=5)
    with Connection(url) as connection:
        channel = connection.default_channel
        assert channel.basic_get(queue) is None
        return wait_until(lambda: channel.basic_get(queue, no_ack=True))


@on_one_version
@shown("celery")
def test_the_celery_example_is_an_app_whose_tasks_wait(example: Example, vhost_url: str) -> None:
    assert the_message(example, vhost_url, "celery").headers["task"] == "shop.remind"


@on_one_version
@pytest.mark.ci
@shown("kombu")
def test_the_kombu_example_publishes_a_message_that_waits(example: Example, vhost_url: str) -> None:
    assert "ada@example.com" in the_message(example, vhost_url, "emails").body


def test_the_commands_for_waiting_tasks_work_as_shown(shop: Celery) -> None:
    install(shop)
    task_id = shop.send_task("shop.remind", ("ada",), countdown=60).id
    ran("see", {"app": shop, "task_id": task_id})
    assert Delay(shop).ls().tasks == ()


def test_a_key_has_one_task_as_shown(shop: Celery) -> None:
    install(shop)

    def task(*args: Any) -> None: ...

    tasks = ("reindex", "notify", "import_")
    names = {name: shop.task(name=f"shop.{name}", shared=False)(task) for name in tasks}
    names |= {"app": shop, "install": install}
    for _ in range(2):
        ran("keys", names)
    # shop.notify was due at once, shop.import_ was cancelled: both were handed over.
    assert [task.name for task in Delay(shop).ls()] == ["shop.reindex"]
    ran("keys-declared", names)
    calls = [names["reindex_user"].delay("ada") for _ in range(2)]
    assert calls[1].replaced == calls[0].id
    ran("keys-collect", names)
    calls = [names["index_pages"].delay("ada", page) for page in range(50)]
    assert calls[49].replaced == calls[48].id
    assert names["index_pages"].delay("ada", 51).replaced is None


def test_rates_work_as_shown(
    shop: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turned_away = SimpleNamespace(status_code=429, headers={"Retry-After": "7"})
    requests = SimpleNamespace(get=lambda url: turned_away)
    monkeypatch.setitem(sys.modules, "requests", requests)
    names = ran("retry-after", ran("rates", {"app": shop}))
    rates = installation_of(shop).settings().rates_by_task
    assert rates["shop.call_api"] == (Rate("100/m", key="tenant", burst=10, name="shop.call_api"),)
    with pytest.raises(RetryAfter, match="7"):
        names["call_api"]("ada", "orders")
    with lines_of_rates(shop) as lines:
        for _ in range(12):
            lines.ask([Asked("shop.call_api", "ada", rates["shop.call_api"][0])])
    ran("see-rates", names)
    assert capsys.readouterr().out == "shop.call_api ada 100/m, burst 10 2 0.1\n"


def test_schedules_work_as_shown(shop: Celery, capsys: pytest.CaptureFixture[str]) -> None:
    shop.conf.result_expires = None
    ran("schedules", {"app": shop})
    Schedules(shop).publish()
    ran("schedules-api", {"app": shop})
    assert Delay(shop).count() == 2
    nightly, ping = capsys.readouterr().out.splitlines()
    assert nightly.startswith("nightly 20")
    assert ping.startswith("ping 20")


def test_the_examples_of_the_test_clock_pass(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker runs for them."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(
        shop=only("clock-app").text,
        conftest=only("clock-conftest").text,
        test_reminder=only("clock-test").text,
        test_cancelling=only("clock-cancel").text,
        test_rates=only("clock-rates").text,
        test_unittest=only("clock-unittest").text,
    )
    pytester.runpytest_subprocess("-Werror").assert_outcomes(passed=4)


@pytest.mark.ci
def test_the_example_test_passes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a private node, whose management API the doctor reads."""
    installed(require_rabbitmq)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(
        conftest=only("private-app").text,
        test_reminder=only("test-reminder").text,
        test_doctor="""
            from celery_native_delay.app.doctor import examine

            def test_doctor(app):
                app.send_task("shop.remind", countdown=60)
                assert "management" not in "".join(map(str, examine(app)))
        """,
    )
    pytester.runpytest_subprocess("-Werror").assert_outcomes(passed=2)


@pytest.mark.ci
def test_the_private_brokers_work_as_shown(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(require_rabbitmq)
    installed(require_redis)
    installed(require_redis, embedded=True)
    monkeypatch.chdir(short_path)
    ran("private-brokers")
    said = capsys.readouterr().out
    assert f"redis+socket://{short_path}/var/broker/redis.sock\n" in said


def test_the_broker_for_development_keeps_waiting_tasks(short_path: Path) -> None:
    """Ctrl-C ends the broker cleanly; after the next start the task still waits.

    Scripts start commands with `&`, and then the commands ignore Ctrl-C unless they handle it.
    """
    installed(require_redis, embedded=True)
    (line,) = {line for _, line in CONSOLE_LINES if "celery_native_delay.testing" in line}
    command = [sys.executable, *shlex.split(line)[1:]]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    for time, started in enumerate((command, ignoring), start=1):
        with subprocess.Popen(
            started, cwd=short_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                assert url == f"redis+socket://{short_path}/var/broker/redis.sock"
                with install(Celery("shop", broker=url, set_as_current=False)) as app:
                    if time == 1:
                        app.send_task("shop.remind", countdown=600)
                    assert Delay(app).count() == 1
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=PATIENCE_SECONDS)
            finally:
                process.kill()
        assert (process.returncode, said) == (0, "")
    assert processes_of(short_path.name) == []


def test_the_sqs_example_is_an_app_whose_delayed_tasks_wait() -> None:
    installed(require_sqs)
    with private_sqs() as sqs:
        names = ran("celery-sqs", **{"sqs://": sqs.url})
        names["app"].send_task("shop.remind", countdown=60)
        waiting = "ApproximateNumberOfMessagesDelayed"
        url = sqs.client.get_queue_url(QueueName="celery")["QueueUrl"]
        found = sqs.client.get_queue_attributes(QueueUrl=url, AttributeNames=[waiting])
        assert found["Attributes"][waiting] == "1"


def test_the_store_example_is_an_app_whose_delayed_tasks_wait(tmp_path: Path) -> None:
    app = ran("celery-store", **{"/var/lib/shop": str(tmp_path)})["app"]
    (tmp_path / "queues").mkdir()
    app.send_task("shop.remind")
    app.send_task("shop.remind", countdown=60)
    assert Delay(app).count() == 1
    assert len(list((tmp_path / "queues").iterdir())) == 1


def test_transactions_of_sqlalchemy_work_as_shown(tmp_path: Path) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Payment(Base):
        __tablename__ = "payments"
        order_id: Mapped[int] = mapped_column(primary_key=True)

    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    app = Celery("shop", broker="memory://", set_as_current=False)
    install(app, store=url)

    @app.task(name="shop.remind")
    def remind(order_id: int) -> None: ...

    names = {"app": app, "engine": engine, "Session": Session, "order": Order(), "remind": remind}
    ran("transactions-sqlalchemy", names)
    assert Delay(app).count() == 1
    names |= {"Payment": Payment}
    assert ran("transactions-once", names)["charge"].once == "transaction"
    ran("transactions-once-sqlalchemy", names, acks_late="name='paid', acks_late")
    with Clock(app) as clock:
        names["charge"].delay(7)
        clock.advance(seconds=1)
    with Session(engine) as session:
        assert session.scalars(select(Payment.order_id)).all() == [7]
    engine.dispose()


@on_one_version
@pytest.mark.ci
def test_the_bulk_example_sends_tasks_that_wait(
    vhost_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran("bulk", ran("celery", **{"amqp://": vhost_url}))
    printed, _, _ = code_beside("bulk", "print(batch.result)").rpartition(" in ")
    assert capsys.readouterr().out.startswith(f"{printed} in ")
    with Connection(vhost_url) as connection:
        assert connection.default_channel.basic_get("reminders") is None


def test_the_transports_work_as_shown() -> None:
    ran("transport-for")


def test_the_pgmq_example_is_an_app_whose_broker_delays() -> None:
    pytest.importorskip("celery_native_delay.transports.pgmq", reason="kombu before 5.7")
    transport = ran("celery-pgmq")["app"].connection_for_write().get_transport_cls()
    assert transport.__module__ == "celery_native_delay.transports.pgmq"


@shown("settings")
def test_documented_settings_are_accepted(example: Example) -> None:
    app = Celery("shop", broker="amqp://", set_as_current=False)
    before = dict(app.conf)
    exec(example.text, {"app": app})
    changed = {name for name in dict(app.conf) if app.conf[name] != before.get(name)}
    assert changed
    assert all(name.startswith("native_delay_") for name in changed)
    install(app)
    assert installation_of(app).settings() != DelaySettings()


def test_settings_are_taken_from_the_configuration_and_from_keywords() -> None:
    names = ran("settings-both", {"Celery": Celery, "install": install})
    found = installation_of(names["app"]).settings()
    assert found == DelaySettings(namespace="shop", store_timeout_seconds=2)


def test_the_documented_flower_configuration_adds_the_page() -> None:
    """Runs in a separate process, because it changes Flower's classes."""
    asked = f"{only('flower-config').text}\nfrom flower import command; print(command.Flower)"
    assert "celery_native_delay.flower" in output_of(sys.executable, "-c", asked)


def test_metrics_are_exposed_by_one_call(store_redis: PrivateRedis) -> None:
    """Runs in a separate process with a fresh Prometheus registry."""
    app = only("celery-redis").text.replace("redis://", store_redis.url)
    asked = "from prometheus_client import generate_latest; print(generate_latest().decode())"
    program = "\n".join([app, only("expose").text, asked, "exposed.close()"])
    assert "celery_delay_events_up" in output_of(sys.executable, "-c", program)


def test_the_first_five_minutes_work_as_shown(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker, app, worker and a delayed task: each command of the page runs unchanged."""
    installed(require_redis, embedded=True)
    page = [example for example in EXAMPLES if example.page == "docs/start.md"]
    (short_path / "shop.py").write_text(only("start").text)
    console = "".join(example.text for example in page if example.language == "console")
    lines = dict.fromkeys(re.findall(r"^\$ (.+)$", console, re.M))
    (promised,) = (example.text for example in page if example.language == "text")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    task_id = ""

    @contextmanager
    def running(beginning: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        (line,) = (line for line in lines if line.startswith(beginning))
        line = line.replace("6d8f3d9a-7b52-4a6c-9d0e-0f1f7f0c4b1e", task_id)
        # On a slow machine the task must still wait when the next commands have started.
        line = line.replace("countdown=30", "countdown=3600")
        with subprocess.Popen(
            shlex.split(line), cwd=short_path, text=True, stdout=subprocess.PIPE, **options
        ) as process:
            try:
                yield process
                process.send_signal(signal.SIGINT)
                process.wait(timeout=PATIENCE_SECONDS)
            finally:
                process.kill()

    def said(beginning: str) -> str:
        with running(beginning) as process:
            out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, out
        return str(out)

    with running("python -m celery_native_delay.testing") as broker:
        assert broker.stdout is not None
        monkeypatch.setenv("BROKER_URL", broker.stdout.readline().strip())
        with running("celery -A shop worker", stderr=subprocess.STDOUT) as worker:
            assert worker.stdout is not None
            log = iter(worker.stdout.readline, "")
            assert any("ready." in line for line in log)
            said("python -c")
            headings, row, total = said("celery -A shop delay ls").splitlines()
            (expected,) = re.findall(r"^due .+$", console, re.M)
            assert headings.split() == expected.split()
            task_id = re.search(r"shop\.remind +(\S+)", row)[1]  # type: ignore[index]
            assert re.search(r"shop\.remind .+ celery +\('ada',\) +{}$", row)
            assert f"\n{total}\n" in console
            said("celery -A shop delay run-now")
            assert any(promised.strip() in line for line in log)
            said("celery -A shop delay doctor")


@lines_of("celery ")
def test_every_celery_command_exists_with_its_options(line: str) -> None:
    line = re.sub(r" > .*| -A shop| -b \S+", "", line)
    words = shlex.split(line)[1:]
    command: Any = celery_command
    path = []
    while isinstance(command, click.Group) and words:
        path.append(words.pop(0))
        command = delay if path == ["delay"] else command.commands[path[-1]]
    known = {option for param in command.params for option in param.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
    if path[0] == "delay" and path[-1] != "flower":
        assert "--json" in known
        command.make_context(path[-1], words, obj=SimpleNamespace(app=Celery(set_as_current=False)))


def test_every_delay_command_in_a_sentence_exists() -> None:
    """Only `delay capacity` stands among what we left out."""
    words = r"`(?:celery -A \w+ )?delay\s+([a-z-]+)"
    named = {name for page in PAGES for name in re.findall(words, page.read_text())}
    assert named - set(delay.commands) == {"capacity"}


def test_no_page_links_to_pypi_or_a_site_before_the_first_release() -> None:
    """Before the release, these addresses could belong to another project."""
    paths = [
        *PAGES,
        *ROOT.glob("*.md"),
        ROOT / "pyproject.toml",
        *(ROOT / ".github").rglob("*.yml"),
    ]
    named = re.compile(
        r"https?://[^\s)>\"']*celery[-_]native|pip install '?celery_native_delay(?!\[\w+\] @ )"
    )
    found = {str(path.relative_to(ROOT)): named.findall(path.read_text()) for path in paths}
    assert {where: promised for where, promised in found.items() if promised} == {}


@lines_of("pip ", "make ", "python -m benchmarks")
def test_every_extra_target_and_benchmark_exists(line: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert set(re.findall(r"(?:celery_native_delay|\.)\[(\w+)\]", line)) <= set(extras)
    words = shlex.split(line.replace("--only", ""))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:.*## ", (ROOT / "Makefile").read_text(), re.M)
    if words[0] == "python":
        assert set(words[3:]) <= set(SCENARIOS)


def test_at_most_five_targets_of_benchmarks_are_open() -> None:
    assert (ROOT / "benchmarks/results.md").read_text().count("**not met**") <= 5


def test_the_docs_show_only_tested_programs() -> None:
    known = ("celery ", "pip ", "make ", "python -m benchmarks", "python -m celery_native_delay")
    known += ("python -m django ", "python manage.py ")  # run by test_django
    others = {line for where, line in CONSOLE_LINES if not line.startswith(known)}
    start = "".join(example.text for example in EXAMPLES if example.page == "docs/start.md")
    assert all(f"$ {line}\n" in start for line in others)


def test_every_setting_and_public_name_has_its_place_in_the_reference() -> None:
    page = (REFERENCE / "settings.md").read_text()
    assert sorted(re.findall(r"^### `native_delay_(\w+)`$", page, re.M)) == sorted(setting_names())
    api = (REFERENCE / "api-details.rst").read_text()
    listed = re.findall(r"^\.\. \w+:: celery_native_delay\.(\w+)$", api, re.M)
    listed += re.findall(r"^## `(\w+)`$", (REFERENCE / "errors.md").read_text(), re.M)
    assert sorted(set(listed)) == sorted(celery_native_delay.__all__)


def test_the_readme_is_short_and_its_links_work() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    for target in re.findall(r"\]\((?!http)([^)#]+)", readme):
        assert (ROOT / target).exists(), target
