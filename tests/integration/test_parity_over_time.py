"""Exchanges, queues and bindings that change while messages wait: as it is when they are due.

Random graphs on a real broker, with installed, foreign and producer-declared consumers. Messages
are sent, the graph is changed, and what arrives is compared with where messages without a delay go
now. Examples are drawn the same in every run; `NATIVE_DELAY_PARITY_EXAMPLES=1000` draws that many
new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import time
from typing import Any

import pytest
from amqp.exceptions import NotFound
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kombu import Connection

from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from celery_native_delay.transports.rabbitmq import routes
from celery_native_delay.transports.rabbitmq.parking import rescue
from tests.integration.test_parity import MORE_EXAMPLES
from tests.integration.traffic import (
    TOPOLOGY,
    Inbox,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
    held,
    parked_count,
)
from tests.traffic import PATIENCE_SECONDS, eta_in, publish
from tests.waiting import wait_until

EXAMPLES = 12

#: Of the connections that declare and change: two installed ones and one that knows nothing of us.
WORKER, PRODUCER, STRANGER = "worker", "producer", "stranger"
ACTORS = (WORKER, PRODUCER, STRANGER)

KINDS = ("direct", "topic", "fanout", "headers")
KEYS = ("a", "a.b", "b", "", "k" * 250)
PATTERNS = ("a", "a.*", "#", "*", "a.b", "")
REJECTS = {"x-overflow": "reject-publish"}

# ---- graphs and their changes as data --------------------------------------------------------


@dataclass(frozen=True)
class Bind:
    """Queue and exchange by number; *key* is one of KEYS or PATTERNS by the exchange's type."""

    queue: int
    exchange: int
    key: int


@dataclass(frozen=True)
class Unbind:
    """The binding of that number, among those there are, by the queue's owner or the other."""

    binding: int
    by_owner: bool


@dataclass(frozen=True)
class Redeclare:
    """An exchange deleted, and declared again unless *kind* is None, with these bindings."""

    exchange: int
    kind: str | None
    by: str
    bindings: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Replace:
    """A queue deleted, and declared again by its owner unless *rejects* is None, and bound."""

    queue: int
    rejects: bool | None
    by: str
    bindings: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    kinds: list[str]
    listed: list[bool]
    owners: list[str]
    rejects: list[bool]
    bindings: list[Bind]
    messages: list[tuple[int, int, bool]]
    """Exchange, or -1 for the default one; key, or queue; whether the worker sends it."""
    changes: list[Bind | Unbind | Redeclare | Replace]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4))
    owners = draw(st.lists(st.sampled_from(ACTORS), min_size=3, max_size=6))
    queue, exchange = st.integers(0, len(owners) - 1), st.integers(0, len(kinds) - 1)
    key = st.integers(0, 4)
    binds = st.builds(Bind, queue, exchange, key)
    few = st.lists(st.tuples(queue, key), max_size=3).map(tuple)
    few_exchanges = st.lists(st.tuples(exchange, key), max_size=2).map(tuple)
    changes = st.one_of(
        binds,
        st.builds(Unbind, st.integers(0, 20), st.booleans()),
        st.builds(
            Redeclare,
            exchange,
            st.sampled_from([*KINDS, *KINDS, None]),
            st.sampled_from(ACTORS),
            few,
        ),
        st.builds(
            Replace,
            queue,
            st.sampled_from([True, False, None]),
            st.sampled_from(ACTORS),
            few_exchanges,
        ),
    )
    default = st.tuples(st.just(-1), queue, st.booleans())
    return Plan(
        kinds,
        draw(st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds))),
        owners,
        draw(
            st.lists(
                st.sampled_from([False, False, True]), min_size=len(owners), max_size=len(owners)
            )
        ),
        draw(st.lists(binds, min_size=3, max_size=8)),
        draw(
            st.lists(
                st.one_of(
                    default,
                    st.tuples(exchange, key, st.booleans()),
                    st.tuples(exchange, key, st.booleans()),
                ),
                min_size=8,
                max_size=16,
            )
        ),
        draw(st.lists(changes, min_size=1, max_size=6)),
    )


