"""Mirroring the user's bindings on the delivery exchange or behind a landing queue."""

from __future__ import annotations

import pytest

from celery_native_delay import DelaySettings
from celery_native_delay.transports.rabbitmq.mirror import (
    Mirror,
    Mirrored,
    is_internal,
    landing_declarations,
    marked_landing,
)
from celery_native_delay.transports.rabbitmq.topology import (
    Binding,
    Change,
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


def pending(mirror: Mirror) -> list[Mirrored]:
    return mirror.take_pending()[0]


def pending_landings(mirror: Mirror) -> list[str]:
    return mirror.take_pending()[1]


def mirrored(mirror: Mirror, queue: str, exchange: str, key: str) -> list[Change]:
    """The declarations for one binding, without the unbindings before them."""
    changes = mirror.declarations(Mirrored(queue, exchange, key))
    return [change for change in changes if not isinstance(change, Unbinding)]


# ---- mirrored bindings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "exchange", "key", "pattern"),
    [
        ("direct", "", "celery", "*.*.%.celery"),
        ("direct", "jobs", "a.b", "*.*.%jobs.a.b"),
        ("direct", "jobs", "a.*", "*.*.%jobs.a.%2A"),  # no wildcard in a direct exchange
        ("direct", "jobs", "", "*.*.%jobs"),
        ("topic", "news", "a.*", "*.*.%news.a.*"),
        ("topic", "news", "#", "*.*.%news.#"),
        ("topic", "news.eu", "100%", "*.*.%news%2Eeu.100%25"),
    ],
)
def test_a_binding_is_mirrored_on_the_delivery_exchange(
    mirror: Mirror, kind: str, exchange: str, key: str, pattern: str
) -> None:
    mirror.exchange_declared(exchange, kind, None)
    binding = Binding(DELIVERY, "q", pattern)
    assert mirrored(mirror, "q", exchange, key) == [binding]
    assert mirror.binding_of(Mirrored("q", exchange, key)) == binding


@pytest.mark.parametrize("kind", ["fanout", "headers", "x-random"])
def test_bindings_to_other_exchange_types_are_not_mirrored(mirror: Mirror, kind: str) -> None:
    mirror.exchange_declared("all", kind, None)
    assert mirrored(mirror, "q", "all", "key") == []
    assert mirror.binding_of(Mirrored("q", "all", "key")) is None


def test_a_direct_key_that_is_too_long_is_bound_by_its_hash(mirror: Mirror) -> None:
    mirror.exchange_declared("jobs", "direct", None)
    [binding] = mirrored(mirror, "q", "jobs", "k" * 255)
    assert isinstance(binding, Binding)
    assert binding.routing_key.startswith("*.*.%%h")
    assert len(binding.routing_key.encode()) <= 255


def test_an_exchange_with_a_too_long_topic_pattern_gets_a_landing_queue(
    mirror: Mirror,
) -> None:
    mirror.exchange_declared("news", "topic", None)
    landing = list(marked_landing(TOPOLOGY, "news"))
    assert mirrored(mirror, "q", "news", "k" * 254) == landing
    assert mirror.binding_of(Mirrored("q", "news", "k" * 254)) is None


@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
def test_a_queue_that_may_reject_gets_a_landing_queue_in_front(
    mirror: Mirror, overflow: str
) -> None:
    mirror.queue_declared("full", {"x-overflow": overflow}, for_replies=False)
    declared = mirrored(mirror, "full", "", "full")
    landing = TOPOLOGY.queue_landing("full")
    assert [d for d in declared if isinstance(d, Queue)] == [landing]
    behind, in_front = [d for d in declared if isinstance(d, Binding)]
    # Only the queue is bound where the landing queue dead-letters to; no other user's binding is.
    assert behind.destination == "full"
    assert (
        "0.0." + behind.routing_key.removeprefix("*.*.")
        == (landing.arguments["x-dead-letter-routing-key"])
    )
    assert in_front == Binding(DELIVERY, landing.name, "*.*.%.full")
    assert mirror.binding_of(Mirrored("full", "", "full")) == in_front


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


