"""A delayed message arrives exactly where the undelayed one does.

Random graphs of exchanges, queues and bindings on a real broker. Each message is published twice,
due in the past and due in a moment; both must reach the same queues. Examples are drawn the same in
every run; `NATIVE_DELAY_PARITY_EXAMPLES=1000` draws that many new ones.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from time import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kombu import Connection

from celery_native_delay import CannotDelay
from celery_native_delay.settings import DelaySettings
from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.transports.rabbitmq.address import (
    landing_address,
    message_address,
    topic_binding_address,
    topic_matches,
)
from celery_native_delay.transports.rabbitmq.parking import peek
from celery_native_delay.transports.rabbitmq.topology import Topology
from celery_native_delay.transports.rabbitmq.wrapping import Delayed
from pytest_celery_native_delay import IN_CI
from tests.integration.traffic import (
    SETTINGS,
    Arrival,
    Inbox,
    assert_nothing_held,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
    on_all_versions,
    parked_count,
)
from tests.traffic import eta_in, publish

#: Bits 0 to 3 are one level of 15 queues, bits 4 to 7 a level each.
TOPOLOGY = Topology(DelaySettings.from_mapping(SETTINGS | {"fused_bits": 4}))

MORE_EXAMPLES = int(os.environ.get("NATIVE_DELAY_PARITY_EXAMPLES", "0"))
EXAMPLES = 20 if IN_CI else 12


def examples(count: int) -> settings:
    """Draw *count* examples, or as many new ones as NATIVE_DELAY_PARITY_EXAMPLES says."""
    return settings(
        max_examples=MORE_EXAMPLES or count,
        derandomize=not MORE_EXAMPLES,
        phases=list(Phase) if MORE_EXAMPLES else [Phase.generate],  # shrinking takes minutes
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


#: The exchanges that a new virtual host has.
BUILT_IN = {
    "amq.direct": "direct",
    "amq.topic": "topic",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
}

PAST = "2020-02-02T02:02:02+00:00"


# ---- graphs as data --------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    name: str
    kind: str
    listed: bool = False
    """In ``landing``."""


@dataclass(frozen=True)
class Queue:
    """A queue; a *foreign* one is declared and bound by a plain connection."""

    name: str
    foreign: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Binding:
    queue: Queue
    exchange: Exchange
    key: str
    arguments: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Message:
    exchange: str
    key: str
    units: int
    headers: dict[str, Any]
    number: int
    """Its body."""


@dataclass(frozen=True)
class Graph:
    exchanges: list[Exchange]
    queues: list[Queue]
    bindings: list[Binding]
    messages: list[Message]
    one_connection: bool
    """True if the producer is the connection that declared everything."""

    def kind(self, exchange: str) -> str:
        return next((e.kind for e in self.exchanges if e.name == exchange), "direct")

    def is_mirrored(self, exchange: str) -> bool:
        """True if an installed consumer is bound there, which mirrors its binding."""
        return any(b.exchange.name == exchange and not b.queue.foreign for b in self.bindings)

    def lands(self, message: Message) -> bool:
        """True if *message* has to go through a landing queue."""
        if not message.exchange:
            return False
        kind = self.kind(message.exchange)
        if kind in ("fanout", "headers") or not self.is_mirrored(message.exchange):
            return True
        if any(e.listed for e in self.exchanges if e.name == message.exchange):
            return True
        if kind != "topic":
            return False
        addresses = [message_address(message.exchange, message.key)] + [
            topic_binding_address(message.exchange, binding.key)
            for binding in self.bindings
            if binding.exchange.name == message.exchange and not binding.queue.foreign
        ]
        return not all(map(TOPOLOGY.fits, addresses))

    def is_refused(self, message: Message) -> bool:
        """True if the routing key of *message* looks like one of ours, behind a landing queue."""
        return self.lands(message) and TOPOLOGY.collides(message.key)

    def may_see_too_much(self, message: Message) -> set[str]:
        """Queues whose topic pattern may also match our own routing key.

        The documented exception: `#.0.#` or `#.*.*` behind a landing queue.
        """
        if self.kind(message.exchange) != "topic" or not self.lands(message):
            return set()
        address = landing_address(message.exchange)
        ours = [TOPOLOGY.routing_key(units, address) for units in range(message.units + 1)]
        return {
            binding.queue.name
            for binding in self.bindings
            if binding.exchange.name == message.exchange
            and any(topic_matches(binding.key, key) for key in ours)
        }


# ---- random graphs ---------------------------------------------------------------------------

WORDS = ["a", "b", "0", "1", "*", "#", "", "%", "%2A", "%2a", "%25", "é", "日本", "a b", "l" * 40]

word = st.sampled_from(WORDS)
any_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=12)


def cut(text: str, max_bytes: int = 255) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")


def limited(texts: st.SearchStrategy[str], *, max_bytes: int = 255) -> st.SearchStrategy[str]:
    return texts.map(lambda text: cut(text, max_bytes))


keys = limited(
    st.one_of(
        st.lists(word, max_size=5).map(".".join),
        st.lists(word, max_size=5).map(".".join),
        any_text,
        # About as many words as our own keys have; some look like our keys.
        st.lists(st.sampled_from(["a", "b", "0", "1", "%a", "*"]), min_size=7, max_size=11).map(
            ".".join
        ),
        st.sampled_from(["k" * 200, "é" * 100, "k" * 255, ".".join("word%" * 25), "." * 200]),
    )
)

#: Names of exchanges; a number is added, so that no two examples share a name.
names = limited(
    st.one_of(
        st.lists(word, min_size=1, max_size=4).map(".".join),
        any_text,
        # Not longer in unicode: delays to longer names are refused.
        st.sampled_from(["n" * 200, "%" * 80, "n.*" * 80, "é.*" * 25]),
    ),
    max_bytes=240,
)

few_headers = st.dictionaries(st.sampled_from(["h", "x-h"]), st.sampled_from([1, 2, "1"]))

header_arguments = st.builds(
    lambda match, wanted: tuple(({"x-match": match} | wanted).items()),
    st.sampled_from(["all", "any", "all-with-x", "any-with-x"]),
    few_headers,
)


@st.composite
def patterns(draw: st.DrawFn, key_pool: list[str]) -> str:
    """A key of the pool with some words replaced by wildcards."""
    words = draw(st.sampled_from(key_pool)).split(".")
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(words) - 1))
        words[index] = draw(st.sampled_from(["*", "#", "*.#", "#.#"]))
    if draw(st.booleans()):
        words = [*words[: draw(st.integers(0, len(words)))], "#"]
    words = ".".join(words).split(".")
    # RabbitMQ 4.3 takes two at most.
    for index in [index for index, word in enumerate(words) if word == "#"][2:]:
        words[index] = "*"
    return cut(".".join(words))


REJECTS = (("x-overflow", "reject-publish"),)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    key_pool = draw(st.lists(keys, min_size=4, max_size=8))
    kinds = draw(
        st.lists(st.sampled_from(["direct", "topic", "fanout", "headers"]), min_size=1, max_size=5)
    )
    exchanges = [Exchange(draw(names), kind, listed=draw(st.integers(0, 2)) == 0) for kind in kinds]
    exchanges += [Exchange(*item) for item in draw(st.sets(st.sampled_from([*BUILT_IN.items()])))]
    open_to_all = [e for e in exchanges if e.listed or e.kind in ("fanout", "headers")]

    queue_names = draw(
        st.lists(
            names.filter(lambda name: name and not name.startswith("amq.")),
            min_size=2,
            max_size=8,
            unique=True,
        )
    )
    queues = []
    for name in queue_names:
        foreign = draw(st.integers(0, 2)) == 0 and bool(open_to_all)
        arguments = draw(st.sampled_from([(), (), REJECTS, (("x-max-priority", 3),)]))
        queues.append(Queue(name, foreign, arguments))
    bindings = []
    for queue in queues:
        reachable = open_to_all if queue.foreign else exchanges
        for exchange in draw(st.lists(st.sampled_from(reachable), max_size=4)):
            key = draw(
                patterns(key_pool) if exchange.kind == "topic" else st.sampled_from(key_pool)
            )
            arguments = draw(header_arguments) if exchange.kind == "headers" else ()
            bindings.append(Binding(queue, exchange, key, arguments))

    own_names = [queue.name for queue in queues if not queue.foreign] or ["nobody"]
    targets = [("", name) for name in [*own_names, *queue_names]] + [
        (exchange.name, key) for exchange in exchanges for key in key_pool
    ]
    messages = [
        Message(
            exchange, key, units=draw(st.integers(1, 5)), headers=draw(few_headers), number=index
        )
        for index, (exchange, key) in enumerate(
            draw(st.lists(st.sampled_from(targets), min_size=10, max_size=20))
        )
    ]
    return Graph(exchanges, queues, bindings, messages, one_connection=draw(st.booleans()))


_numbers = count()


def with_own_exchanges(graph: Graph) -> Graph:
    """*graph* with exchange names that no other example has.

    Landing queues are not deleted, so the last step finds messages that they still hold.
    """
    number = next(_numbers)
    renamed = {
        exchange: exchange
        if exchange.name in BUILT_IN
        else replace(exchange, name=f"{exchange.name}{number}-{index}")
        for index, exchange in enumerate(graph.exchanges)
    }
    by_name: dict[str, str] = {}
    for old, new in renamed.items():
        by_name.setdefault(old.name, new.name)
    return replace(
        graph,
        exchanges=list(renamed.values()),
        bindings=[replace(b, exchange=renamed[b.exchange]) for b in graph.bindings],
        messages=[replace(m, exchange=by_name.get(m.exchange, "")) for m in graph.messages],
    )


# ---- the graph on a broker -------------------------------------------------------------------


@dataclass
class Site:
    """A graph on the broker: its connections and an inbox on every queue."""

    graph: Graph
    declarer: Any
    producer: Any
    foreigner: Any

    def __post_init__(self) -> None:
        self.letters = Inbox(self.declarer)
        self.foreign_letters = Inbox(self.foreigner)

    def declare(self) -> None:
        for exchange in self.graph.exchanges:
            if exchange.name not in BUILT_IN:
                declare_exchange(self.declarer, exchange.name, exchange.kind)
        for queue in self.graph.queues:
            owner = self.foreigner if queue.foreign else self.declarer
            declare_queue(owner, queue.name, **dict(queue.arguments))
        for binding in self.graph.bindings:
            owner = self.foreigner if binding.queue.foreign else self.declarer
            names = binding.queue.name, binding.exchange.name
            bind(owner, *names, binding.key, **dict(binding.arguments))
        self.letters.consume(queue.name for queue in self.graph.queues if not queue.foreign)
        self.foreign_letters.consume(queue.name for queue in self.graph.queues if queue.foreign)

    def remove(self) -> None:
        """Delete everything but the exchanges' landing queues, which the last step looks at."""
        self.letters.close()
        self.foreign_letters.close()
        channel = self.foreigner.default_channel
        channel.queue_purge(TOPOLOGY.parking_queue)
        for queue in self.graph.queues:
            channel.queue_delete(queue.name)
            if queue.arguments == REJECTS and not queue.foreign:
                channel.queue_delete(TOPOLOGY.queue_landing_queue(queue.name))
        for exchange in self.graph.exchanges:
            if exchange.name not in BUILT_IN:
                channel.exchange_delete(exchange.name)
            channel.exchange_delete(TOPOLOGY.landing_marker(exchange.name))
            channel.exchange_delete(TOPOLOGY.copied_marker(exchange.name))

    def send(self, message: Message, eta: str) -> None:
        headers = message.headers | {"eta": eta}
        publish(
            self.producer, message.number, message.key, exchange=message.exchange, headers=headers
        )

    @property
    def arrivals(self) -> list[Arrival]:
        return self.letters.arrivals + self.foreign_letters.arrivals

    def receive_until(self, condition: Callable[[], object]) -> bool:
        def also_foreign() -> bool:
            return self.foreign_letters.receive_until(condition, timeout_seconds=0)

        return self.letters.receive_until(also_foreign)

    def everything_that_came(self) -> list[Arrival]:
        """The arrived messages, after a last message has come through every queue.

        It is sent on the same channel as the others, so it comes after them.
        """
        for queue in self.graph.queues:
            publish(self.producer, "last word", queue.name)
        expected = Counter(queue.name for queue in self.graph.queues)

        def last_words() -> Counter[str]:
            return Counter(a.queue for a in self.arrivals if a.body == "last word")

        assert self.receive_until(lambda: last_words() == expected)
        came = self.letters.take() + self.foreign_letters.take()
        return [a for a in came if a.body != "last word"]

    def levels_are_empty(self) -> bool:
        return all(depth(self.foreigner, hop.queue) == 0 for hop in TOPOLOGY.level_queues)