# ---- a graph on the broker, and what has become of it ----------------------------------------


@dataclass(frozen=True)
class Bound:
    """A binding that there is."""

    queue: str
    exchange: str
    key: str
    by: str


@dataclass
class Sent:
    """A message that waits; *reached* at the time are the queues of one that does not."""

    number: int
    exchange: str
    key: str
    reached: set[str]
    due: float
    came: list[str] = field(default_factory=list)


@dataclass
class Graph:
    plan: Plan
    number: int
    connections: dict[str, Any]
    kinds: dict[str, str] = field(default_factory=dict)
    bound: dict[Bound, None] = field(default_factory=dict)
    queues: dict[str, str] = field(default_factory=dict)
    """By name, who declared it."""
    unknown: set[str] = field(default_factory=set)
    """Exchanges deleted by a connection that did not know all of their bindings."""
    ever_bound: dict[str, set[str]] = field(default_factory=dict)
    """By exchange, the queues that were bound to it at any time."""
    early: list[tuple[str, Any]] = field(default_factory=list)
    """What was due, and came, while others were asked for."""
    renewed: set[str] = field(default_factory=set)
    """Queues that a stranger deleted, with a landing queue of their own before or behind it."""

    def exchange(self, index: int) -> str:
        return f"x{self.number}-{index}"

    def queue(self, index: int) -> str:
        return f"q{self.number}-{index}"

    def listed(self) -> tuple[str, ...]:
        return tuple(self.exchange(i) for i, is_listed in enumerate(self.plan.listed) if is_listed)

    def declare(self) -> None:
        for index, kind in enumerate(self.plan.kinds):
            declare_exchange(self.connections[WORKER], self.exchange(index), kind)
            self.kinds[self.exchange(index)] = kind
        for index, owner in enumerate(self.plan.owners):
            self._declare_queue(index, owner, rejects=self.plan.rejects[index])
        for binding in self.plan.bindings:
            self._bind(binding.queue, binding.exchange, binding.key)
        self.settle()

    def change(self) -> None:
        for change in self.plan.changes:
            match change:
                case Bind(queue, exchange, key):
                    self._bind(queue, exchange, key)
                case Unbind():
                    self._unbind(change)
                case Redeclare(exchange, kind, by, bindings):
                    self._redeclare(self.exchange(exchange), kind, by)
                    for queue, key in bindings:
                        self._bind(queue, exchange, key)
                case Replace(queue, rejects, by, bindings):
                    self._replace(queue, rejects, by)
                    for exchange, key in bindings:
                        self._bind(queue, exchange, key)
        self.settle()

    def settle(self) -> None:
        """The worker consumes, the producer sends on: what they declared is mirrored by now."""
        delays_of(self.connections[WORKER]).prepare(consuming=True)
        delays_of(self.connections[PRODUCER]).prepare()

    def _declare_queue(self, index: int, owner: str, *, rejects: bool) -> None:
        arguments = REJECTS if rejects and owner != STRANGER else {}
        self.queues[declare_queue(self.connections[owner], self.queue(index), **arguments)] = owner

    def _bind(self, queue_index: int, exchange_index: int, key_index: int) -> None:
        queue, exchange = self.queue(queue_index), self.exchange(exchange_index)
        kind = self.kinds.get(exchange)
        owner = self.queues.get(queue)
        if kind is None or owner is None:
            return
        if owner == STRANGER and kind in ("direct", "topic") and exchange not in self.listed():
            return  # docs, Foreign consumers
        key = (PATTERNS if kind == "topic" else KEYS)[key_index]
        arguments = {"x-match": "any", "h": 1} if kind == "headers" else {}
        if any((b.queue, b.exchange, b.key) == (queue, exchange, key) for b in self.bound):
            return
        if owner != STRANGER:
            # As kombu does: who binds a queue to an exchange declares both.
            declare_exchange(self.connections[owner], exchange, kind)
        bind(self.connections[owner], queue, exchange, key, **arguments)
        self.bound[Bound(queue, exchange, key, owner)] = None
        self.ever_bound.setdefault(exchange, set()).add(queue)

    def _unbind(self, change: Unbind) -> None:
        if not self.bound:
            return
        bound = list(self.bound)[change.binding % len(self.bound)]
        by = bound.by
        if not change.by_owner and by != STRANGER:
            by = PRODUCER if by == WORKER else WORKER
        arguments = {"x-match": "any", "h": 1} if self.kinds[bound.exchange] == "headers" else {}
        channel = self.connections[by].default_channel
        channel.queue_unbind(bound.queue, bound.exchange, bound.key, arguments=arguments)
        del self.bound[bound]

    def _redeclare(self, exchange: str, kind: str | None, by: str) -> None:
        if exchange in self.kinds:
            self.connections[by].default_channel.exchange_delete(exchange)
            theirs = {bound.by for bound in self.bound if bound.exchange == exchange}
            if theirs - {by, STRANGER}:
                self.unknown.add(exchange)
            self.bound = {bound: None for bound in self.bound if bound.exchange != exchange}
            del self.kinds[exchange]
        if kind is not None:
            declare_exchange(self.connections[by], exchange, kind)
            self.kinds[exchange] = kind

    def _replace(self, index: int, rejects: bool | None, by: str) -> None:
        queue = self.queue(index)
        if queue in self.queues:
            if by == STRANGER:
                self.renewed.add(queue)
            self.connections[by].default_channel.queue_delete(queue)
            del self.queues[queue]
            self.bound = {bound: None for bound in self.bound if bound.queue != queue}
        if rejects is not None:
            self._declare_queue(index, self.plan.owners[index], rejects=rejects)

    # --- messages ------------------------------------------------------------------------

    def reached(self, exchange: str, key: str) -> set[str]:
        """The queues that get a message without a delay now."""
        if exchange and exchange not in self.kinds:
            return set()
        body = f"now {next(_numbers)}"
        publish(self.connections[STRANGER], body, key, exchange=exchange, headers={"h": 1})
        taken = self.take()
        self.early += [came for came in taken if came[1] != body]
        return {queue for queue, came in taken if came == body}

    def take(self) -> list[tuple[str, Any]]:
        """What lies in the queues, which are empty then."""
        taken = []
        channel = self.connections[STRANGER].default_channel
        for queue in [*self.queues]:
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                taken.append((queue, channel.message_to_python(message).decode()))
        return taken

    def send(self, number: int, lead_seconds: float) -> Sent:
        exchange_index, key_index, by_worker = self.plan.messages[number]
        if exchange_index < 0:
            exchange, key = "", self.queue(key_index)
        else:
            exchange, key = self.exchange(exchange_index), KEYS[key_index]
        reached = self.reached(exchange, key)
        due = time() + lead_seconds
        sender = self.connections[WORKER if by_worker else PRODUCER]
        headers = {"h": 1, "eta": eta_in(lead_seconds)}
        publish(sender, number, key, exchange=exchange, headers=headers)
        return Sent(number, exchange, key, reached, due)

    def is_known(self, sent: Sent, now_reached: set[str]) -> bool:
        """Whether installed connections were told of all that has changed for it."""
        strangely = {q for q in sent.reached | now_reached if q in self.renewed}
        return sent.exchange not in self.unknown and not strangely

    def catch(self, exchange: str) -> None:
        """Have a stranger's queue get whatever *exchange* is still to get."""
        stranger = self.connections[STRANGER]
        kind = self.kinds.get(exchange)
        if kind is None:
            kind = self.kinds[exchange] = "fanout"
            declare_exchange(stranger, exchange, kind)
        queue = declare_queue(stranger, f"c{exchange}")
        self.queues[queue] = STRANGER
        for key in KEYS if kind == "direct" else ["#"]:
            arguments = {"x-match": "any", "h": 1} if kind == "headers" else {}
            bind(stranger, queue, exchange, key, **arguments)

    def remove(self) -> None:
        channel = self.connections[STRANGER].default_channel
        channel.queue_purge(TOPOLOGY.parking_queue)
        for index in range(len(self.plan.owners)):
            channel.queue_delete(self.queue(index))
            channel.queue_delete(TOPOLOGY.queue_landing_queue(self.queue(index)))
        for index in range(len(self.plan.kinds)):
            exchange = self.exchange(index)
            channel.queue_delete(f"c{exchange}")
            channel.queue_delete(TOPOLOGY.landing_queue(exchange))
            names = exchange, TOPOLOGY.landing_marker(exchange), TOPOLOGY.copied_marker(exchange)
            for name in names:
                channel.exchange_delete(name)


