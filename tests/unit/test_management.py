"""Which policy is in force for a queue, as RabbitMQ decides it."""

from __future__ import annotations

from typing import Any

from celery_native_delay.transports.rabbitmq.management import applied_policy


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
