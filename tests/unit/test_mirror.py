"""Copies of the user's bindings, landing queues, and what the management API tells of queues."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import Mock

import kombu
import pytest

from celery_native_delay import DelaySettings, ManagementUnavailable
from celery_native_delay.transports.rabbitmq import management
from celery_native_delay.transports.rabbitmq.management import ManagementAPI, refusing_queues
from celery_native_delay.transports.rabbitmq.mirror import (
    Mirror,
    Mirrored,
    blueprint,
    is_internal,
    landing_declarations,
)
from celery_native_delay.transports.rabbitmq.topology import (
    Binding,
    Exchange,
    Queue,
    Topology,
    Unbinding,
)

TOPOLOGY = Topology(DelaySettings(levels=2))
DELIVERY = "celery_delay.v1.2x125ms.f15.quorum.delivery"


@pytest.fixture
def mirror() -> Mirror:
    return Mirror(TOPOLOGY)


# ---- mirrored bindings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "exchange", "key", "pattern"),
    [
        ("direct", "", "celery", "*.*.%.celery"),
        ("direct", "jobs", "a.*", "*.*.%jobs.a.%2A"),  # no wildcard in a direct exchange
        ("topic", "news", "a.*", "*.*.%news.a.*"),
        ("topic", "news.eu", "100%", "*.*.%news%2Eeu.100%25"),
    ],
)
def test_a_binding_is_mirrored_on_the_delivery_exchange(
    mirror: Mirror, kind: str, exchange: str, key: str, pattern: str
) -> None:
    mirror.exchange_declared(exchange, kind, None)
    binding = Binding(DELIVERY, "q", pattern)
    assert list(mirror.declarations(Mirrored("q", exchange, key))) == [binding]
    assert mirror.binding_of(Mirrored("q", exchange, key)) == binding


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_a_key_that_is_too_long_is_bound_by_its_hash_or_gets_its_exchange_a_landing_queue(
    mirror: Mirror, kind: str
) -> None:
    mirror.exchange_declared("jobs", kind, None)
    found = list(mirror.declarations(Mirrored("q", "jobs", "k" * 254)))
    if kind == "direct":
        (binding,) = found
        assert isinstance(binding, Binding)
        assert binding.routing_key.startswith("*.*.%%h")
        assert len(binding.routing_key.encode()) <= 255
    else:
        landing = TOPOLOGY.landing_queue("jobs")
        assert [type(each) for each in found] == [Queue, Binding, Exchange], "the marker is last"
        assert found[:2] == [*landing_declarations(TOPOLOGY, "jobs")]
        assert found[1].destination == found[0].name == landing  # type: ignore[union-attr]


def test_a_listed_queue_gets_a_landing_queue_in_front_and_loses_its_direct_binding() -> None:
    """In this order: a message between the two changes parks, and none comes twice."""
    topology = Topology(DelaySettings(levels=2, landing=["jobs", "tenant-*"]))  # type: ignore[arg-type]
    mirror = Mirror(topology)
    assert list(mirror.declarations(Mirrored("q", "", "q"))) == [Binding(DELIVERY, "q", "*.*.%.q")]
    for queue in ("jobs", "tenant-7"):
        changes = list(mirror.declarations(Mirrored(queue, "", queue)))
        landing = topology.queue_landing(queue)
        assert changes == [
            landing,
            Exchange(topology.diverted_marker, "fanout"),
            Binding(DELIVERY, queue, topology.own_pattern(queue)),
            Unbinding(DELIVERY, queue, f"*.*.%.{queue}"),
            Binding(DELIVERY, landing.name, f"*.*.%.{queue}"),
        ]


# ---- known bindings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["celeryev", "celeryev.1c2d", "celery.pidbox", "1c2d.reply.celery.pidbox"]
)
def test_celerys_internal_queues_are_not_mirrored(mirror: Mirror, name: str) -> None:
    assert not is_internal(f"my_{name}s")
    mirror.queue_declared(name, None, for_replies=False)
    mirror.queue_bound(name, "jobs", "key")
    mirror.queue_bound("jobs", name, "key")
    mirror.exchange_bound(name)
    assert not mirror.is_pending
    assert len(mirror.known) == 0


def test_bindings_and_exchanges_are_pending_once_and_again_after_a_loss(mirror: Mirror) -> None:
    for _ in range(3):
        mirror.queue_declared("q", None, for_replies=False)
        mirror.queue_bound("q", "jobs", "a")
        mirror.queue_bound("q", "jobs", "b")
        mirror.exchange_declared("careful", "direct", {"alternate-exchange": "lost"})
    mirror.queue_declared("amq.gen-reply", None, for_replies=True)
    mirror.exchange_declared("plain", "direct", {"x-other": 1})
    mirror.exchange_declared("gone", "direct", {"alternate-exchange": "lost"})
    mirror.exchange_deleted("gone")
    mirror.queue_unbound("q", "jobs", "b")
    by_name, bound = Mirrored("q", "", "q"), Mirrored("q", "jobs", "a")
    assert mirror.take_pending() == ([by_name, bound], ["careful"])
    mirror.queue_bound_once("q")
    assert not mirror.is_pending
    mirror.forget_mirrored()
    assert mirror.take_pending() == ([bound, by_name], ["careful"])


def test_a_connection_forgets_the_oldest_of_ever_new_names(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten binding that was not yet copied is copied when its queue is used again."""
    monkeypatch.setattr("celery_native_delay.transports.rabbitmq.mirror.REMEMBERED", 3)
    mirror.queue_bound_once("first")
    for number in range(10):
        mirror.queue_declared(f"q{number}", None, for_replies=False)
        mirror.exchange_declared(f"x{number}", "direct", None)
        mirror.exchange_bound(f"x{number}")
    assert list(mirror.lands) == ["q7", "q8", "q9"]
    assert [mirrored.queue for mirrored in mirror.known] == ["q7", "q8", "q9"]
    assert list(mirror.types.maps[0]) == ["x7", "x8", "x9"]
    assert mirror.types[""] == "direct"
    bindings, landings = mirror.take_pending()
    assert [binding.queue for binding in bindings] == ["q7", "q8", "q9"]
    assert landings == ["x7", "x8", "x9"]
    mirror.queue_bound_once("first")
    assert mirror.take_pending()[0] == [Mirrored("first", "", "first")]


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_reaches_tells_if_a_known_binding_matches_a_message(mirror: Mirror, kind: str) -> None:
    mirror.exchange_declared("jobs", kind, None)
    mirror.exchange_declared("other", kind, None)
    for bound, reached in (("a.b", True), ("a.*", kind == "topic"), ("b.*", False)):
        mirror.queue_bound("q", "jobs", bound)
        assert mirror.reaches("jobs", "a.b") is reached
        assert not mirror.reaches("other", "a.b")
        mirror.queue_unbound("q", "jobs", bound)
        assert not mirror.reaches("jobs", "a.b")