_numbers = count()

#: Time for the changes; more where the machine is busy.
_lead_seconds = [1.5]
MOST_LEAD_SECONDS = 4.5


@contextmanager
def graph_of(url: str, plan: Plan) -> Iterator[Graph]:
    graph = Graph(plan, next(_numbers), {})
    options = {"landing_exchanges": graph.listed()}
    with (
        delaying(url, **options) as worker,
        delaying(url, **options) as producer,
        Connection(url, transport_options={"confirm_publish": True}) as stranger,
    ):
        graph.connections = {WORKER: worker, PRODUCER: producer, STRANGER: stranger}
        try:
            yield graph
        finally:
            graph.remove()


def check(graph: Graph, tally: Counter[str], held: Callable[[], object]) -> None:
    graph.declare()
    sent = [graph.send(number, _lead_seconds[0]) for number in range(len(graph.plan.messages))]
    graph.change()
    if time() > min(message.due for message in sent):
        # Some were due before all was changed.
        _lead_seconds[0] = min(1.5 * _lead_seconds[0], MOST_LEAD_SECONDS)
        tally["late"] += 1
        return
    now_reached = {m.number: graph.reached(m.exchange, m.key) for m in sent}
    known = {m.number: graph.is_known(m, now_reached[m.number]) for m in sent}

    def take() -> None:
        came, graph.early = graph.early + graph.take(), []
        for queue, number in came:
            sent[number].came.append(queue)

    def all_came() -> bool:
        take()
        # What parks is due, too, and a worker sends it on.
        rescue(delays_of(graph.connections[WORKER]))
        return (
            time() > max(m.due for m in sent) + 0.2
            and levels_are_empty(graph)
            and all(now_reached[m.number] <= set(m.came) if known[m.number] else True for m in sent)
        )

    try:
        wait_until(all_came, timeout_seconds=PATIENCE_SECONDS)
    except pytest.fail.Exception:
        missing = {
            m.number: (m, now_reached[m.number])
            for m in sent
            if known[m.number] and not now_reached[m.number] <= set(m.came)
        }
        raise AssertionError(f"missing: {missing}; the broker holds {held()}") from None
    take()

    left = {m.number for m in sent if not m.came}
    for exchange in {sent[number].exchange for number in left}:
        if exchange:
            graph.catch(exchange)
    for queue in {sent[number].key for number in left if not sent[number].exchange}:
        if queue not in graph.queues:
            graph.queues[declare_queue(graph.connections[STRANGER], queue)] = STRANGER

    def nothing_is_left() -> bool:
        take()
        rescue(delays_of(graph.connections[WORKER]))
        return all(m.came for m in sent)

    wait_until(nothing_is_left, timeout_seconds=PATIENCE_SECONDS)
    take()
    for message in sent:
        assert len(message.came) == len(set(message.came)), f"doubled: {message}"
        came = {queue for queue in message.came if not queue.startswith("c")}
        if message.number in left:
            continue
        tally["as it is" if known[message.number] else "as it is or was"] += 1
        tally["changed"] += now_reached[message.number] != message.reached
        if known[message.number]:
            assert came == now_reached[message.number], message
        else:
            assert came <= graph.ever_bound.get(message.exchange, {message.key}), message
    tally["caught"] += len(left)


