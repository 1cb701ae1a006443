"""The grouping and order of tests when `make test` uses several processes."""

from __future__ import annotations

import pytest

from tests.scheduling import broker_of, ranks_of, scope_of

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
        ("tests/unit/test_sqs_entry.py::test_it", "tests/unit/test_sqs_entry.py::test_it"),
        ("tests/spark/test_fan_out.py::test_it[queue]", "Spark"),
    ],
)
def test_tests_that_share_a_broker_are_one_group(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


@pytest.mark.parametrize("test", ["test_it", "test_it[redis]", "test_it[4.3]"])
def test_any_other_test_is_its_own_group(test: str) -> None:
    assert scope_of(test) == test
    assert broker_of(test) is None


def test_groups_of_one_rabbitmq_version_share_a_broker() -> None:
    assert broker_of("RabbitMQ 4.3: mortal") == broker_of("RabbitMQ 4.3: test_tasks")
    assert broker_of("RabbitMQ 4.3: mortal") != broker_of("RabbitMQ 3.10: mortal")


def test_the_longest_groups_start_first() -> None:
    order = [
        f"{CONFORMANCE}::test_it[rabbitmq-4.3]",
        "tests/spark/test_sink.py::test_it",
        f"{ACCEPTANCE}/test_configuration.py::test_it[rabbitmq-3.10]",
        f"{ACCEPTANCE}/test_tasks.py::test_it[rabbitmq-3.10]",
        f"{ACCEPTANCE}/test_redis_fleets.py::test_it",
        "tests/unit/test_address.py::test_it",
    ]
    ranks = ranks_of(order)
    assert [ranks[nodeid] for nodeid in order] == sorted(set(ranks.values()))


def test_busy_tests_and_waiting_ones_take_turns() -> None:
    waiting = [f"{CONFORMANCE}::test_it[{broker}]" for broker in ("redis", "sqs")]
    busy = [f"{ACCEPTANCE}/test_store.py::test_{number}" for number in range(4)]
    ranks = ranks_of([*waiting, *busy])
    order = sorted(ranks, key=lambda nodeid: ranks[nodeid])
    assert order == [waiting[0], *busy[:2], waiting[1], *busy[2:]]


def test_pytest_xdist_still_has_our_hooks() -> None:
    """Without the hooks all tests are spread over all processes and take much longer."""
    scheduler = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert callable(scheduler._split_scope)
    assert callable(scheduler._assign_work_unit)
