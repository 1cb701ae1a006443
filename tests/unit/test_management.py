"""Which broker's management API is believed, and which policy is in force for a queue."""

from __future__ import annotations

import io
from typing import Any

import pytest

from celery_native_delay import ManagementUnavailable
from celery_native_delay.transports.rabbitmq import management
from celery_native_delay.transports.rabbitmq.management import ManagementAPI, applied_policy


class Answer(io.BytesIO):
    headers: dict[str, str] = {}  # noqa: RUF012 - as a response of urllib has them


def test_an_api_that_was_away_is_asked_again_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another broker may have its port."""
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


def test_a_policy_for_other_kinds_is_not() -> None:
    policies = [policy("x", ".*", **{"apply-to": "exchanges"})]
    policies += [policy("c", ".*", **{"apply-to": "classic_queues"})]
    assert applied_policy(policies, "delay", "quorum_queues") == ("", {})
    assert applied_policy(policies, "delay", "classic_queues")[0] == "c"


def test_a_pattern_that_only_erlang_reads_is_passed_over() -> None:
    assert applied_policy([policy("odd", "(?|a|b)(")], "delay", "quorum_queues") == ("", {})
