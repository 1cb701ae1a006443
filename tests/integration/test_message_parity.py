"""A delayed message has the same properties, headers and body as the undelayed one.

Random messages as py-amqp sends them: each is sent without a delay, and then on each path that a
delayed message can take, to an installed and to a plain consumer. Examples are drawn the
same in every run; `NATIVE_DELAY_PARITY_EXAMPLES=1000` draws that many new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from itertools import count
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Connection

from celery_native_delay.due_time import due_us
from celery_native_delay.message import HEADER
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.transports.interface import Rescue, Wait
from celery_native_delay.transports.rabbitmq.channels import Publication
from celery_native_delay.transports.rabbitmq.parking import rescue
from celery_native_delay.transports.rabbitmq.parts import RabbitMQWorkerPart
from celery_native_delay.transports.rabbitmq.topology import is_delay_name
from celery_native_delay.transports.rabbitmq.wrapping import DEATH_HEADERS
from tests.brokers import in_turn
from tests.integration.test_parity import MORE_EXAMPLES, PAST, examples
from tests.integration.traffic import (
    SETTINGS,
    TOPOLOGY,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    depth,
)
from tests.traffic import PATIENCE_SECONDS, beside, eta_in
from tests.waiting import wait_until

EXAMPLES = 7

# ---- messages --------------------------------------------------------------------------------

any_text = st.text(st.characters(codec="utf-8"), max_size=12)

#: The types of an AMQP table that py-amqp can write.
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 127, 128, 2**31 - 1, 2**31, -(2**31), -(2**63), 2**63 - 1]),
    st.floats(allow_nan=False),
    any_text,
    st.binary(max_size=6),
    st.builds(
        lambda number, digits: Decimal(number).scaleb(-digits),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(0, 12),
    ),
    st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)).map(
        lambda at: at.replace(microsecond=0)
    ),
)
names = st.sampled_from(["h", "", "é%.#", "x-h", "x-opt-h", "n" * 100, "expires", "root_id"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)

#: Optional properties.
properties = st.fixed_dictionaries(
    {},
    optional={
        "content_type": st.sampled_from(["", "text/plain", "application/json", "é"]),
        "delivery_mode": st.sampled_from([1, 2]),
        "priority": st.integers(0, 255),
        "correlation_id": any_text,
        "reply_to": any_text,
        "expiration": st.sampled_from(["60000", "3600000"]),
        "message_id": any_text,
        "timestamp": st.sampled_from([0, 1, 2**31, 2**32, 2**63]) | st.integers(0, 2**40),
        "type": any_text,
        "user_id": st.just("guest"),
        "app_id": any_text,
        "cluster_id": any_text,
    },
)

bodies = st.one_of(
    st.tuples(any_text, st.sampled_from([None, "utf-8", "utf-16", "utf-8-sig"])),
    st.tuples(
        st.binary(max_size=12) | any_text.map(str.encode) | st.just(b""),
        st.sampled_from([None, "", "utf-8", "binary", "utf-16", "latin-1", "utf-7", "zlib"]),
    ),
    st.tuples(st.just(b"\xfe\xff\0a"), st.just("utf-16")),
)


@dataclass(frozen=True)
class Sent:
    """A message to publish; made anew for each publish, because py-amqp changes it."""

    body: str | bytes
    properties: dict[str, Any]
    headers: dict[str, Any]

    def message(self, eta: str) -> amqp.Message:
        headers = self.headers | {"eta": eta}
        return amqp.Message(self.body, application_headers=headers, **self.properties)


@st.composite
def messages(draw: st.DrawFn) -> Sent:
    body, encoding = draw(bodies)
    drawn = draw(properties)
    if encoding is not None:
        drawn["content_encoding"] = encoding
    return Sent(body, drawn, draw(st.dictionaries(names, values, max_size=4)))


# ---- a message as a consumer sees it ---------------------------------------------------------


def as_received(raw: amqp.Message, channel: Any) -> dict[str, Any]:
    """Everything that a consumer sees of a message, except its ETA."""
    if hasattr(channel, "delays"):
        message = channel.message_to_python(raw)
        came = {
            "kombu": (message.content_type, message.content_encoding, message.headers),
            "body": message.body,
        }
        properties, info = message.properties, message.delivery_info
    else:
        came, properties, info = {"body": raw.body}, raw.properties, raw.delivery_info
    headers = properties["application_headers"]
    headers.pop("eta")
    return {
        **came,
        "type of body": type(came["body"]),
        "properties": properties,
        # As text, so that True is not 1, nor 1 a Decimal.
        "exactly": repr(sorted(headers.items())),
        "info": {name: info[name] for name in ("exchange", "routing_key", "redelivered")},
    }


def as_plainly_seen(came: dict[str, Any], way: str) -> dict[str, Any]:
    """*came* without our header and the other traces that a plain consumer sees."""
    properties = dict(came["properties"])
    properties.pop("expiration", None)
    if way in SENT_AGAIN:
        properties.pop("user_id", None)
    headers = {
        name: value
        for name, value in properties.pop("application_headers").items()
        if name not in {HEADER, *DEATH_HEADERS}
    }
    info = dict(came["info"])
    if is_delay_name(info["exchange"]):
        exchange, key = WAYS[way]
        info |= {"exchange": exchange, "routing_key": key}
    return {
        "body": came["body"],
        "type of body": came["type of body"],
        "properties": properties,
        "headers": headers,
        "info": info,
    }


# ---- the paths -------------------------------------------------------------------------------

#: A delay through two levels, long enough for the tests' steps.
DELAY_UNITS = 9
DELAY_SECONDS = DELAY_UNITS * SETTINGS["resolution"]

#: The exchange and routing key of each path; its queue has the path's name.
WAYS = {
    "returned": ("", "returned"),  # the first: it takes a level away
    "confirmed": ("", "confirmed"),
    "direct": ("billing", "é"),
    "topic": ("shop", "orders.new"),
    "landing": ("news", "any"),
    "rejecting": ("amq.topic", "orders.new"),
    "adopted": ("billing", "adopted"),
    "parked": ("half-known", "parked"),
    "parked early": ("", "parked early"),
    "moved": ("billing", "moved"),
    "cancelled": ("", "cancelled"),
}

#: The paths on which a worker publishes the message again, for plain consumers without user_id.
SENT_AGAIN = {"adopted", "parked", "parked early", "moved", "cancelled"}


@dataclass
class Site:
    """A broker with a queue for each path, and the connections that send and receive."""

    plain: Any
    producers: dict[str, Any]
    worker: Any
    """Another user of the broker, whom RabbitMQ lets send no `user_id` but his own."""
    receiver: Any
    numbers: Iterator[int] = field(default_factory=count)
    rescued: int = 0
    put_back_early: int = 0

    def task(self) -> dict[str, str]:
        """The headers by which the records identify a message."""
        return {"task": "shop.remind", "id": f"id-{next(self.numbers)}"}

    def declare(self) -> None:
        installed = self.producers["confirmed"]
        for name, kind in (("billing", "direct"), ("shop", "topic"), ("news", "fanout")):
            declare_exchange(installed, name, kind)
        # All bindings to it but one are mirrored.
        declare_exchange(installed, "half-known", "direct")
        declare_queue(installed, "known")
        bind(installed, "known", "half-known", "known")
        for name, (exchange, key) in WAYS.items():
            arguments = {"x-overflow": "reject-publish"} if name == "rejecting" else {}
            if name in ("topic", "confirmed"):
                arguments["x-queue-type"] = "quorum"
            owner = self.plain if name in ("parked", "returned") else installed
            declare_queue(owner, name, **arguments)
            if exchange:
                pattern = "orders.#" if exchange in ("amq.topic", "shop") else key
                bind(owner, name, exchange, pattern)
        delays_of(installed).prepare(consuming=True)
        for producer in self.producers.values():
            delays_of(producer).prepare()

    def send_undelayed(self, way: str, sent: Sent) -> None:
        self.plain.default_channel.basic_publish(sent.message(PAST), *WAYS[way])

    def send(self, way: str, sent: Sent) -> None:
        getattr(self, f"_{way.replace(' ', '_')}", self._plainly)(way, sent)

    def _plainly(
        self, way: str, sent: Sent, mode: str = "confirmed", seconds: float = DELAY_SECONDS
    ) -> None:
        channel = self.producers[mode].default_channel
        channel.basic_publish(sent.message(eta_in(seconds)), *WAYS[way])

    def _returned(self, way: str, sent: Sent) -> None:
        """The message is returned: its level queue was deleted."""
        hop = delays_of(self.producers["confirmed"]).topology.path(DELAY_UNITS)[0]
        self.plain.default_channel.queue_delete(hop.queue)
        self._plainly(way, sent)

    def _adopted(self, way: str, sent: Sent) -> None:
        """A plain producer sent it early, and a worker puts it back."""
        eta = eta_in(DELAY_SECONDS)
        self.plain.default_channel.basic_publish(sent.message(eta), *WAYS[way])
        channel = self.worker.default_channel
        message = channel.message_to_python(self._get(way, channel, sent, no_ack=False))
        part = RabbitMQWorkerPart(channel, channel.delays.settings)
        assert part.put_back([Wait(message, way, due_us(eta))]) == [None]
        message.ack()

    def _parked(self, way: str, sent: Sent) -> None:
        """The message is parked, as its queue's binding is not mirrored; a worker rescues it."""
        self._plainly(way, sent)

        def arrived() -> bool:
            self.rescued += self._rescue().delivered
            return depth(self.plain, way) == 1

        wait_until(arrived)

    def _parked_early(self, way: str, sent: Sent) -> None:
        """The message is parked before it is due; a worker puts it back into the levels."""
        eta = eta_in(5 * DELAY_SECONDS)
        delays = delays_of(self.producers["confirmed"])
        sooner = Publication(sent.message(eta), *WAYS[way])
        publication = delays.into_levels(sooner, due_us=due_us(eta))
        assert publication is not sooner
        self.plain.default_channel.basic_publish(
            publication.message, TOPOLOGY.parking_exchange, publication.routing_key
        )
        put_back = self.put_back_early

        def waits_again() -> bool:
            self.put_back_early += self._rescue().waiting_again
            return self.put_back_early > put_back

        wait_until(waits_again)

    def _rescue(self) -> Rescue:
        """One rescue of all parked messages.

        A parked message may be from an earlier example, which met a deleted level queue; and on a
        busy broker a round may find none.
        """
        outcome = rescue(delays_of(self.worker))
        assert outcome is not None
        return outcome

    def _moved(self, way: str, sent: Sent) -> None:
        """The message waits in a store, and is moved there."""
        self._plainly(way, sent, "stored", seconds=5)
        then_us = due_us(eta_in(DELAY_SECONDS))
        (outcome,) = self.waiting.move([sent.headers["id"]], lambda task: then_us)
        assert outcome, outcome

    def _cancelled(self, way: str, sent: Sent) -> None:
        """The message is cancelled; a copy that announces it arrives at once."""
        self._plainly(way, sent, "stored", seconds=5)
        (outcome,) = self.waiting.cancel([sent.headers["id"]])
        assert outcome, outcome

    @property
    def waiting(self) -> Any:
        channel = self.producers["stored"].default_channel
        return channel.waiting_tasks(channel.delays.settings)

    def receive(self, way: str, sent: Sent) -> dict[str, Any]:
        channel = self.receiver.default_channel
        return as_received(self._get(way, channel, sent, no_ack=True), channel)

    def _get(self, queue: str, channel: Any, sent: Sent, *, no_ack: bool) -> amqp.Message:
        def get() -> Any:
            came = channel.basic_get(queue, no_ack=no_ack)
            return came if came and came.headers["id"] == sent.headers["id"] else None

        get.__qualname__ = f"what was sent to {queue!r}"
        return wait_until(get, timeout_seconds=PATIENCE_SECONDS)


