"""Group tests that pytest-xdist runs in one process."""

from __future__ import annotations

import re

#: Tests of mortal_rabbitmq: starting it takes seconds.
_MORTAL = re.compile(r"conformance/|test_(window|isolation|faults)|integration/test_bulk")

_CONFORMING = re.compile(
    r"/test_(\w*conformance)\.py.*[\[-](redis|valkey|filesystem(?:-postgresql)?|sqla|sqs)[\]-]"
)

_STORE = re.compile(r"test_stores\.py.*\[(redis|postgresql|mariadb)[\]-]")


def scope_of(nodeid: str) -> str:
    """The name of a test's group; the test's own id if it needs no group.

    A group has the tests of one file for one RabbitMQ version, or the tests of one file that share
    a worker on another broker, or a store's server. All Spark tests share one session, which takes
    ten seconds to start.
    """
    if nodeid.startswith("tests/spark/"):
        return "Spark"
    if version := re.search(r"[\[-]rabbitmq-(\d+\.\d+|system)[\]-]", nodeid):
        file = nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
        return f"RabbitMQ {version[1]}: {'mortal' if _MORTAL.search(nodeid) else file}"
    if broker := _CONFORMING.search(nodeid):
        return f"{broker[1]} on {broker[2]}"
    if store := _STORE.search(nodeid):
        return f"store in {store[1]}"
    if part := re.search(r"(?:integration|acceptance)/test_sqs_(\w+)", nodeid):
        return f"SQS: {part[1]}"
    if "test_tasks.py" in nodeid:
        return "tasks on Redis"
    if django := re.search(r"acceptance/(test_django\w*)\.py", nodeid):
        return f"Django: {django[1]}"
    return nodeid


def broker_of(scope: str) -> str | None:
    """The RabbitMQ version that a group of tests needs."""
    return scope.partition(":")[0] if scope.startswith("RabbitMQ ") else None
