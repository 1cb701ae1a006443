"""kombu's and Celery's own public tests, with their AMQP transport and with ours.

Both projects ship their tests (``t/``) in their source distributions. Each suite runs three times:
as released, with our transports registered, and with delayed delivery switched on in every AMQP
connection. What fails as released may fail with us; anything else is a difference, and exit 1.

    python scripts/public_suites.py            # make public-suites
    python scripts/public_suites.py --work DIR # keep and reuse what was downloaded
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
from pathlib import Path

from celery_native_delay.testing import private_rabbitmq

ROOT = Path(__file__).resolve().parent.parent

#: What the suites import; brokers and clouds they can do without are skipped or fail alike.
REQUIREMENTS = [
    *["boto3", "freezegun", "gevent", "hypothesis<7", "msgpack", "packaging", "Pyro4"],
    *["pytest", "pytest-celery", "pytest-click", "pytest-freezer", "pytest-order"],
    *["pytest-rerunfailures", "pytest-subtests", "pytest-timeout", "pytz", "pyyaml"],
    *["redis", "sqlalchemy"],
]

SUITES = {
    "kombu unit": ("kombu", ["t/unit"]),
    "kombu integration (RabbitMQ)": ("kombu", ["t/integration/test_py_amqp.py"]),
    "celery unit": ("celery", ["t/unit/app", "t/unit/worker", "t/unit/tasks", "t/unit/bin"]),
}

#: A pytest plugin each; the last one needs no cooperation of the tested code.
MODES = {
    "as released": "",
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

_OUTCOME = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?)")


def main() -> int:
    """Run everything; 1 when a test fails with us that passes as released."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="where to keep environment and sources")
    parser.add_argument("--celery", default="5.7.0")
    parser.add_argument("--kombu", default="5.7.0")
    parser.add_argument("--only", choices=SUITES, action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        python = environment(work, options)
        results = [run(python, work, suite, options) for suite in options.only or SUITES]
    return 0 if all(results) else 1


def environment(work: Path, options: argparse.Namespace) -> Path:
    """A virtual environment with the tested releases, their sources beside it."""
    python = work / "venv/bin/python"
    if not python.exists():
        venv.create(work / "venv", with_pip=True)
        releases = [f"{name}=={getattr(options, name)}" for name in ("celery", "kombu")]
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", *releases, *REQUIREMENTS], check=True)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--editable", ROOT], check=True)
        for release in releases:
            download = [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", work]
            subprocess.run([*download, release], check=True)
    for archive in work.glob("*.tar.gz"):
        with tarfile.open(archive) as sources:
            # Only the tests: the package beside them would hide the installed one.
            wanted = [m for m in sources if re.match(r"[^/]+/(t/|setup.cfg|pyproject)", m.name)]
            sources.extractall(work, members=wanted, filter="data")
    return python


def run(python: Path, work: Path, suite: str, options: argparse.Namespace) -> bool:
    """One suite in every mode; whether no mode fails more than as released."""
    project, paths = SUITES[suite]
    folder = work / f"{project}-{getattr(options, project)}"
    known: set[str] | None = None
    same = True
    for mode, plugin in MODES.items():
        (work / "native_delay_mode.py").write_text(plugin)
        log = work / f"{suite}-{mode}.log".replace(" ", "_")
        # A broker each: some of their tests leave messages behind.
        with private_rabbitmq(management=False) as broker:
            failed, counts = run_tests(python, folder, paths, broker.port, log)
            print(f"{suite:30} {mode:12} {counts or f'did not run, see {log}'}", flush=True)
            if known is None:
                known = failed
            elif extra := sorted(failed - known):
                # Once more alone: some of their tests fail now and then by themselves.
                failed, _ = run_tests(python, folder, extra, broker.port, log.with_suffix(".again"))
                for test in sorted(failed):
                    print(f"    only with us: {test}", flush=True)
        same = same and bool(counts) and failed <= known
    return same


def run_tests(
    python: Path, folder: Path, tests: list[str], port: int, log: Path
) -> tuple[set[str], str]:
    """What failed, and pytest's counts."""
    command = [python, "-m", "pytest", "-q", "-p", "native_delay_mode", "-p", "no:cacheprovider"]
    # Only their own configuration counts, and warnings of newer tools are not the subject.
    command += ["-W", "ignore", "--continue-on-collection-errors", "--timeout", "120", *tests]
    environ = os.environ | {
        "PYTHONPATH": str(log.parent),
        "RABBITMQ_HOST": "127.0.0.1",
        "RABBITMQ_5672_TCP": str(port),
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    counts = _COUNTS.findall(done.stdout.strip().rpartition("\n")[2])
    return set(_OUTCOME.findall(done.stdout)), ", ".join(counts)


if __name__ == "__main__":
    sys.exit(main())