def test_a_queue_that_drops_its_oldest_message_needs_no_landing_queue(mirror: Mirror) -> None:
    mirror.queue_declared("ring", {"x-overflow": "drop-head"}, for_replies=False)
    assert mirrored(mirror, "ring", "", "ring") == [Binding(DELIVERY, "ring", "*.*.%.ring")]


# ---- known bindings ------------------------------------------------------------------------


def test_a_declared_queue_is_reached_by_its_name(mirror: Mirror) -> None:
    mirror.queue_declared("celery", None, for_replies=False)
    assert pending(mirror) == [Mirrored("celery", "", "celery")]


def test_reply_queues_are_not_mirrored(mirror: Mirror) -> None:
    mirror.queue_declared("amq.gen-reply", None, for_replies=True)
    assert not mirror.is_pending


def test_a_bound_temporary_queue_is_mirrored(mirror: Mirror) -> None:
    mirror.queue_bound("amq.gen-feed", "news", "sport")
    assert pending(mirror) == [Mirrored("amq.gen-feed", "news", "sport")]


@pytest.mark.parametrize(
    "name",
    [
        "celeryev",
        "celeryev.1c2d",
        "celery.pidbox",
        "reply.celery.pidbox",
        "celery@host.celery.pidbox",
        "1c2d.reply.celery.pidbox",
    ],
)
def test_celerys_internal_queues_are_not_mirrored(mirror: Mirror, name: str) -> None:
    assert is_internal(name)
    mirror.queue_declared(name, None, for_replies=False)
    mirror.queue_bound(name, "jobs", "key")
    mirror.queue_bound("jobs", name, "key")
    mirror.exchange_bound(name)
    assert not mirror.is_pending
    assert len(mirror.known) == 0


@pytest.mark.parametrize("name", ["celery", "pidboxes", "my_celeryev", "celeryevents.jobs", ""])
def test_similar_names_of_the_users_are_not_internal(name: str) -> None:
    assert not is_internal(name)


def test_repeated_declarations_are_mirrored_once(mirror: Mirror) -> None:
    for _ in range(3):
        mirror.queue_bound("q", "jobs", "a")
        mirror.queue_bound("q", "jobs", "b")
    assert pending(mirror) == [Mirrored("q", "jobs", "a"), Mirrored("q", "jobs", "b")]
    assert not mirror.is_pending
    assert len(mirror.known) == 2


def test_a_queue_is_bound_by_its_name_only_once(mirror: Mirror) -> None:
    mirror.queue_bound_once("q")
    assert pending(mirror) == [Mirrored("q", "", "q")]
    mirror.queue_bound_once("q")
    assert not mirror.is_pending


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
    assert ([binding.queue for binding in bindings], landings) == (
        ["q7", "q8", "q9"],
        ["x7", "x8", "x9"],
    )
    mirror.queue_bound_once("first")
    assert pending(mirror) == [Mirrored("first", "", "first")]


def test_an_unbound_binding_is_forgotten(mirror: Mirror) -> None:
    mirror.queue_bound("q", "jobs", "a")
    mirror.queue_bound("q", "jobs", "b")
    assert mirror.queue_unbound("q", "jobs", "a") == Mirrored("q", "jobs", "a")
    assert mirror.queue_unbound("q", "jobs", "never") == Mirrored("q", "jobs", "never")
    assert pending(mirror) == [Mirrored("q", "jobs", "b")]
    mirror.forget_mirrored()
    assert pending(mirror) == [Mirrored("q", "jobs", "b")]