def levels_are_empty(graph: Graph) -> bool:
    return all(depth(graph.connections[STRANGER], hop.queue) == 0 for hop in TOPOLOGY.level_queues)


@pytest.mark.ci
@pytest.mark.timeout(600 if not MORE_EXAMPLES else 0)
def test_a_message_goes_where_it_would_go_when_it_is_due(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str
) -> None:
    """As far as installed connections were told of the changes.

    What they were not told of: there, or to what was bound there while it waited. Never lost, never
    doubled: what has nowhere to go waits until it has.
    """
    tally: Counter[str] = Counter()

    @settings(
        max_examples=MORE_EXAMPLES or EXAMPLES,
        derandomize=not MORE_EXAMPLES,
        phases=list(Phase) if MORE_EXAMPLES else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(plans())
    def every_plan(plan: Plan) -> None:
        with graph_of(mortal_url, plan) as graph:
            check(graph, tally, lambda: held(mortal_rabbitmq, vhost_name(mortal_url)))

    every_plan()
    assert tally["changed"]
    assert tally["caught"]


# ---- what connections are told of --------------------------------------------------------------


@pytest.fixture
def worker(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


@pytest.fixture
def producer(vhost_url: str) -> Iterator[Any]:
    with delaying(vhost_url) as connection:
        delays_of(connection).prepare()
        yield connection


def serve(worker: Any, queue: str, exchange: str, kind: str, **arguments: Any) -> None:
    """Declare and bind as a worker does that consumes."""
    declare_exchange(worker, exchange, kind)
    declare_queue(worker, queue, **arguments)
    bind(worker, queue, exchange, "a")
    delays_of(worker).prepare(consuming=True)


def test_an_exchange_of_another_type_gets_what_waited_for_it(worker: Any, producer: Any) -> None:
    """The queue that was bound to the old one gets it no more."""
    serve(worker, "old", "shop", "direct")
    publish(producer, "waits", "a", exchange="shop", delay=2)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    wait_until(lambda: parked_count(worker) == 1, timeout_seconds=PATIENCE_SECONDS)
    rescue(delays_of(worker))
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "waits")


def test_a_producer_learns_that_an_exchange_is_of_another_type(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ROUTE_SECONDS: what it sends from then on needs no rescue."""
    serve(worker, "old", "shop", "direct")
    declare_exchange(producer, "shop", "direct")
    bind(producer, "old", "shop", "a")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    with inbox_of(worker, "old") as letters:
        letters.wait_for(1)
    worker.default_channel.exchange_delete("shop")
    serve(worker, "new", "shop", "fanout")
    publish(producer, "after", "a", exchange="shop", delay=0.2)
    with inbox_of(worker, "old", "new") as letters:
        (came,) = letters.wait_for(1)
    assert (came.queue, came.body) == ("new", "after")


def test_a_producer_learns_that_an_exchange_is_gone(
    worker: Any, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a message without a delay tells it."""
    serve(worker, "old", "shop", "direct")
    monkeypatch.setattr(routes, "ROUTE_SECONDS", 0.0)
    publish(producer, "before", "a", exchange="shop", delay=0.2)
    worker.default_channel.exchange_delete("shop")
    with pytest.raises(NotFound):
        publish(producer, "after", "a", exchange="shop", delay=0.2)


def test_whoever_deletes_a_queue_takes_its_landing_queue_along(worker: Any, producer: Any) -> None:
    """What waits for it then parks like any other, instead of in copies for that queue alone."""
    serve(worker, "full", "shop", "direct", **REJECTS)
    assert depth(worker, TOPOLOGY.queue_landing_queue("full")) == 0
    producer.default_channel.queue_delete("full")
    with pytest.raises(NotFound):
        depth(worker, TOPOLOGY.queue_landing_queue("full"))


@contextmanager
def inbox_of(connection: Any, *queues: str) -> Iterator[Inbox]:
    letters = Inbox(connection).consume(queues)
    yield letters
    letters.close()
