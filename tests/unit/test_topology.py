"""The plan of the delay levels: frozen in golden files, and walked in memory as RabbitMQ routes.

``python -m tests.unit.test_topology`` writes the golden file: for a new version, or before the
first release.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from celery_native_delay.due_time import units_until
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.rabbitmq.address import (
    hashed_address,
    landing_address,
    message_address,
    queue_address,
    topic_binding_address,
    topic_matches,
)
from celery_native_delay.transports.rabbitmq.topology import (
    Binding,
    Declaration,
    Exchange,
    Queue,
    Topology,
    is_delay_name,
)
from tests.walking import Trip, walk

FROZEN = Path(__file__).parent / "golden" / "topology_v1.txt"

TEN_YEARS_MS = 10 * 365 * 86400 * 1000

MAX_UNITS = 2**31 - 1

FUSED = (0, 1, 3, 7, 12, 15, 31, 60)

each_fused = pytest.mark.parametrize("fused_bits", FUSED)
patient = settings(max_examples=60)


def topology(**changes: Any) -> Topology:
    return Topology(DelaySettings(**changes))


@st.composite
def delay_settings(draw: st.DrawFn) -> DelaySettings:
    levels = draw(st.integers(1, 31))
    longest_ms = min(TEN_YEARS_MS >> levels, 3_600_000)
    return DelaySettings(
        namespace=draw(st.sampled_from(["celery_delay", "shop.eu"])),
        levels=levels,
        resolution=draw(st.integers(1, longest_ms)) / 1000,
        fused_bits=draw(st.sampled_from(FUSED)),
    )


def with_queues(levels: Topology, **addresses: str | list[str]) -> list[Declaration]:
    """The plan with further queues bound to the delivery exchange: ``queue="address"``."""
    plan = list(levels.plan())
    for queue, bound in addresses.items():
        plan.append(Queue(queue))
        plan += [
            Binding(levels.delivery_exchange, queue, levels.delivery_pattern(address))
            for address in ([bound] if isinstance(bound, str) else bound)
        ]
    return plan


def send(levels: Topology, plan: list[Declaration], units: int, address: str) -> Trip:
    return walk(plan, levels.entry_exchange(units), levels.routing_key(units, address))


# ---- names on brokers in production --------------------------------------------------------


def render(plan: list[Declaration]) -> str:
    """One readable line per declaration."""
    lines = []
    for declaration in plan:
        match declaration:
            case Exchange(name, kind, arguments):
                words = ["exchange", name, kind, *_arguments(arguments)]
            case Queue(name, arguments):
                words = ["queue   ", name, *_arguments(arguments)]
            case Binding(source, destination, routing_key, to_exchange):
                kind = "exchange" if to_exchange else "queue"
                words = ["bind    ", source, "to", kind, destination, f"key={routing_key}"]
        lines.append(" ".join(words) + "\n")
    return "".join(lines)


def _arguments(arguments: dict[str, Any]) -> list[str]:
    return [f"{key}={value!r}" for key, value in sorted(arguments.items())]


def frozen() -> str:
    """The delay queues, and one landing queue for an exchange and one for a queue."""
    levels = topology()
    return render([*levels.plan(), levels.landing("news.fanout"), levels.queue_landing("jobs")])


def test_topology_v1_is_frozen() -> None:
    """Brokers in production have these declarations. To change one, add a v2 beside v1."""
    assert frozen() == FROZEN.read_text()


# ---- routing keys, as NServiceBus writes them ----------------------------------------------


@each_fused
def test_a_delay_is_written_bit_by_bit(fused_bits: int) -> None:
    """5 s and the longest delay, at the default resolution."""
    levels = topology(fused_bits=fused_bits)
    for units, bits in ((40, f"{'0.' * 25}1.0.1.0.0.0"), (MAX_UNITS, f"{'1.' * 30}1")):
        assert levels.routing_key(units, message_address("", "celery")) == f"{bits}.%.celery"
    for units in (-1, MAX_UNITS + 1):
        with pytest.raises(ValueError, match=f"expected 0 to {MAX_UNITS} units, got {units}"):
            levels.routing_key(units, "%.celery")


def test_whole_seconds_below_an_hour_take_three_hops_at_most_and_fractions_one_more() -> None:
    """They spread over all queues of a group: a queue that half of them pass would be full.

    A level queue passes 32 messages at a time.
    """
    levels, units_per_second = topology(), 8
    hops = [len(levels.path(units)) for units in range(1, 4096 * units_per_second)]
    assert max(hops[units_per_second - 1 :: units_per_second]) == 3
    assert max(hops) == 4
    met = Counter(hop.queue for seconds in range(1, 256) for hop in levels.path(seconds * 8))
    assert len(met) == 30
    assert set(met.values()) == {16}


# ---- the plan walked -----------------------------------------------------------------------


@patient
@given(data=st.data(), wanted=delay_settings())
def test_a_message_passes_only_the_queues_of_its_delay_and_arrives_once(
    data: st.DataObject, wanted: DelaySettings
) -> None:
    levels = Topology(wanted)
    units = data.draw(st.integers(0, levels.max_units), "units")
    address = message_address("", "celery")

    trip = send(levels, with_queues(levels, celery=address), units, address)

    assert trip.delivered == {"celery": 1}
    path = levels.path(units)
    assert trip.queues == tuple(hop.queue for hop in path)
    assert sum(hop.delay_ms for hop in path) == units * levels.resolution_ms
    assert sum(hop.ttl_ms for hop in path) == trip.waited_ms
    assert len(trip.queues) == waits(units, wanted.fused_bits), "an empty level was visited"
    assert (levels.entry_exchange(units) == levels.delivery_exchange) == (units == 0)


def waits(units: int, fused_bits: int) -> int:
    """The number of waits: one per non-zero group of fused bits, one per set bit above them."""
    low = units & ((1 << fused_bits) - 1)
    groups = [low & 7, *(low >> bit & 15 for bit in range(3, fused_bits, 4))]
    return (units >> fused_bits).bit_count() + sum(group > 0 for group in groups)


words = st.sampled_from(["", "a", "b", "0", "1", "%", "é"])
routing_keys = st.lists(words, max_size=4).map(".".join)
exchanges = st.sampled_from(["", "a", "a.b", "b"])


@patient
@given(
    fused_bits=st.sampled_from(FUSED),
    destinations=st.lists(st.tuples(exchanges, routing_keys), min_size=2, max_size=5, unique=True),
    units=st.integers(0, 255),
)
@example(0, [("", "celery"), ("", "fast.celery"), ("", "celery.fast"), ("", "1.celery")], 77)
@example(15, [("a", "celery"), ("", "celery"), ("b", "celery"), ("", "0.0.celery")], 77)
def test_addresses_that_begin_or_end_alike_never_cross(
    fused_bits: int, destinations: list[tuple[str, str]], units: int
) -> None:
    levels = topology(levels=8, fused_bits=fused_bits)
    addresses = {f"q{n}": message_address(*to) for n, to in enumerate(destinations)}
    plan = with_queues(levels, **addresses)
    for queue, address in addresses.items():
        assert send(levels, plan, units, address).delivered == {queue: 1}


# ---- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"namespace": "shop.eu"}, "shop.eu.v1.31x125ms.f15.quorum"),
        ({"levels": 28, "resolution": 1}, "celery_delay.v1.28x1000ms.f15.quorum"),
        ({"fused_bits": 0}, "celery_delay.v1.31x125ms.f0.quorum"),
    ],
)
def test_names_carry_the_settings_of_their_arguments(changes: dict[str, Any], name: str) -> None:
    assert topology(**changes).delivery_exchange == f"{name}.delivery"


@patient
@given(one=delay_settings(), other=delay_settings())
def test_changed_settings_never_redeclare_a_name_with_other_arguments(
    one: DelaySettings, other: DelaySettings
) -> None:
    """The broker would answer 406 in production.

    A new set of levels is declared beside the old one.
    """
    plans = [
        {(type(d), d.name): d for d in Topology(wanted).plan() if not isinstance(d, Binding)}
        for wanted in (one, other)
    ]
    for name in plans[0].keys() & plans[1].keys():
        assert plans[0][name] == plans[1][name]


def test_all_settings_share_the_parking_queue_of_their_namespace() -> None:
    parked = {
        topology(**changes).parking_queue for changes in ({}, {"levels": 9}, {"fused_bits": 4})
    }
    assert parked == {"celery_delay.v1.parked"}
    assert topology(namespace="shop").parking_queue == "shop.v1.parked"


@patient
@given(wanted=delay_settings())
def test_every_name_of_a_plan_is_recognized(wanted: DelaySettings) -> None:
    levels = Topology(wanted)
    names = [d.name for d in levels.plan() if not isinstance(d, Binding)]
    names += [levels.landing_queue("a.b"), levels.queue_landing_queue("a.b")]
    assert [name for name in names if not is_delay_name(name)] == []


@patient
@given(wanted=delay_settings())
def test_nothing_is_declared_twice_or_bound_before_its_ends_exist(wanted: DelaySettings) -> None:
    seen: set[tuple[type, str]] = set()
    bound: set[Binding] = set()
    for declaration in Topology(wanted).plan():
        if isinstance(declaration, Binding):
            end = Exchange if declaration.to_exchange else Queue
            assert {(Exchange, declaration.source), (end, declaration.destination)} <= seen
            assert declaration not in bound
            bound.add(declaration)
        else:
            key = (type(declaration), declaration.name)
            assert key not in seen
            assert declaration.arguments.get("alternate-exchange", "") in {"", *names_of(seen)}
            seen.add(key)
    ready = Topology(wanted).ready_exchange
    assert declaration == Exchange(ready, "fanout"), "declared last, it says all is there"


def names_of(seen: set[tuple[type, str]]) -> set[str]:
    return {name for _, name in seen}


@pytest.mark.parametrize(
    "name",
    ["", "celery", "celery.v1", "v1.parked.jobs", "my.v1.parked.jobs", "celery_delay.v2.parked",
     "amq.topic", "celeryev", "a.31x125ms.quorum.level-00"],
)  # fmt: skip
def test_other_names_are_not_taken_for_ours(name: str) -> None:
    assert not is_delay_name(name)


def test_names_fit_however_long_the_users_are() -> None:
    levels = topology(namespace="n" * 64, levels=19, resolution=600, fused_bits=16)
    for name in (levels.landing_queue("é." * 127), levels.queue_landing_queue("%" * 255)):
        assert len(name.encode()) <= 255


# ---- arguments -----------------------------------------------------------------------------


@patient
@given(wanted=delay_settings())
def test_only_queues_that_a_delay_can_need_exist(wanted: DelaySettings) -> None:
    """Every level queue is used by some delay: the queue's own delay."""
    levels = Topology(wanted)
    for hop in levels.level_queues:
        units, rest = divmod(hop.delay_ms, levels.resolution_ms)
        assert rest == 0
        assert levels.path(units) == [hop]