@contextmanager
def site_of(url: str, graph: Graph) -> Iterator[Site]:
    listed = tuple(exchange.name for exchange in graph.exchanges if exchange.listed)
    options = {"landing": listed, "fused_bits": TOPOLOGY.settings.fused_bits}
    with (
        delaying(url, **options) as declarer,
        delaying(url, **options) as other_producer,
        Connection(url, transport_options={"confirm_publish": True}) as foreigner,
    ):
        producer = declarer if graph.one_connection else other_producer
        delays_of(producer).prepare()
        site = Site(graph, declarer, producer, foreigner)
        try:
            yield site
        finally:
            site.remove()


def parked(site: Site) -> list[Delayed | None]:
    return [item.delayed for item in peek(delays_of(site.producer), limit=100)]


def check(site: Site) -> None:
    graph = site.graph
    site.declare()

    for message in graph.messages:
        site.send(message, PAST)
    undelayed = site.everything_that_came()
    reached = {
        message.number: {a.queue for a in undelayed if a.body == message.number}
        for message in graph.messages
    }

    # A message without a queue stays in a landing queue, if it goes through one (see
    # test_isolation), else it is parked.
    refused: dict[int, str] = {}
    sent: dict[int, str] = {}
    park: dict[int, bool] = {}  # True where the message was certainly sent before it was due
    for message in graph.messages:
        if not reached[message.number] and graph.lands(message):
            continue
        eta = eta_in(message.units * SETTINGS["resolution"])
        try:
            site.send(message, eta)
        except CannotDelay as exc:
            refused[message.number] = str(exc)
            continue
        finally:
            was_early = time() < datetime.fromisoformat(eta).timestamp()
        sent[message.number] = eta
        if was_early:
            assert not graph.is_refused(message), message
        if not reached[message.number]:
            park[message.number] = was_early
    to_refuse = {message.number for message in graph.messages if graph.is_refused(message)}
    assert {number: why for number, why in refused.items() if number not in to_refuse} == {}

    expected = {(number, queue) for number in sent for queue in reached[number]}
    settled = site.receive_until(
        lambda: (
            len(site.arrivals) >= len(expected)
            and site.levels_are_empty()
            and parked_count(site.foreigner) >= sum(park.values())
        )
    )
    delayed = site.everything_that_came()
    missing = expected - {(a.body, a.queue) for a in delayed}
    assert not missing, [
        (m, reached[m.number]) for m in graph.messages if m.number in dict(missing)
    ]

    assert settled, (
        f"levels are empty: {site.levels_are_empty()}; expected to park {park}, parked "
        f"{parked(site)}: {[m for m in graph.messages if m.number in park]}"
    )
    by_number = {message.number: message for message in graph.messages}
    found: dict[int, list[str]] = {number: [] for number in sent}
    own = {queue.name for queue in graph.queues if not queue.foreign}
    for arrival in delayed:
        number = arrival.body
        message, eta = by_number[number], sent[number]
        found[number].append(arrival.queue)
        assert arrival.message.headers["eta"] == eta
        assert arrival.at >= datetime.fromisoformat(eta).timestamp(), f"early: {message}"
        if arrival.queue in own:
            assert arrival.message.delivery_info["routing_key"] == message.key
    for number, queues in found.items():
        message = by_number[number]
        too_much = graph.may_see_too_much(message) - reached[number]
        assert sorted(set(queues) - too_much) == sorted(reached[number]), message
        assert len(queues) == len(set(queues)), f"doubled: {message}"

    assert sum(park.values()) <= parked_count(site.foreigner) <= len(park), parked(site)


