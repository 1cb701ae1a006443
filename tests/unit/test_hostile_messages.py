"""Messages with arbitrary content: no gate raises, because an error there would end the worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_native_delay import Rate, install
from celery_native_delay.clock import Clock
from celery_native_delay.keyed.record import HEADER as UNIQUE
from celery_native_delay.keyed.record import LOCKS
from celery_native_delay.message import HEADER, ONCE, Delayed
from celery_native_delay.schedules.state import HEADER as OCCURRENCE
from celery_native_delay.transports.rabbitmq.wrapping import unwrap
from celery_native_delay.transports.virtual.wrapping import unwrapped
from celery_native_delay.worker.arrival import Arrival, Ruling
from celery_native_delay.worker.gates import Revoked
from celery_native_delay.worker.leases import Leases
from celery_native_delay.worker.rating import PLACE, Rated

NOW_US = 1_795_176_000_000_000
RATED = "shop.call_api"


def call_api(tenant: str, number: int = 0) -> None:
    """A task's function."""


TEXTS = st.text(max_size=8) | st.text("\ud800\udfff\0/ ٣", max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**30), 10**400, 2**63])
    | st.floats()
    | TEXTS
    | st.sampled_from(["9" * 30, "9" * 5000, "\ud800", "9999-12-31T23:59:59-23:59", "1e400"])
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)
LINES = [RATED, f"{RATED}\nada", "all", "all\nada"]
PLACES = st.dictionaries(st.sampled_from(LINES) | TEXTS, SCALARS).map(json.dumps)
STAMPS = st.builds("{}/{}/{}".format, TEXTS, SCALARS, TEXTS)


def like(**fields: Any) -> st.SearchStrategy[Any]:
    """Dicts with these fields as given, or with each arbitrary or missing; or any other value."""
    loose = {name: ANYTHING | value for name, value in fields.items()}
    arbitrary = ANYTHING | st.fixed_dictionaries({}, optional=loose)
    return st.fixed_dictionaries(fields) | arbitrary


OURS = like(
    v=st.just(1),
    id=TEXTS,
    due=st.integers(0, 10**14),
    exchange=TEXTS,
    rk=TEXTS,
    expires=st.integers(0, 10**14),
    replaces=st.tuples(TEXTS, st.integers()).map(list),
    deaths=st.fixed_dictionaries({"x-death": ANYTHING}),
    cancelled=st.booleans(),
)
MARKS = like(
    v=st.just(1),
    kind=st.sampled_from(["unique", "debounce", "throttle"]),
    key=TEXTS,
    until=st.sampled_from(["start", "end"]),
)
OCCURRENCES = like(v=st.just(1), entry=TEXTS | st.just("9" * 5000), number=st.integers())
HEADERS = st.fixed_dictionaries(
    {"task": st.sampled_from([RATED, "other"])},
    optional={
        "id": ANYTHING,
        "eta": ANYTHING | st.just("2026-11-20T12:01:00+00:00"),
        "expires": ANYTHING,
        "tenant": ANYTHING,
        "args": ANYTHING,
        "kwargs": ANYTHING,
        HEADER: OURS,
        PLACE: ANYTHING | PLACES,
        ONCE: ANYTHING | STAMPS,
        UNIQUE: MARKS,
        OCCURRENCE: OCCURRENCES,
        "celery_beat_task": ANYTHING,
        "periodic_task_name": ANYTHING,
        LOCKS: ANYTHING | st.lists(st.tuples(TEXTS, ANYTHING), max_size=2),
    },
)
PAYLOADS = ANYTHING | st.tuples(ANYTHING, ANYTHING, ANYTHING)
ODD_HEADERS: dict[str, Any] = {
    "task": RATED,
    "id": "\ud800",
    "tenant": "\ud800",
    PLACE: json.dumps(dict.fromkeys(LINES, 10**30)),
    ONCE: "\ud800/0/a",
    UNIQUE: {"v": 1, "kind": "unique", "key": "\ud800", "until": "start"},
    LOCKS: [["\ud800", "a"]],
    OCCURRENCE: {"v": 1, "entry": "\ud800", "number": 10**400},
}
ODD_OURS = {"v": 1, "id": "\ud800", "due": 0, "exchange": "", "rk": ""}
ODD_PAYLOAD = (["\ud800"], {}, {})
KEYS: list[Any] = [
    None,
    "tenant",
    "header:tenant",
    lambda args, kwargs, headers: args[0],
    lambda args, kwargs, headers: object(),
]


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Keep no log lines, because pytest-xdist cannot send a lone surrogate in them."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def consumer(key: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Celery's consumer in this thread, with all gates; its tasks have limits with this key."""
    monkeypatch.setattr(Leases, "_work", lambda _: None)  # no task ends, so no lease does
    limits = [
        Rate("10000/s", key=key, overrides=lambda key: {"ada": "9000/s", "": "none"}.get(key)),
        Rate("10000/s", key=key, name="all", concurrent=2),
    ]
    app = Celery("shop", broker="memory://", set_as_current=False)
    for name in (RATED, "other"):
        app.task(name=name, shared=False)(call_api)
    install(app, rates={RATED: limits}, schedules=True)
    with Clock(app) as clock:
        assert clock._worker is not None
        consumer = clock._worker._consumer
        found = {type(gate): gate for gate in consumer.strategies._gates}
        found[Revoked].state = found[Rated].lines._records  # as if tasks waited in the broker, too
        yield consumer


def messages(headers: dict[str, Any], payload: Any, consumer: Any) -> Iterator[Arrival]:
    """The arrivals of a message with this content, by all transports and both task protocols."""
    opened, delayed = unwrapped(headers, {"delivery_tag": "1", "delivery_info": {}})
    came = [(opened, delayed)]
    found = unwrap({"application_headers": headers}, {"exchange": "", "routing_key": "q"})
    if found is not None:
        came.append((found[0]["application_headers"], found[2]))
    parts = [(own, payload, waited, own) for own, waited in came]
    for own, body, waited, fields in [*parts, ({}, headers, None, headers)]:
        message = SimpleNamespace(headers=own, payload=body, native_delay=waited)
        vars(message).update(delivery_tag=1, delivery_info={}, consumed_from="q")
        yield Arrival(message, fields, consumer, NOW_US)


@pytest.mark.parametrize("key", KEYS)
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(headers=HEADERS, payload=PAYLOADS)
@example(headers=ODD_HEADERS, payload=ODD_PAYLOAD)
@example(headers={"task": RATED, "id": "0", HEADER: ODD_OURS}, payload=None)
def test_no_gate_raises_or_keeps_a_task_for_ever(
    consumer: Any, key: Any, headers: dict[str, Any], payload: Any
) -> None:
    """A value that cannot be encoded is ignored as a key, a place or a mark."""
    for arrival in messages({**headers}, payload, consumer):
        for gate in consumer.strategies._gates:
            ruling: Ruling | None = gate(arrival)
            assert ruling != arrival.until_store_answers()
            if type(gate) is Rated and ruling is not None:  # it has a place, and may take its locks
                assert gate(arrival) != arrival.until_store_answers()


@given(header=OURS)
def test_our_header_is_read_completely_or_not_at_all(header: Any) -> None:
    delayed = Delayed.of(header)
    if delayed is not None:
        assert delayed.delivery_id.encode() is not None
        assert 0 <= delayed.due_us <= 253_402_300_800_000_000
