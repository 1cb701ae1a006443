"""The grouping of tests when `make test` uses several processes."""

from __future__ import annotations

import pytest

from tests.scheduling import broker_of, scope_of

pytestmark = pytest.mark.tools

ACCEPTANCE, INTEGRATION = "tests/acceptance", "tests/integration"
CONFORMANCE = "tests/conformance/test_conformance.py"


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        (f"{ACCEPTANCE}/test_tasks.py::test_it[rabbitmq-3.10]", "RabbitMQ 3.10: test_tasks"),
        (
            f"{ACCEPTANCE}/test_pools.py::test_it[rabbitmq-4.3-gevent]",
            "RabbitMQ 4.3: test_pools",
        ),
        (
            f"{ACCEPTANCE}/test_pools.py::test_it[gevent-rabbitmq-4.3]",
            "RabbitMQ 4.3: test_pools",
        ),
        (f"{INTEGRATION}/test_window.py::test_it[rabbitmq-4.0]", "RabbitMQ 4.0: mortal"),
        (f"{CONFORMANCE}::test_it[rabbitmq-4.3-topic]", "RabbitMQ 4.3: mortal"),
        (f"{CONFORMANCE}::test_it[valkey-topic]", "conformance on valkey"),
        (
            f"{ACCEPTANCE}/test_tasks.py::test_it[redis-queue]",
            "tasks on Redis",
        ),
        (f"{INTEGRATION}/test_sqs_relay.py::test_it[1]", "SQS: relay"),
        ("tests/unit/test_sqs.py::test_it", "tests/unit/test_sqs.py::test_it"),
        ("tests/spark/test_fan_out.py::test_it[queue]", "Spark"),
    ],
)
def test_tests_that_share_a_broker_are_one_group(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


def test_groups_of_one_rabbitmq_version_share_a_broker() -> None:
    assert broker_of("RabbitMQ 4.3: mortal") == broker_of("RabbitMQ 4.3: test_tasks")
    assert broker_of("RabbitMQ 4.3: mortal") != broker_of("RabbitMQ 3.10: mortal")


def test_pytest_xdist_still_has_our_hooks() -> None:
    """Without the hooks all tests are spread over all processes and take much longer."""
    scheduler = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert callable(scheduler._split_scope)
    assert callable(scheduler._assign_work_unit)