@contextmanager
def site_of(url: str, worker_url: str, store: str, *, consumer: str) -> Iterator[Site]:
    with ExitStack() as stack:

        def connection(url: str = url, **options: Any) -> Any:
            return stack.enter_context(delaying(url, **options))

        plain = stack.enter_context(Connection(url, transport_options={"confirm_publish": True}))
        producers = {"confirmed": connection(), "stored": connection(store=store)}
        receiver = connection() if consumer == "installed" else stack.enter_context(Connection(url))
        worker = connection(worker_url)
        stored = producers["stored"].default_channel
        dispatcher = Dispatcher(stored.needed_store, lambda: stored.publisher_of(delaying(url)))
        stack.enter_context(beside(dispatcher.run, stop=dispatcher.stop))
        site = Site(plain, producers, worker, receiver)
        site.declare()
        yield site


@pytest.mark.ci
@pytest.mark.timeout(600 if not MORE_EXAMPLES else 0)
@in_turn("consumer", ("installed",), ("plain",))
def test_on_every_path_a_message_arrives_as_without_its_delay(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str, store_redis: PrivateRedis, consumer: str
) -> None:
    @examples(EXAMPLES)
    @given(messages())
    def every_message(drawn: Sent) -> None:
        ways = {way: replace(drawn, headers=drawn.headers | site.task()) for way in WAYS}
        for way, sent in ways.items():
            site.send_undelayed(way, sent)
        undelayed = {way: site.receive(way, sent) for way, sent in ways.items()}
        for way, sent in ways.items():
            site.send(way, sent)
        different = {}
        for way, expected in undelayed.items():
            came = site.receive(way, ways[way])
            if consumer == "plain":
                expected, came = as_plainly_seen(expected, way), as_plainly_seen(came, way)
                if way == "cancelled":
                    # So that a plain worker announces it as expired.
                    assert came["headers"].pop("expires") == "2000-01-01T00:00:00+00:00"
                    expected["headers"].pop("expires", None)
            if came != expected:
                different[way] = [
                    (name, expected[name], came[name])
                    for name in expected
                    if came[name] != expected[name]
                ]
        assert not different, (drawn, different)

    urls = vhost_url, rabbitmq.add_user(f"worker-{vhost}", "secret", vhost=vhost), store_redis.url
    with site_of(*urls, consumer=consumer) as site:
        every_message()
        assert site.rescued
        assert site.put_back_early