def test_the_bindings_of_a_deleted_queue_are_forgotten(mirror: Mirror) -> None:
    mirror.queue_declared("q", {"x-overflow": "reject-publish"}, for_replies=False)
    mirror.queue_bound("q", "jobs", "a")
    mirror.queue_bound("other", "jobs", "a")
    mirror.queue_deleted("q")
    assert pending(mirror) == [Mirrored("other", "jobs", "a")]
    mirror.queue_declared("q", None, for_replies=False)
    assert mirrored(mirror, "q", "", "q") == [Binding(DELIVERY, "q", "*.*.%.q")]


def test_after_the_broker_lost_its_data_all_bindings_are_pending_again(mirror: Mirror) -> None:
    mirror.queue_bound("q", "jobs", "a")
    mirror.exchange_bound("source")
    mirror.take_pending()
    mirror.forget_mirrored()
    assert mirror.take_pending() == ([Mirrored("q", "jobs", "a")], ["source"])


# ---- landing queues ------------------------------------------------------------------------


def test_an_exchange_bound_to_another_exchange_gets_a_landing_queue(mirror: Mirror) -> None:
    mirror.exchange_bound("source")
    mirror.exchange_bound("source")
    assert pending_landings(mirror) == ["source"]


def test_an_exchange_with_an_alternate_exchange_gets_a_landing_queue(mirror: Mirror) -> None:
    mirror.exchange_declared("plain", "direct", {"x-other": 1})
    mirror.exchange_declared("careful", "direct", {"alternate-exchange": "lost"})
    assert pending_landings(mirror) == ["careful"]


def test_a_deleted_exchange_needs_no_landing_queue(mirror: Mirror) -> None:
    mirror.exchange_declared("gone", "direct", {"alternate-exchange": "lost"})
    mirror.exchange_deleted("gone")
    mirror.exchange_deleted("never seen")
    assert not mirror.is_pending
    assert "gone" not in mirror.types
    mirror.forget_mirrored()
    assert not mirror.is_pending


def test_a_landing_queue_is_declared_before_it_is_bound() -> None:
    landing, binding = landing_declarations(TOPOLOGY, "news")
    assert landing == TOPOLOGY.landing("news")
    assert isinstance(binding, Binding)
    assert (binding.source, binding.destination) == (DELIVERY, TOPOLOGY.landing_queue("news"))


def test_the_marker_of_a_landing_exchange_is_declared_last() -> None:
    *landing, mark = marked_landing(TOPOLOGY, "news.eu")
    assert landing == list(landing_declarations(TOPOLOGY, "news.eu"))
    assert mark == Exchange("celery_delay.v1.2x125ms.f15.quorum.lands.news%2Eeu", "fanout")


@pytest.mark.parametrize(
    ("kind", "bound", "routing_key", "reached"),
    [
        ("direct", "a.b", "a.b", True),
        ("direct", "a.b", "a.c", False),
        ("direct", "a.*", "a.b", False),
        ("direct", "#", "#", True),
        ("topic", "a.*", "a.b", True),
        ("topic", "a.*", "b.a", False),
        ("topic", "#", "", True),
    ],
)
def test_reaches_tells_if_a_known_binding_matches_a_message(
    mirror: Mirror, kind: str, bound: str, routing_key: str, reached: bool
) -> None:
    mirror.exchange_declared("jobs", kind, None)
    mirror.exchange_declared("other", kind, None)
    mirror.queue_bound("q", "jobs", bound)
    assert mirror.reaches("jobs", routing_key) is reached
    assert not mirror.reaches("other", routing_key)
    mirror.queue_unbound("q", "jobs", bound)
    assert not mirror.reaches("jobs", routing_key)


def test_a_queue_is_unknown_until_its_arguments_are_known(mirror: Mirror) -> None:
    mirror.queue_bound("q", "jobs", "a")
    assert "q" not in mirror.lands
    mirror.lands["q"] = True
    assert mirror.binding_of(Mirrored("q", "", "q")) == Binding(
        DELIVERY, TOPOLOGY.queue_landing_queue("q"), "*.*.%.q"
    )
    mirror.queue_deleted("q")
    assert "q" not in mirror.lands
