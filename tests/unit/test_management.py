"""The management API: that it belongs to our broker, and the queues that refuse messages."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import Mock

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


def refusing(*queues: dict[str, Any], pattern: str = "") -> list[str]:
    """What is said of a virtual host whose *queues* are bound to the delivery exchange."""
    api = Mock(spec=ManagementAPI)
    api.names.side_effect = lambda kind, containing: [containing] if queues else []
    api.bindings_from.return_value = [
        {
            "destination_type": "queue",
            "destination": queue["name"],
            "routing_key": pattern or f"*.*.%.{queue['name']}",
        }
        for queue in queues
    ]
    api.described.return_value = [*queues]
    return [str(found) for found in refusing_queues(api, TOPOLOGY)]


def test_a_queue_that_refuses_messages_is_found_unless_it_holds_up_nobody() -> None:
    rejects = {"x-overflow": "reject-publish-dlx"}
    policy = {"policy": "cap", "effective_policy_definition": {"overflow": "reject-publish"}}
    assert refusing({"name": "a", "arguments": rejects}, {"name": "b"} | policy) == [
        "queue 'a' may refuse messages, and its arguments set x-overflow: reject-publish-dlx",
        "queue 'b' may refuse messages, and policy 'cap' sets overflow: reject-publish",
    ]
    assert refusing() == []
    assert refusing({"name": "a"}, {"name": "b", "arguments": {"x-max-length": 1}}) == []
    drops = {"name": "a", "arguments": {"x-overflow": "drop-head"}}
    assert refusing(drops | policy) == [], "the arguments of a queue count before its policy"
    behind = TOPOLOGY.own_pattern("a")
    assert refusing({"name": "a", "arguments": rejects}, pattern=behind) == [], "a landing queue"
