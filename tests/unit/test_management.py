"""The management API: that it belongs to our broker, and the policy in force for a queue."""

from __future__ import annotations

import io
from typing import Any

import pytest

from celery_native_delay import DelaySettings, ManagementUnavailable
from celery_native_delay.transports.rabbitmq import management
from celery_native_delay.transports.rabbitmq.management import (
    ManagementAPI,
    applied_policy,
    refusing_queues,
)
from celery_native_delay.transports.rabbitmq.topology import Topology


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


# ---- queues that refuse messages ---------------------------------------------------------------

TOPOLOGY = Topology(DelaySettings(levels=2))


class Vhost(ManagementAPI):
    """Answers for a virtual host in which each of *queues* is bound to the delivery exchange."""

    def __init__(self, *queues: dict[str, Any], policies: list[dict[str, Any]] | None = None):
        self._queues = queues
        self._policies = policies
        self._patterns = [(queue["name"], f"*.*.%.{queue['name']}") for queue in queues]

    def bound(self, queue: str, pattern: str) -> Vhost:
        self._patterns = [(queue, pattern)]
        return self

    def names(self, kind: str, *, containing: str) -> list[str]:
        return [containing] if self._queues else []

    def bindings_from(self, exchange: str) -> list[dict[str, Any]]:
        return [
            {"destination_type": "queue", "destination": queue, "routing_key": pattern}
            for queue, pattern in self._patterns
        ]

    def policies(self, kind: str) -> list[dict[str, Any]] | None:
        return self._policies

    def described(self) -> list[dict[str, Any]]:
        return [*self._queues]


def refusing(vhost: Vhost) -> list[tuple[str, str, bool]]:
    found = refusing_queues(vhost, TOPOLOGY)
    return [(each.queue, each.reason, each.is_full) for each in found]


def test_a_queue_that_refuses_messages_is_found_by_its_arguments_or_its_policy() -> None:
    full = {"x-overflow": "reject-publish-dlx", "x-max-length": 5}
    arguments = {"name": "a", "arguments": full, "messages_ready": 5}
    rejects = {"overflow": "reject-publish", "max-length": 9}
    policies = [policy("cap", "^b", definition=rejects)]
    found = refusing(Vhost(arguments, {"name": "b", "messages_ready": 8}, policies=policies))
    assert found == [
        ("a", "its arguments set x-overflow: reject-publish-dlx", True),
        ("b", "policy 'cap' sets overflow: reject-publish", False),
    ]
    # Without the right to read policies, the queue's description tells.
    described = {"name": "b", "policy": "cap", "effective_policy_definition": rejects}
    assert refusing(Vhost(described)) == found[1:]


def test_a_queue_that_holds_up_nobody_is_not_found() -> None:
    rejects = {"x-overflow": "reject-publish"}
    assert refusing(Vhost()) == []
    assert refusing(Vhost({"name": "a"}, {"name": "b", "arguments": {"x-max-length": 1}})) == []
    # The arguments of a queue count, not the policy that says otherwise.
    policies = [policy("cap", "", definition={"overflow": "reject-publish"})]
    drops = {"name": "a", "arguments": {"x-overflow": "drop-head"}}
    assert refusing(Vhost(drops, policies=policies)) == []
    # A landing queue stands in front of this one.
    behind = Vhost({"name": "a", "arguments": rejects}).bound("a", TOPOLOGY.own_pattern("a"))
    assert refusing(behind) == []