# ---- the plan of an app's queues -----------------------------------------------------------------


def beside_the_levels(*queues: kombu.Queue, **changes: Any) -> tuple[set[str], set[str]]:
    """Return what the plan declares beside the delay queues, and the queues that it binds."""
    topology = Topology(DelaySettings(levels=2, **changes))
    plan = [each for each in blueprint(topology, queues) if each not in list(topology.plan())]
    bound = {each.destination for each in plan if isinstance(each, Binding)}
    return {each.name for each in plan if not isinstance(each, Binding)}, bound


def test_only_lasting_queues_are_bound() -> None:
    exchange = kombu.Exchange("shop", type="topic")
    _, bound = beside_the_levels(
        kombu.Queue("lasting", exchange, routing_key="#"),
        kombu.Queue("passing", exchange, routing_key="#", auto_delete=True),
        kombu.Queue("mine", exchange, routing_key="#", exclusive=True),
        kombu.Queue("forgotten", kombu.Exchange("lost", durable=False), durable=False),
    )
    assert bound == {"lasting"}


def test_an_exchange_listed_or_with_bindings_that_cannot_be_copied_gets_a_landing_queue() -> None:
    names, _ = beside_the_levels(landing=("theirs",))
    assert names == {TOPOLOGY.landing_queue("theirs"), TOPOLOGY.landing_marker("theirs")}
    names, _ = beside_the_levels(kombu.Queue("news", kombu.Exchange("news", type="fanout")))
    assert TOPOLOGY.landing_queue("news") in names


def test_a_listed_queue_gets_a_landing_queue_of_its_own_only() -> None:
    """A name is taken for an exchange's if no queue of the app has it, or an exchange does."""
    full = kombu.Queue("imports", kombu.Exchange("shop"), routing_key="imports")
    landing = TOPOLOGY.landing_queue("imports")
    names, bound = beside_the_levels(full, landing=("imports",))
    assert TOPOLOGY.queue_landing_queue("imports") in names & bound
    assert landing not in names
    also = kombu.Queue("other", kombu.Exchange("imports"), routing_key="other")
    assert landing in beside_the_levels(full, also, landing=("imports",))[0]
    assert landing not in beside_the_levels(full, also, landing=("imports*",))[0]


# ---- the management API --------------------------------------------------------------------------


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
