"""Group tests that pytest-xdist runs in one process, and order the groups."""

from __future__ import annotations

import re

#: Tests of mortal_rabbitmq: starting it takes seconds.
_MORTAL = re.compile(r"conformance/|test_(window|isolation|faults)|integration/test_bulk")

_CONFORMING = re.compile(
    r"/test_(\w*conformance)\.py.*[\[-](redis|valkey|filesystem(?:-postgresql)?|sqla|sqs)[\]-]"
)

#: Beginnings of the names of groups and tests, longest first; unit tests fill the gaps.
_ORDER = [
    "RabbitMQ 4.3: mortal",
    "RabbitMQ 3.10: mortal",
    "Spark",
    "RabbitMQ 4.3: test_configuration",
    "RabbitMQ 3.10: test_configuration",
    "RabbitMQ",
    "tests/acceptance/test_versions",
    "SQS",
    "tasks on Redis",
    "tests/acceptance",
    "",
    "tests/unit",
]


def scope_of(nodeid: str) -> str:
    """The name of a test's group; the test's own id if it needs no group.

    A group has the tests of one file for one RabbitMQ version, or the tests of one file that share
    a worker on another broker. All Spark tests share one session, which takes ten seconds to start.
    """
    if nodeid.startswith("tests/spark/"):
        return "Spark"
    if version := re.search(r"[\[-](3\.10|4\.3)[\]-]", nodeid):
        file = nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
        return f"RabbitMQ {version[1]}: {'mortal' if _MORTAL.search(nodeid) else file}"
    if broker := _CONFORMING.search(nodeid):
        return f"{broker[1]} on {broker[2]}"
    if part := re.search(r"(?:integration|acceptance)/test_sqs_(\w+)", nodeid):
        return f"SQS: {part[1]}"
    if "test_tasks.py" in nodeid:
        return "tasks on Redis"
    return nodeid


def broker_of(scope: str) -> str | None:
    """The RabbitMQ version that a group of tests needs."""
    return scope.partition(":")[0] if scope.startswith("RabbitMQ ") else None


def rank_of(nodeid: str) -> int:
    """The sort key of a test's group: lower groups start first; equal groups keep their order."""
    scope = scope_of(nodeid)
    beginnings = (beginning for beginning in _ORDER if scope.startswith(beginning))
    return _ORDER.index(max(beginnings, key=len))
