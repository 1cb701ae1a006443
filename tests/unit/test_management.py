"""The management API: that it belongs to our broker, and the policy in force for a queue."""

from __future__ import annotations

import io
from typing import Any

import pytest

from celery_native_delay import ManagementUnavailable
from celery_native_delay.transports.rabbitmq import management
from celery_native_delay.transports.rabbitmq.management import ManagementAPI, applied_policy


class Answer(io.BytesIO):
    headers: dict[str, str] = {}  # noqa: RUF012 - as a response of urllib has them


def test_after_an_outage_the_api_must_prove_again_that_it_is_our_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another broker may listen on its port by now."""
    answers: list[OSError | Answer] = [
        OSError("timed out"),
        Answer(b'{"cluster_name": "rabbit@other"}'),
    ]

    def answer(*_: Any, **__: Any) -> Answer:
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(management, "urlopen", answer)
    api = ManagementAPI("http://localhost:15672", "guest", "guest", "/", "rabbit@here")
    with pytest.raises(ManagementUnavailable, match="timed out"):
        api.names("queues", containing="level")
    with pytest.raises(ManagementUnavailable, match="belongs to the broker 'rabbit@other'"):
        api.names("queues", containing="level")


def policy(name: str, pattern: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "pattern": pattern, "definition": {"expires": 1}} | more


def test_the_matching_policy_of_highest_priority_is_in_force() -> None:
    policies = [policy("low", "delay"), policy("high", "^delay", priority=5), policy("not", "^x")]
    assert applied_policy(policies, "delay.level-00", "quorum_queues")[0] == "high"
    assert applied_policy(policies, "jobs", "quorum_queues") == ("", {})


def test_a_policy_for_other_types_is_not_in_force() -> None:
    policies = [policy("x", ".*", **{"apply-to": "exchanges"})]
    policies += [policy("c", ".*", **{"apply-to": "classic_queues"})]
    assert applied_policy(policies, "delay", "quorum_queues") == ("", {})
    assert applied_policy(policies, "delay", "classic_queues")[0] == "c"


def test_a_policy_with_a_pattern_python_cannot_compile_is_ignored() -> None:
    assert applied_policy([policy("odd", "(?|a|b)(")], "delay", "quorum_queues") == ("", {})
