"""Which tests pytest-xdist keeps in one process, one after the other."""

from __future__ import annotations

import re


def scope_of(nodeid: str) -> str:
    """Name of the group that this test belongs to; its own id if it may run anywhere.

    One process for each RabbitMQ version, with one private broker: starting another takes seconds.
    The conformance of any other broker stays together as well, because it shares a worker.
    All tests of Spark share a session, which takes ten seconds to start.
    Larger groups start first, so the tests that take minutes are a group as well.
    """
    if nodeid.startswith("tests/spark/"):
        return "Spark"
    if version := re.search(r"[\[-](3\.10|4\.3)[\]-]", nodeid):
        return f"RabbitMQ {version[1]}"
    if broker := re.search(r"test_conformance\.py.*[\[-](redis|valkey)[\]-]", nodeid):
        return f"conformance of {broker[1]}"
    if "test_versions.py" in nodeid:
        return "other releases of Celery"
    return nodeid
