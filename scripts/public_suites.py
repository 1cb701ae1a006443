"""The public tests of Celery, kombu, Flower, django-celery-beat and RedBeat, with and without us.

The projects ship their tests in their source distributions. Each suite runs as released and in
further modes: with our transports registered, with delayed delivery switched on in every AMQP
connection, or with ``install(app)`` on every Celery app. What fails as released may fail with us;
anything else is a difference. A difference that EXPLAINED does not explain is exit 1.

    python scripts/public_suites.py                   # make public-suites
    python scripts/public_suites.py --work DIR        # keep and reuse what was downloaded
    python scripts/public_suites.py --only flower     # one suite; may be given several times
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery_native_delay.testing import private_rabbitmq, private_redis

ROOT = Path(__file__).resolve().parent.parent

#: What the suites import; brokers and clouds they can do without are skipped or fail alike.
REQUIREMENTS = [
    *["boto3", "freezegun", "gevent", "hypothesis<7", "msgpack", "packaging", "Pyro4"],
    *["pytest<9", "pytest-celery", "pytest-click", "pytest-freezer", "pytest-order"],
    *["pytest-rerunfailures", "pytest-subtests", "pytest-timeout", "pytz", "pyyaml"],
    *["redis", "sqlalchemy", "cryptography", "pydantic"],
    *["django", "ephem", "pytest-django", "fakeredis[lua]"],
]

RELEASES = {
    "celery": "5.7.0",
    "kombu": "5.7.0",
    "flower": "2.2.0",
    "django-celery-beat": "2.9.0",
    "celery-redbeat": "2.4.2",
}

#: A pytest plugin each, which needs no cooperation of the tested code.
MODES = {
    "as released": "",
    "installed": (
        "from celery import Celery\n"
        "from celery_native_delay import install\n"
        "made = Celery.__init__\n"
        "def make(self, *args, **kwargs):\n"
        "    made(self, *args, **kwargs)\n"
        "    install(self)\n"
        "Celery.__init__ = make\n"
    ),
    "registered": "import celery_native_delay",
    "switched on": (
        "import celery_native_delay\n"
        "from functools import partial\n"
        "from celery_native_delay.transports.rabbitmq import transport\n"
        "def establish_connection(self):\n"
        "    if self.Connection is transport.pyamqp.Connection:  # not a test's own\n"
        "        self.Connection = partial(transport.Connection, native_delay=True)\n"
        "    return transport.pyamqp.Transport.establish_connection(self)\n"
        "transport.Transport.establish_connection = establish_connection\n"
    ),
}

MODES["with our pages"] = (
    "from celery_native_delay.flower import install as add_pages\nadd_pages()\n"
    + MODES["installed"]
)


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    project: str
    tests: Sequence[str]
    modes: Sequence[str] = ("installed",)
    broker: str = ""
    """The broker of the tests, a private one: "rabbitmq", "redis" or "" for none."""
    url_variable: str = "TEST_BROKER"
    """The environment variable with which the tests find the broker."""
    timeout_seconds: int = 120


#: Their own time limits are for idle machines.
_PATIENT = """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.timeout({timeout_seconds}), append=False)
"""

_TRANSPORTS = ("registered", "switched on")
_UNIT = ["t/unit/app", "t/unit/worker", "t/unit/tasks", "t/unit/bin"]

SUITES = {
    "kombu unit": Suite("kombu", ["t/unit"], _TRANSPORTS),
    "kombu integration": Suite(
        "kombu", ["t/integration/test_py_amqp.py"], _TRANSPORTS, broker="rabbitmq"
    ),
    "celery unit": Suite("celery", _UNIT, _TRANSPORTS),
    "celery on rabbitmq": Suite(
        "celery", ["t/integration"], broker="rabbitmq", timeout_seconds=300
    ),
    "celery on redis": Suite("celery", ["t/integration"], broker="redis", timeout_seconds=300),
    "flower": Suite("flower", ["tests/unit"], ["installed", "with our pages"]),
    "django-celery-beat": Suite(
        "django-celery-beat", ["t/unit"], broker="redis", url_variable="CELERY_BROKER_URL"
    ),
    "redbeat": Suite("celery-redbeat", ["tests"]),
}

#: Why a test fails with us, by the end of the test's name.
EXPLAINED = {
    "test_inspect.py::test_Inspect::test_scheduled": (
        "a delayed task waits in the broker, so `inspect scheduled` finds none in the worker"
    ),
}

_OUTCOME = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?)")


def main() -> int:
    """Run everything; 1 when a test fails with us that passes as released."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="where to keep environment and sources")
    for project, release in RELEASES.items():
        parser.add_argument(f"--{project}", default=release)
    parser.add_argument("--only", choices=SUITES, action="append")
    parser.add_argument("--tests", nargs="+", help="these tests of the suite only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        python = environment(work, options)
        results = [run(python, work, suite, options) for suite in options.only or SUITES]
    return 0 if all(results) else 1


def release_of(project: str, options: argparse.Namespace) -> str:
    """The tested release of a project, such as "5.7.0"."""
    return str(getattr(options, project.replace("-", "_")))


def environment(work: Path, options: argparse.Namespace) -> Path:
    """A virtual environment with the tested releases, their sources beside it."""
    python = work / "venv/bin/python"
    if not python.exists():
        venv.create(work / "venv", with_pip=True)
        releases = [f"{project}=={release_of(project, options)}" for project in RELEASES]
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *releases, *REQUIREMENTS], check=True)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--editable", ROOT], check=True)
        for release in releases:
            download = [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", work]
            subprocess.run([*download, release], check=True)
    for archive in work.glob("*.tar.gz"):
        with tarfile.open(archive) as sources:
            # Only tests and what they read: the package beside them would hide the installed one.
            tests = r"[^/]+/(t/|tests/|docs/|setup.cfg|pyproject)"
            wanted = [each for each in sources if re.match(tests, each.name)]
            sources.extractall(work, members=wanted, filter="data")
    return python


@contextmanager
def broker_of(suite: Suite) -> Iterator[dict[str, str]]:
    """Environment variables with which the tests find a new broker and a new result backend."""
    if not suite.broker:
        yield {}
        return
    with private_rabbitmq(management=False) as rabbitmq, private_redis() as redis:
        yield {
            "RABBITMQ_HOST": "127.0.0.1",
            "RABBITMQ_5672_TCP": str(rabbitmq.port),
            suite.url_variable: rabbitmq.url if suite.broker == "rabbitmq" else redis.url,
            "TEST_BACKEND": redis.url,
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(redis.port),
        }


def run(python: Path, work: Path, name: str, options: argparse.Namespace) -> bool:
    """One suite in every mode; whether each difference to the tests as released is explained."""
    suite = SUITES[name]
    sources = f"{suite.project.replace('-', '_')}-{release_of(suite.project, options)}"
    known: set[str] = set()
    good = True
    for mode in ("as released", *suite.modes):
        patient = _PATIENT.format(timeout_seconds=suite.timeout_seconds)
        (work / "native_delay_mode.py").write_text(MODES[mode] + patient)
        log = work / f"{name}-{mode}.log".replace(" ", "_")

        def run_tests(tests: Sequence[str], log: Path = log) -> tuple[set[str], str]:
            # A broker each: some of their tests leave messages behind.
            with broker_of(suite) as variables:
                return outcomes(python, work / sources, suite, tests, variables, log)

        failed, counts = run_tests(options.tests or suite.tests)
        print(f"{name:20} {mode:15} {counts or f'did not run, see {log}'}", flush=True)
        good = good and bool(counts)
        if mode == "as released":
            known = failed
        elif extra := sorted(failed - known):
            # Once more alone: some of their tests fail now and then by themselves.
            failed, _ = run_tests(extra, log.with_suffix(".again"))
            for test in sorted(failed):
                reason = next((EXPLAINED[end] for end in EXPLAINED if test.endswith(end)), "")
                print(f"    only with us: {test}{reason and f': {reason}'}", flush=True)
                good = good and bool(reason)
    return good


def outcomes(
    python: Path,
    folder: Path,
    suite: Suite,
    tests: Sequence[str],
    variables: dict[str, str],
    log: Path,
) -> tuple[set[str], str]:
    """What failed, and pytest's counts."""
    command = [python, "-m", "pytest", "-q", "-p", "native_delay_mode", "-p", "no:cacheprovider"]
    # Only their own configuration counts, and warnings of newer tools are not the subject.
    command += ["-W", "ignore", "--continue-on-collection-errors", *tests]
    environ = os.environ | variables | {"PYTHONPATH": str(log.parent)}
    environ["PATH"] = f"{python.parent}:{environ['PATH']}"  # some tests run `celery`
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    counts = _COUNTS.findall(done.stdout.strip().rpartition("\n")[2])
    if done.returncode > 1:  # pytest itself failed
        counts = []
    return set(_OUTCOME.findall(done.stdout)), ", ".join(counts)


if __name__ == "__main__":
    sys.exit(main())
