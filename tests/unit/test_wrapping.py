"""Wrapping a message for RabbitMQ's levels, and unwrapping it when a worker receives it."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_native_delay import CannotDelay, InvalidDueTime
from celery_native_delay.message import Delayed, due_of
from celery_native_delay.transports.rabbitmq.wrapping import DEATH_HEADERS, HEADER, unwrap, wrap

NOW_US = 1_795_176_000_000_000
DUE_US = NOW_US + 60_000_000
ETA = "2026-11-20T12:01:00+00:00"

LEVEL = "celery_delay.v1.31x125ms.f15.quorum.level-07"
DELIVERY = "celery_delay.v1.31x125ms.f15.quorum.delivery"

patient = settings(max_examples=100)


def wrapped(properties: dict[str, Any], **changes: Any) -> dict[str, Any]:
    options = {name: changes.pop(name) for name in ("limit_priority", "user") if name in changes}
    wait = Delayed("id-1", DUE_US, "jobs", "a.b")._replace(**changes)
    return wrap(properties, wait, now_us=NOW_US, **{"limit_priority": False, **options})


def after_the_levels(properties: dict[str, Any]) -> dict[str, Any]:
    """*properties* with the headers that RabbitMQ adds while a message waits in two levels."""
    deaths = [
        {"queue": LEVEL, "reason": "expired", "exchange": f"{LEVEL}0", "count": 1},
        {"queue": f"{LEVEL}-f", "reason": "expired", "exchange": LEVEL, "count": 1},
    ]
    headers = dict(properties["application_headers"])
    headers["x-death"] = deaths + headers.get("x-death", [])
    for order in ("first", "last"):
        headers.setdefault(f"x-{order}-death-queue", LEVEL)
        headers.setdefault(f"x-{order}-death-exchange", LEVEL)
        headers.setdefault(f"x-{order}-death-reason", "expired")
    return properties | {"application_headers": headers}


def opened(
    properties: dict[str, Any], info: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any], Delayed]:
    found = unwrap(properties, info or {"exchange": DELIVERY, "routing_key": "0.1.%jobs.a.b"})
    assert found is not None
    return found


# ---- round trip ----------------------------------------------------------------------------

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
ours_or_the_brokers = {"CC", "BCC", HEADER, *DEATH_HEADERS}
header_names = st.one_of(
    st.text(min_size=1, max_size=8), st.sampled_from(["eta", "id", "task", "x-match", "x-retry"])
).filter(lambda name: name not in ours_or_the_brokers)
user_queues = st.sampled_from(["jobs", "retry.v1", "celery_delay", "v1.parked.jobs", ""])


@st.composite
def other_peoples_deaths(draw: st.DrawFn) -> dict[str, Any]:
    queues = draw(st.lists(user_queues, max_size=3))
    if not queues:
        return {}
    deaths = [
        {"queue": queue, "reason": "rejected", "exchange": "dlx", "count": number + 1}
        for number, queue in enumerate(queues)
    ]
    headers: dict[str, Any] = {"x-death": deaths}
    for order, queue in (("first", queues[-1]), ("last", queues[0])):
        if draw(st.booleans()):
            headers |= {
                f"x-{order}-death-exchange": "dlx",
                f"x-{order}-death-queue": queue,
                f"x-{order}-death-reason": "rejected",
            }
    return headers


@st.composite
def all_properties(draw: st.DrawFn) -> dict[str, Any]:
    headers = draw(st.dictionaries(header_names, values, max_size=5))
    headers |= draw(other_peoples_deaths())
    properties: dict[str, Any] = {"application_headers": headers, "correlation_id": "id"}
    if draw(st.booleans()):
        properties["priority"] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        properties["expiration"] = str(draw(st.integers(0, 10**9)))
    return properties


@patient
@given(
    properties=all_properties(),
    exchange=st.text(max_size=8),
    routing_key=st.text(max_size=8),
    limit_priority=st.booleans(),
)
def test_wrapping_and_unwrapping_restores_a_message(
    properties: dict[str, Any], exchange: str, routing_key: str, limit_priority: bool
) -> None:
    """No dict of the caller is changed: kombu's retry and a task's retry pass the same again."""
    before = copy.deepcopy(properties)
    went_in = wrapped(
        properties, exchange=exchange, routing_key=routing_key, limit_priority=limit_priority
    )
    assert properties == before
    waited = after_the_levels(went_in)
    before = copy.deepcopy(waited)
    info = {
        "exchange": DELIVERY,
        "routing_key": "0.1.%jobs.a.b",
        "delivery_tag": 3,
        "consumer_tag": "c",
        "redelivered": False,
    }
    came_out, came_by, delayed = opened(waited, info)
    assert waited == before
    assert came_out == properties
    assert came_by == info | {"exchange": exchange, "routing_key": routing_key}
    assert (delayed.exchange, delayed.routing_key) == (exchange, routing_key)
    assert (delayed.delivery_id, delayed.due_us) == ("id-1", DUE_US)


def test_a_message_without_our_header_is_not_unwrapped() -> None:
    assert unwrap({}, {"exchange": "jobs"}) is None
    for headers in ({}, *({"native_delay": header} for header in (None, "v1", {"v": 2}))):
        assert unwrap({"application_headers": headers}, {"exchange": "jobs"}) is None


@pytest.mark.parametrize("eta", [None, "2026-11-20T13:00:00+00:00"])
def test_our_header_is_ignored_on_a_plain_workers_retry(eta: str | None) -> None:
    """Celery copies unknown headers to a retry, which did not wait and has its own expiration."""
    headers = {"task": "t", "eta": "2026-11-20T12:01:00+00:00"}
    first = wrapped({"application_headers": headers, "expiration": "90000"})
    retried = {"application_headers": first["application_headers"] | {"eta": eta}}
    found = unwrap(retried, {"exchange": "", "routing_key": "celery"})
    assert found is None or found[2] is None


# ---- deaths --------------------------------------------------------------------------------


def death(queue: str, reason: str = "expired", count: int = 1) -> dict[str, Any]:
    return {"queue": queue, "reason": reason, "exchange": "", "count": count}


def test_death_headers_of_our_queues_are_neither_sent_nor_seen_and_others_are_kept() -> None:
    """RabbitMQ 3.10 drops a message published with x-death of the same queue, as a cycle."""
    headers = {
        "x-death": [death(LEVEL), death("jobs", "rejected", 4)],
        "x-first-death-queue": "jobs",
        "x-first-death-reason": "rejected",
        "x-last-death-queue": LEVEL,
        "x-last-death-reason": "expired",
    }
    went_in = wrapped({"application_headers": headers})
    assert LEVEL not in str(went_in["application_headers"])
    came_out, _, _ = opened(after_the_levels(went_in))
    assert came_out["application_headers"] == {
        "x-death": [death("jobs", "rejected", 4)],
        "x-first-death-queue": "jobs",
        "x-first-death-reason": "rejected",
    }


def test_a_death_header_added_after_the_delivery_is_kept() -> None:
    """The user's queue dead-lettered the task into the user's dead-letter queue.

    RabbitMQ wrote ``x-first-death-*`` when the message left its first delay level. Without a delay
    it would have named the user's queue.
    """
    waited = after_the_levels(wrapped({"application_headers": {"eta": ETA}}))
    headers = waited["application_headers"]
    rejected = death("jobs", "rejected") | {"exchange": "dlx"}
    headers["x-death"] = [rejected, *headers["x-death"]]
    headers |= {f"x-last-death-{part}": rejected[part] for part in ("queue", "exchange", "reason")}
    came_out, _, _ = opened(waited, {"exchange": "dlx", "routing_key": "a.b"})
    assert came_out["application_headers"] == {
        "eta": ETA,
        "x-death": [rejected],
        "x-first-death-queue": "jobs",
        "x-first-death-exchange": "dlx",
        "x-first-death-reason": "rejected",
        "x-last-death-queue": "jobs",
        "x-last-death-exchange": "dlx",
        "x-last-death-reason": "rejected",
    }


def test_the_first_of_several_later_deaths_is_found_by_its_time() -> None:
    """RabbitMQ moves an entry to the front of ``x-death`` when its queue dead-letters again."""
    waited = after_the_levels(wrapped({"application_headers": {"eta": ETA}}))
    again = death("jobs", "rejected", 2) | {"time": datetime(2026, 1, 1)}
    between = death("others", "rejected") | {"time": datetime(2026, 1, 2)}
    waited["application_headers"]["x-death"][:0] = [again, between]
    came_out, _, _ = opened(waited, {"exchange": "dlx", "routing_key": "a.b"})
    assert came_out["application_headers"]["x-first-death-queue"] == "jobs"


def test_of_deaths_before_and_after_the_delay_the_last_is_the_later_one() -> None:
    """The first one is the one before the delay."""
    before = {
        "eta": ETA,
        "x-death": [death("before")],
        "x-first-death-queue": "before",
        "x-last-death-queue": "before",
        "x-last-death-exchange": "old",
        "x-last-death-reason": "expired",
    }
    waited = after_the_levels(wrapped({"application_headers": before}))
    headers = waited["application_headers"]
    headers["x-death"] = [death("after"), *headers["x-death"]]
    headers |= {"x-last-death-queue": "after", "x-last-death-exchange": "new"}
    came_out, _, _ = opened(waited, {"exchange": "dlx", "routing_key": "a.b"})
    assert came_out["application_headers"] == before | {
        "x-death": [death("after"), death("before")],
        "x-last-death-queue": "after",
        "x-last-death-exchange": "new",
    }


# ---- refused messages, and headers that must not be copied ---------------------------------


@pytest.mark.parametrize("name", ["CC", "BCC"])
def test_cc_and_bcc_headers_are_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(CannotDelay) as refused:
        wrapped({"application_headers": {name: ["b"]}})
    for said in ("'jobs'", "CC or BCC", "one delayed message per routing key"):
        assert said in str(refused.value)


def test_a_priority_is_limited_only_while_the_message_waits() -> None:
    for priority, limited, travels_with in ((4, True, 4), (5, True, 4), (255, False, 255)):
        went_in = wrapped({"priority": priority}, limit_priority=limited)
        assert went_in["priority"] == travels_with
        assert opened(went_in)[0]["priority"] == priority


def test_the_due_time_in_our_header_is_rounded_up() -> None:
    assert opened(wrapped({}, due_us=DUE_US + 1))[2].due_us == DUE_US + 1000


def test_due_of_reads_the_due_time_of_a_task() -> None:
    for headers in (None, {"task": "t"}, {"task": "t", "eta": ""}):
        assert due_of(headers) is None
    for eta in ("2026-11-20T12:00:00+00:00", datetime(2026, 11, 20, 12, tzinfo=UTC)):
        assert due_of({"task": "t", "eta": eta}) == due_of({"eta": eta}) == NOW_US
    for invalid in ("soon", 5.5, [1]):
        assert due_of({"eta": invalid}) is None, "it is no Celery task, so this is no due time"
        with pytest.raises(InvalidDueTime, match="got "):
            due_of({"task": "t", "eta": invalid})