# ---- the length of a routing key -----------------------------------------------------------


def test_an_address_fits_if_its_bytes_fit_beside_the_bits_and_dots() -> None:
    levels, longest = topology(), 255 - 62
    fitting = "%." + "a" * (longest - 2)
    assert levels.fits(fitting)
    assert len(levels.routing_key(MAX_UNITS, fitting).encode()) == 255
    assert not levels.fits(fitting + "a")
    assert not levels.fits("%." + "é" * (longest // 2))


@given(key=st.text(max_size=255), other=st.text(max_size=255))
def test_an_address_that_does_not_fit_is_hashed_alike_on_both_sides(key: str, other: str) -> None:
    levels = topology()
    address = message_address("jobs", key)
    used = levels.address("jobs", key)
    assert levels.fits(used)
    assert used == (address if levels.fits(address) else hashed_address("jobs", key))
    assert (used == levels.address("jobs", other)) == (key == other)


# ---- a user's routing key beside the address -----------------------------------------------


def test_collides_is_true_for_a_key_that_reads_like_a_delay() -> None:
    levels = topology(levels=4)
    assert all(levels.collides(key) for key in ("a.b.c.1", "a.b.c.d.%news"))
    harmless = ("", "0.1", "a.b.c.d", "a.b.c.d.1", "a.b.c.%d")  # too short, or behind the bits
    assert not any(levels.collides(key) for key in harmless)


@patient
@given(
    fused_bits=st.sampled_from(FUSED),
    routing_key=st.lists(
        st.sampled_from(["0", "1", "a", "f", "", "%", "%2A", "%l", "news"]), max_size=7
    ).map(".".join),
)
def test_a_key_that_does_not_collide_matches_no_binding(fused_bits: int, routing_key: str) -> None:
    """Such a key travels with ours through every level to a landing queue."""
    levels = topology(levels=5, fused_bits=fused_bits)
    assume(not levels.collides(routing_key))
    plan = with_queues(
        levels,
        topic=[topic_binding_address(exchange, "#") for exchange in ("", "news", "%")],
        direct=message_address("", "news"),
        landing=landing_address("news"),
        queue_landing=queue_address("news"),
    )
    patterns = [d.routing_key for d in plan if isinstance(d, Binding) and d.routing_key]
    assert [pattern for pattern in patterns if topic_matches(pattern, routing_key)] == []


@given(
    fused_bits=st.sampled_from(FUSED),
    resolution_ms=st.integers(1, 1000),
    remaining_us=st.integers(1, 10**11),
)
def test_a_message_waits_its_delay_and_the_millisecond_that_rabbitmq_may_cut_off(
    fused_bits: int, resolution_ms: int, remaining_us: int
) -> None:
    """The first wait is shortened by the time that rounding up to units has added."""
    levels = topology(fused_bits=fused_bits, resolution=resolution_ms / 1000, levels=28)
    units = units_until(remaining_us, now_us=0, resolution_ms=resolution_ms)
    assume(0 < units <= levels.max_units)
    first, *others = (hop.ttl_ms for hop in levels.path(units))
    shortened = levels.first_ttl_ms(units, remaining_us=remaining_us)
    assert 1 <= shortened <= first
    # In one queue the TTLs hardly differ by more than a unit, which a message may wait for another.
    assert first - shortened <= resolution_ms + len(others)
    waits_us = (shortened + sum(others)) * 1000
    assert 1000 <= waits_us - remaining_us < 2000
    assert levels.first_ttl_ms(1, remaining_us=-remaining_us) == 1, "put back when it was due"


def test_a_message_can_never_expire_in_the_parking_queue() -> None:
    """A message carries an expiration only on its way to its first queue."""
    levels = topology()
    exchanges = {d.name: d for d in levels.plan() if isinstance(d, Exchange)}
    for units in (1, 2, 480, levels.max_units):
        assert "alternate-exchange" not in exchanges[levels.entry_exchange(units)].arguments


if __name__ == "__main__":
    FROZEN.write_text(frozen())
