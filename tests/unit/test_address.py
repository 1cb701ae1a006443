"""Addresses in routing keys: one per destination, and topic patterns keep their meaning."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.rabbitmq.address import (
    is_nameable,
    landing_address,
    message_address,
    queue_address,
    queue_of_address,
    topic_binding_address,
    topic_matches,
)
from celery_native_delay.transports.rabbitmq.topology import Topology

patient = settings(max_examples=300)

#: Words in which everything that an escape could confuse comes up often.
words = st.sampled_from(["", "a", "b", "*", "#", "%", "%2A", "%25", "2A", "a*", "#b", "é", "0"])
keys = st.lists(words, max_size=4).map(".".join)
names = st.one_of(keys, st.text(max_size=8))


def matches(pattern: str, key: str) -> bool:
    """True if AMQP's rules for topic exchanges match *key*; tries every length of every ``#``."""
    of_key = key.split(".") if key else []
    of_pattern = pattern.split(".") if pattern else []
    lengths = [range(len(of_key) + 1) if word == "#" else range(1) for word in of_pattern]
    for chosen in product(*lengths):
        expanded: list[str] = []
        for word, length in zip(of_pattern, chosen, strict=True):
            expanded += ["*"] * length if word == "#" else [word]
        if len(expanded) == len(of_key) and all(
            want in ("*", got) for want, got in zip(expanded, of_key, strict=True)
        ):
            return True
    return False


@pytest.mark.parametrize(
    ("exchange", "routing_key", "address"),
    [
        ("", "", "%"),
        ("*", "a", "%%2A.a"),
        ("jobs.eu", "a.#.b", "%jobs%2Eeu.a.%23.b"),
        ("jobs", "%2A", "%jobs.%252A"),
        ("jobs", "a*b", "%jobs.a*b"),  # no wildcard inside a word
    ],
)
def test_message_addresses(exchange: str, routing_key: str, address: str) -> None:
    """In queue names and bindings of brokers in production; more are in test_mirror."""
    assert message_address(exchange, routing_key) == address


@patient
@given(one=st.tuples(names, names), other=st.tuples(names, names))
@example(one=("", "a.b"), other=("a", "b"))
@example(one=("a.b", "c"), other=("a", "b.c"))
@example(one=("a", "*"), other=("a", "%2A"))
@example(one=("a", ""), other=("a", "."))
def test_different_destinations_have_different_addresses(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (message_address(*one) == message_address(*other)) == (one == other)


@patient
@given(exchange=names, other=st.none() | names, pattern=keys, key=keys)
@example(exchange="", other=None, pattern="#", key="")
@example(exchange="", other=None, pattern="#.#", key="a")
@example(exchange="", other=None, pattern="*", key="*")
@example(exchange="", other=None, pattern="a.#", key="a")
def test_a_binding_address_matches_a_message_of_its_exchange_if_the_pattern_matches_the_key(
    exchange: str, other: str | None, pattern: str, key: str
) -> None:
    """It never matches a message to another exchange."""
    to = exchange if other is None else other
    hit = topic_matches(topic_binding_address(exchange, pattern), message_address(to, key))
    assert hit == (to == exchange and matches(pattern, key))


@patient
@given(pattern=keys, key=keys)
def test_topic_matches_follows_amqp(pattern: str, key: str) -> None:
    assert topic_matches(pattern, key) == matches(pattern, key)


@patient
@given(exchange=names, bound=keys, key=keys)
def test_wildcards_of_a_direct_binding_are_literal(exchange: str, bound: str, key: str) -> None:
    """A direct exchange compares keys.

    The delivery exchange is a topic exchange and must match no more.
    """
    hit = topic_matches(message_address(exchange, bound), message_address(exchange, key))
    assert hit == (bound == key)


@patient
@given(name=names, other=names, exchange=names, pattern=keys)
@example(name="foo", other="", exchange="l", pattern="#")
@example(name="foo", other="", exchange="q", pattern="#")
@example(name="foo", other="", exchange="l", pattern="foo")
def test_no_user_binding_matches_the_address_of_a_landing_queue_nor_does_another(
    name: str, other: str, exchange: str, pattern: str
) -> None:
    bound = topic_binding_address(exchange, pattern)
    assert not topic_matches(bound, landing_address(name))
    assert not topic_matches(bound, queue_address(name))
    assert (landing_address(name) == landing_address(other)) == (name == other)
    assert (queue_address(name) == queue_address(other)) == (name == other)
    assert landing_address(name) != queue_address(other)


@given(name=st.text(alphabet="ab.é名", max_size=85))
def test_the_brokers_error_about_a_derived_queue_name_fits_into_its_frame(name: str) -> None:
    derived = Topology(DelaySettings()).landing_queue(name)
    assert is_nameable(derived, "a virtual host of 生产", "celery-user")
    if len(name.encode()) > 24:
        assert is_nameable(derived, "v" * 255, "celery-user")


def test_a_hashed_queue_name_cannot_be_read_from_its_address() -> None:
    assert queue_of_address("0.1." + queue_address("q" * 101)) is None
    assert queue_of_address("0.1." + queue_address("q.名")) == "q.名"
