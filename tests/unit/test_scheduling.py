"""Which tests run in one process, when `make test` uses two."""

from __future__ import annotations

import pytest

from tests.scheduling import scope_of

FOLDER = "tests/acceptance"


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        (f"{FOLDER}/test_tasks.py::test_a_retry[3.10]", "RabbitMQ 3.10"),
        (f"{FOLDER}/test_pools.py::test_a_pool[4.3-gevent]", "RabbitMQ 4.3"),
        (f"{FOLDER}/test_pools.py::test_a_pool[gevent-4.3]", "RabbitMQ 4.3"),
        ("tests/conformance/test_conformance.py::test_it[rabbitmq-4.3-topic]", "RabbitMQ 4.3"),
        ("tests/conformance/test_conformance.py::test_it[valkey-topic]", "conformance of valkey"),
        ("tests/spark/test_fan_out.py::test_it[queue]", "Spark"),
        (f"{FOLDER}/test_versions.py::test_tasks[5.5.3-5.5.4]", "other releases of Celery"),
        (f"{FOLDER}/test_versions.py::test_tasks[5.6.3-5.6.2]", "other releases of Celery"),
    ],
)
def test_tests_of_one_broker_stay_together(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


@pytest.mark.parametrize("test", ["test_it", "test_it[redis]", "test_it[14.3]", "test_it[4.3.6]"])
def test_any_other_test_runs_where_there_is_time(test: str) -> None:
    assert scope_of(test) == test


def test_pytest_xdist_still_asks() -> None:
    """The tests are quietly spread over all processes if it stops asking, and take much longer."""
    scheduler = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert callable(scheduler._split_scope)
