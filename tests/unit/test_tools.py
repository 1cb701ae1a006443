"""Tools of the tests: their groups, mutations, and the second run of failed tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutations import MUTATIONS, ROOT
from tests.scheduling import broker_of, scope_of

pytestmark = pytest.mark.tools

# ---- groups of tests in several processes --------------------------------------------------------


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("acceptance/test_tasks.py::test_it[rabbitmq-3.10]", "RabbitMQ 3.10: test_tasks"),
        ("acceptance/test_pools.py::test_it[rabbitmq-4.3-gevent]", "RabbitMQ 4.3: test_pools"),
        ("acceptance/test_pools.py::test_it[gevent-rabbitmq-4.3]", "RabbitMQ 4.3: test_pools"),
        ("acceptance/test_tasks.py::test_it[redis-queue]", "tasks on Redis"),
        ("integration/test_window.py::test_it[rabbitmq-4.0]", "RabbitMQ 4.0: mortal"),
        ("integration/test_sqs_relay.py::test_it[1]", "SQS: relay"),
        ("conformance/test_conformance.py::test_it[rabbitmq-4.3]", "RabbitMQ 4.3: mortal"),
        ("conformance/test_conformance.py::test_it[valkey-topic]", "conformance on valkey"),
        ("unit/test_sqs.py::test_it", "tests/unit/test_sqs.py::test_it"),
        ("spark/test_fan_out.py::test_it[queue]", "Spark"),
    ],
)
def test_tests_that_share_a_broker_are_one_group(nodeid: str, scope: str) -> None:
    assert scope_of(f"tests/{nodeid}") == scope


def test_groups_of_one_rabbitmq_version_share_a_broker() -> None:
    assert broker_of("RabbitMQ 4.3: mortal") == broker_of("RabbitMQ 4.3: test_tasks")
    assert broker_of("RabbitMQ 4.3: mortal") != broker_of("RabbitMQ 3.10: mortal")


def test_pytest_xdist_still_has_our_hooks() -> None:
    """Without the hooks all tests are spread over all processes and take much longer."""
    scheduler = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert callable(scheduler._split_scope)
    assert callable(scheduler._assign_work_unit)


# ---- scripts/test_alone.sh -----------------------------------------------------------------------


NAME = "test_it.py::test_it"

FAILS_AT_FIRST = """
from pathlib import Path

def test_it():
    ran, before = Path("ran"), Path("ran").exists()
    ran.touch()
    assert before
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose only test has just failed, and passes from now on."""
    for folder in ("scripts", "tests", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test_alone.sh", tmp_path / "scripts")
    python = tmp_path / ".venv/bin/python"
    plain = "PYTEST_ADDOPTS= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
    python.write_text(f'#!/bin/sh\n{plain} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "tests/failed_beside_others.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(FAILS_AT_FIRST)
    assert subprocess.run([python, "-m", "pytest"], cwd=tmp_path, capture_output=True).returncode
    return tmp_path


def alone(project: Path, status: str) -> tuple[int, str]:
    done = subprocess.run(
        [project / "scripts/test_alone.sh", status], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_a_test_that_passes_alone_is_let_through_and_told_at_the_end(project: Path) -> None:
    status, said = alone(project, "1")
    assert (status, said.count("1 passed")) == (0, 1)
    status, told = alone(project, "--told")
    assert (status, told.splitlines()[1:]) == (0, [NAME])


def test_a_test_let_through_before_fails_and_other_errors_are_passed_on(project: Path) -> None:
    (project / "tests/failed_beside_others.txt").write_text(f"{NAME}\n")
    status, said = alone(project, "1")
    assert (status, said.count(NAME), "passed" in said) == (1, 1, False)
    assert alone(project, "--told") == (0, "")
    assert alone(project, "4") == (4, "")


# ---- scripts/mutations.py ------------------------------------------------------------------------


def test_each_mutation_changes_one_place_and_names_tests_that_exist() -> None:
    for each in MUTATIONS:
        text = (ROOT / "celery_native_delay" / each.file).read_text()
        assert text.count(each.before) == 1, (each.file, each.before)
        assert (ROOT / "tests" / each.tests.split()[0]).exists(), each.tests
    assert len(MUTATIONS) >= 20
