"""The management API: that it belongs to our broker, and the queues that refuse messages."""

from __future__ import annotations

import io
from typing import Any

import pytest

from celery_native_delay import DelaySettings, ManagementUnavailable
from celery_native_delay.transports.rabbitmq import management
from celery_native_delay.transports.rabbitmq.management import ManagementAPI, refusing_queues
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


TOPOLOGY = Topology(DelaySettings(levels=2))


class Vhost(ManagementAPI):
    """Answers for a virtual host in which each of *queues* is bound to the delivery exchange."""

    def __init__(self, *queues: dict[str, Any]) -> None:
        self._queues = queues
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

    def described(self, text: str = "") -> list[dict[str, Any]]:
        return [*self._queues]


def refusing(vhost: Vhost) -> list[str]:
    return [str(found) for found in refusing_queues(vhost, TOPOLOGY)]


def test_a_queue_that_refuses_messages_is_found_by_its_arguments_or_its_policy() -> None:
    arguments = {"name": "a", "arguments": {"x-overflow": "reject-publish-dlx"}}
    policy = {"policy": "cap", "effective_policy_definition": {"overflow": "reject-publish"}}
    assert refusing(Vhost(arguments, {"name": "b"} | policy)) == [
        "queue 'a' may refuse messages, and its arguments set x-overflow: reject-publish-dlx",
        "queue 'b' may refuse messages, and policy 'cap' sets overflow: reject-publish",
    ]


def test_a_queue_that_holds_up_nobody_is_not_found() -> None:
    rejects = {"x-overflow": "reject-publish"}
    assert refusing(Vhost()) == []
    assert refusing(Vhost({"name": "a"}, {"name": "b", "arguments": {"x-max-length": 1}})) == []
    # The arguments of a queue count, not the policy that says otherwise.
    policy = {"policy": "cap", "effective_policy_definition": {"overflow": "reject-publish"}}
    drops = {"name": "a", "arguments": {"x-overflow": "drop-head"}}
    assert refusing(Vhost(drops | policy)) == []
    # A landing queue stands in front of this one.
    behind = Vhost({"name": "a", "arguments": rejects}).bound("a", TOPOLOGY.own_pattern("a"))
    assert refusing(behind) == []