@on_all_versions
@pytest.mark.timeout(600 if not MORE_EXAMPLES else 0)
def test_a_delayed_message_arrives_where_the_undelayed_one_does(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    @examples(EXAMPLES)
    @given(graphs())
    def every_graph(graph: Graph) -> None:
        with site_of(vhost_url, with_own_exchanges(graph)) as site:
            check(site)

    every_graph()
    assert_nothing_held(rabbitmq, vhost)


@on_all_versions
def test_behind_exchange_to_exchange_bindings(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """Such bindings cannot be mirrored, so delayed messages go through a landing queue.

    orders (topic) -> archive (fanout) -> everything; orders -> by-key (direct) -> fine;
    orders -> new, directly.
    """
    with delaying(vhost_url) as owner, delaying(vhost_url) as stranger:
        for name, kind in (("orders", "topic"), ("archive", "fanout"), ("by-key", "direct")):
            declare_exchange(owner, name, kind)
        for name in ("everything", "fine", "new"):
            declare_queue(owner, name)
        owner.default_channel.exchange_bind("archive", "orders", "#")
        owner.default_channel.exchange_bind("by-key", "orders", "order.*")
        bind(owner, "everything", "archive")
        bind(owner, "fine", "by-key", "order.fine")
        bind(owner, "new", "orders", "order.new")
        letters = Inbox(owner).consume(["everything", "fine", "new"])

        for producer in (owner, stranger):
            for key in ("order.new", "order.fine", "other"):
                publish(producer, f"now {key}", key, exchange="orders")
                publish(producer, f"later {key}", key, exchange="orders", delay=0.1)
            # Delayed messages to the exchanges behind the bindings.
            publish(producer, "later order.fine", "order.fine", exchange="by-key", delay=0.1)
            publish(producer, "later archived", "order.new", exchange="archive", delay=0.1)
        letters.receive_until(lambda: len(letters.arrivals) >= 24)

        came = Counter((a.queue, a.body) for a in letters.arrivals)
        words = ["order.new", "order.fine", "other", "archived"]
        assert came == {
            **{("everything", f"now {word}"): 2 for word in words[:-1]},
            **{("everything", f"later {word}"): 2 for word in words},
            **{("new", f"{when} order.new"): 2 for when in ("now", "later")},
            ("fine", "now order.fine"): 2,
            ("fine", "later order.fine"): 4,
        }
    assert_nothing_held(rabbitmq, vhost)
