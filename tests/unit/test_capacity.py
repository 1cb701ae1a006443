"""Loads and the exact part of `delay capacity`, against counting one by one; speeds, advice."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from celery_native_delay import DelaySettings
from celery_native_delay.capacity.advice import advise
from celery_native_delay.capacity.levels import floor_sum, mean_hops, passages
from celery_native_delay.capacity.load import (
    InvalidLoad,
    Load,
    Spread,
    load_of_file,
    load_of_waiting,
    spread_of,
)
from celery_native_delay.capacity.report import PROCESSORS, capacity
from celery_native_delay.capacity.service import BENCHMARKED, Service, chosen
from celery_native_delay.due_time import units_until
from celery_native_delay.errors import SettingsError
from celery_native_delay.transports.rabbitmq.topology import Topology
from celery_native_delay.transports.timings import Timings

SERVICE = Service(cores=2, message_ms=0.2, hop_ms=0.2, turn_ms=0.6, commit_ms=3)

spreads = some.builds(
    Spread,
    first_us=some.integers(0, 20_000_000),
    step_us=some.sampled_from([1, 1_000, 125_000, 333_333, 1_000_000]) | some.integers(1, 10**7),
    count=some.integers(1, 60),
    weight=some.sampled_from([1.0, 0.5, 40.0]),
)

settings = some.builds(
    DelaySettings,
    levels=some.just(28),
    resolution=some.sampled_from([0.025, 0.125, 1.0]),
    fused_bits=some.sampled_from([0, 3, 5, 7, 15, 31]),
)

speeds = some.builds(
    Service,
    cores=some.floats(0.5, 64),
    message_ms=some.floats(0.01, 1),
    hop_ms=some.floats(0.01, 1),
    turn_ms=some.floats(0, 2),
    commit_ms=some.floats(0, 20),
    prefetch=some.integers(2, 512),
)


def loaded(per_second: float, *delays: str, step_seconds: float = 0.0) -> Load:
    return Load(per_second, tuple(spread_of(one, step_seconds=step_seconds) for one in delays))


# ---- arithmetic ------------------------------------------------------------------------------


@given(some.integers(0, 40), some.integers(1, 30), some.integers(-50, 50), some.integers(-99, 99))
def test_a_sum_of_floors_is_what_adding_them_gives(
    count: int, divisor: int, factor: int, addend: int
) -> None:
    added = sum((factor * i + addend) // divisor for i in range(count))
    assert floor_sum(count, divisor, factor, addend) == added


@given(settings, some.lists(spreads, min_size=1, max_size=3))
def test_each_queue_gets_the_messages_whose_path_leads_through_it(
    settings: DelaySettings, spreads: list[Spread]
) -> None:
    topology = Topology(settings)
    through: Counter[str] = Counter()
    for spread in spreads:
        for number in range(spread.count):
            delay_us = spread.first_us + number * spread.step_us
            units = units_until(delay_us, now_us=0, resolution_ms=settings.resolution_ms)
            for hop in topology.path(units):
                through[hop.queue] += spread.weight / spread.count  # type: ignore[assignment]
    load = Load(100.0, tuple(spreads))
    found = {one.queue: one for one in passages(topology, load, SERVICE)}
    assert found.keys() == through.keys()
    for queue, count in through.items():
        assert found[queue].share == pytest.approx(count / load.weight)
        assert found[queue].per_second == pytest.approx(100 * count / load.weight)
    assert mean_hops(topology, load.spreads) == pytest.approx(through.total() / load.weight)


@given(settings, some.integers(1, 10**7))
def test_as_many_wait_as_are_sent_in_the_time_of_a_delay(
    settings: DelaySettings, units: int
) -> None:
    """Little's law, queue by queue, for a delay that is a multiple of the resolution."""
    load = Load(7.0, (Spread(units * settings.resolution_ms * 1000, 1, 1),))
    waiting = sum(one.waiting for one in passages(Topology(settings), load, SERVICE))
    assert waiting == pytest.approx(load.waiting)
    assert load.waiting == pytest.approx(7 * units * settings.resolution_ms / 1000)


def test_a_year_of_delays_is_counted_as_fast_as_a_minute() -> None:
    load = loaded(1000, "1..31536000", step_seconds=1)
    found = passages(Topology(DelaySettings()), load, SERVICE)
    assert found[0].queue.endswith("level-15")
    assert found[0].share == pytest.approx(0.5, abs=0.001)


# ---- loads -----------------------------------------------------------------------------------


def test_a_delay_is_a_duration_or_a_range() -> None:
    assert spread_of("1h30m") == Spread(5_400_000_000, 1, 1)
    assert spread_of("1m..2m", step_seconds=1) == Spread(60_000_000, 1_000_000, 61)
    assert spread_of("0..1") == Spread(0, 1, 1_000_001)
    for text in ("soon", "", "..", "5..", "-1", "9..3", "1..2..3", "nan"):
        with pytest.raises(InvalidLoad, match="expected"):
            spread_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "60,3\n300,1\n",
        "delay,count\n60,3\n\n5m, 1\n",
        '{"60": 3, "5m": 1}',
        '[{"delay_seconds": 60, "count": 3}, {"delay_seconds": 300, "count": 1}]',
        '{"delays": [{"from_seconds": 60, "count": 3}, {"from_seconds": 300, "count": 1}]}',
    ],
)
def test_delays_are_read_from_csv_and_json(text: str) -> None:
    load = load_of_file(text, per_second=10)
    assert load == Load(10, (Spread(60_000_000, 1, 1, 3.0), Spread(300_000_000, 1, 1, 1.0)))
    assert load.mean_seconds == 120


def test_a_fan_out_brings_its_rate_and_its_due_times() -> None:
    told = {"per_second": 500, "due": [{"from_seconds": 0, "until_seconds": 10, "count": 4000}]}
    load = load_of_file(json.dumps(told), per_second=None)
    assert (load.per_second, load.fixed_dues, load.waiting) == (500, True, 4000)
    assert load_of_file(json.dumps(told), per_second=9).per_second == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected tasks with a delay, got none"),
        ("a,b,c,4", "expected CSV"),
        ("60", "expected CSV"),
        ("60,many\n5,x", "expected CSV"),
        ("5,-3", "counts of 0 or more"),
        ("5,1\n5,nan", "counts of 0 or more"),
        ("{", "no JSON"),
        ("[1]", "expected CSV"),
        ('{"from": 1}', "expected"),
        ('[{"count": 1}]', "KeyError"),
        ('{"60": 0}', "got none"),
    ],
)
def test_what_is_no_histogram_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidLoad, match=said):
        load_of_file(text, per_second=10)


def test_a_histogram_needs_a_rate() -> None:
    with pytest.raises(InvalidLoad, match="--rate"):
        load_of_file("60,1", per_second=None)
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidLoad, match="rate"):
            load_of_file("60,1", per_second=rate)


@given(
    some.dictionaries(some.integers(1, 100), some.integers(1, 500), min_size=1, max_size=5),
)
def test_what_waits_of_a_steady_load_tells_the_load(per_second_by_delay: dict[int, int]) -> None:
    """In second t lie the tasks of all delays longer than t; bars of a second show them all."""
    bars = [
        (float(t), t + 1.0, sum(n for delay, n in per_second_by_delay.items() if delay > t))
        for t in range(max(per_second_by_delay))
    ]
    load = load_of_waiting([(-5.0, 0.0, 99), *bars])
    assert load.per_second == pytest.approx(sum(per_second_by_delay.values()))
    found = {one.last_us / 1e6: one.weight for one in load.spreads}
    assert found == pytest.approx({float(delay): n for delay, n in per_second_by_delay.items()})


def test_what_waits_unevenly_is_as_if_it_had_come_steadily() -> None:
    """More due later than sooner is not steady: the mean of both is taken."""
    load = load_of_waiting([(0.0, 10.0, 50), (10.0, 20.0, 150)])
    assert load.per_second == 10
    assert all(one.weight > 0 for one in load.spreads)
    with pytest.raises(InvalidLoad, match="none"):
        load_of_waiting([])


def test_what_waits_by_chance_is_still_so_many_with_that_delay() -> None:
    """A thousand a second with a delay of 100 s, of which no two bars show as many."""
    chance = random.Random(5)
    bars = [(float(n), float(n + 1), round(chance.gauss(1000, 100))) for n in range(100)]
    load = load_of_waiting(bars)
    waiting = sum(count for _, _, count in bars)
    assert load.waiting == pytest.approx(waiting, rel=0.01)
    assert load.mean_seconds == pytest.approx(100, rel=0.2)
    assert load.longest_seconds == pytest.approx(100, abs=1)


# ---- the broker's speed ----------------------------------------------------------------------


@given(speeds)
def test_timings_tell_the_speed_that_made_them(service: Service) -> None:
    timings = Timings(
        one_queue_per_second=service.ceiling_per_second,
        many_queues_per_second=service.cores
        * 1000
        / (service.hop_ms + service.turn_ms / service.prefetch),
        lone_turn_ms=(service.hop_ms + service.turn_ms) / service.cores,
        publish_ms=service.message_ms / service.cores,
        idle_ms=5.0,
    )
    found = Service.of(timings, cores=service.cores, prefetch=service.prefetch)
    for name in ("message_ms", "hop_ms", "turn_ms", "commit_ms", "service_ms"):
        assert getattr(found, name) == pytest.approx(getattr(service, name), abs=1e-6)


@given(some.floats(0.1, 1e5), some.floats(0.1, 1e5), some.floats(0, 100), some.floats(0.001, 10))
def test_whatever_is_measured_makes_a_speed(
    one: float, many: float, lone_ms: float, publish_ms: float
) -> None:
    """Noise may contradict itself; no higher ceiling than was seen comes of it."""
    service = Service.of(Timings(one, many, lone_ms, publish_ms, 5.0), cores=2)
    assert service.ceiling_per_second <= one * (1 + 1e-9)
    assert service.limit_per_second(1) > 0


@given(speeds, some.floats(0.1, 100))
def test_a_service_time_decides_the_ceiling(service: Service, service_ms: float) -> None:
    told = service.with_service_ms(service_ms)
    assert told.service_ms == pytest.approx(service_ms)
    assert told.ceiling_per_second == pytest.approx(service.prefetch * 1000 / service_ms)


@given(speeds)
def test_a_speed_is_given_back_as_it_was_printed(service: Service) -> None:
    printed = json.dumps(service.as_json())
    assert Service.from_json(printed) == service
    assert Service.from_json(json.dumps({"service": json.loads(printed), "hops": 3})) == service


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"cores": 2}', "null"])
def test_what_is_no_speed_is_refused(text: str) -> None:
    with pytest.raises(InvalidLoad, match="--calibrate --json"):
        Service.from_json(text)


def test_an_impossible_speed_is_refused() -> None:
    for changes in ({"cores": 0}, {"hop_ms": -1}, {"commit_ms": math.nan}, {"prefetch": 0}):
        with pytest.raises(InvalidLoad, match=next(iter(changes))):
            chosen(BENCHMARKED, changes)
    assert chosen(BENCHMARKED, {"cores": None, "service_ms": None}) == BENCHMARKED


# ---- the report ------------------------------------------------------------------------------


def test_the_first_queue_that_saturates_is_named_with_its_rate() -> None:
    service = SERVICE.with_service_ms(32)  # a queue passes 1,000 a second
    report = capacity(DelaySettings(), loaded(400, "8"), service, is_measured=True)
    what, per_second = report.saturates_first
    assert (what.rpartition(".")[2], round(per_second)) == ("level-03-8", 1000)
    assert report.keeps_up
    over = capacity(DelaySettings(), loaded(1400, "8"), service, is_measured=True)
    assert not over.keeps_up
    assert over.outcome.growing


def test_processors_that_give_way_before_any_queue_are_named() -> None:
    service = replace(SERVICE, cores=0.5)
    report = capacity(DelaySettings(), loaded(100, "16..63"), service, is_measured=True)
    what, per_second = report.saturates_first
    assert what == PROCESSORS
    # Between what lone turns and full ones would let them carry.
    lone_ms = service.message_ms + report.hops * (service.hop_ms + service.turn_ms)
    most = service.limit_per_second(report.hops)
    assert service.cores * 1000 / lone_ms < per_second <= most


def test_a_report_says_all_of_it_to_people_and_to_scripts() -> None:
    report = capacity(DelaySettings(), loaded(300, "10..60"), SERVICE, is_measured=False)
    told = json.loads(json.dumps(report.as_json()))
    assert told["waiting"] == 10_500
    assert told["hops_per_task"] == pytest.approx(report.hops)
    assert sum(queue["share"] for queue in told["queues"]) == pytest.approx(report.hops)
    assert told["lateness"]["p50_ms"] <= told["lateness"]["p99_ms"] <= told["lateness"]["max_ms"]
    text = "\n".join(report.lines(lambda _, rows: "\n".join(str(row) for row in rows)))
    assert "10,500 wait at a time" in text
    assert PROCESSORS in text
    assert "level-07-1" in text
    assert "--calibrate" in text


def test_delays_beyond_the_levels_are_refused() -> None:
    with pytest.raises(InvalidLoad, match="native_delay_levels"):
        capacity(DelaySettings(levels=8), loaded(1, "1h"), SERVICE, is_measured=True)


def test_classic_levels_have_no_places() -> None:
    classic = DelaySettings(queue_type="classic")
    report = capacity(classic, loaded(100, "60"), SERVICE, is_measured=True)
    assert report.queues[0].ceiling_per_second > 10 * 100


def test_of_a_fan_out_the_densest_second_counts() -> None:
    """How fast it is sent is its own affair; what is due together comes through together."""
    spreads = (Spread.between(0, 3600, weight=10_000), Spread(1_800_000_000, 1, 1, 500.0))
    load = Load(20_000, spreads, fixed_dues=True)
    assert load.busiest_per_second == 500
    report = capacity(DelaySettings(), load, SERVICE, is_measured=True)
    assert report.keeps_up
    herd = replace(load, spreads=(*spreads[:1], replace(spreads[1], weight=50_000.0)))
    report = capacity(DelaySettings(), herd, SERVICE, is_measured=True)
    assert not report.keeps_up
    assert report.advice[0].change.startswith("smear=")
    assert "densest second" in "\n".join(report.lines(lambda *_: ""))


# ---- advice ----------------------------------------------------------------------------------


def advised(settings: DelaySettings, load: Load, service: Service = SERVICE) -> dict[str, str]:
    limit = service.limit_per_second(mean_hops(Topology(settings), load.spreads))
    found = advise(settings, load, service, limit, late_p99_ms=10)
    return {one.change: one.effect for one in found}


def test_nothing_is_advised_where_nothing_is_full() -> None:
    assert advised(DelaySettings(), loaded(50, "60")) == {}


def test_tasks_with_one_delay_are_to_be_spread_or_given_more_places() -> None:
    load = loaded(0.9 * SERVICE.ceiling_per_second, "8")
    found = advised(DelaySettings(), load)
    assert any(change.startswith("spread the delays: countdown") for change in found)
    assert any("dead_letter_worker_consumer_prefetch" in change for change in found)


def test_a_spread_is_worked_out_in_any_fraction_of_seconds() -> None:
    """Whatever the steps are, in which the delays are whole before."""
    rate = 1.5 * SERVICE.ceiling_per_second
    found = advised(DelaySettings(), loaded(rate, "8"))
    assert any(change.startswith("spread the delays: countdown") for change in found)
    assert advised(DelaySettings(), loaded(rate, "8", step_seconds=1)) == found


def test_binary_levels_are_to_be_fused() -> None:
    settings = DelaySettings(fused_bits=0)
    load = loaded(0.8 * SERVICE.limit_per_second(3.3), "16..63", step_seconds=1)
    (change,) = [one for one in advised(settings, load) if "fused_bits" in one]
    better = replace(settings, fused_bits=int(change.rpartition(" ")[2]))
    assert mean_hops(Topology(better), load.spreads) < mean_hops(Topology(settings), load.spreads)


def test_more_processors_are_advised_where_they_are_what_is_full() -> None:
    load = loaded(1.5 * SERVICE.limit_per_second(2), "60")
    (change,) = [one for one in advised(DelaySettings(), load) if "processors" in one]
    assert int(change.split()[0]) > SERVICE.cores


def test_a_coarser_resolution_is_advised_with_levels_that_it_allows() -> None:
    """With as many as before, the longest would be longer than RabbitMQ's longest TTL."""
    load = loaded(1.2 * SERVICE.limit_per_second(3), "40..80")
    (change,) = [one for one in advised(DelaySettings(), load) if "resolution" in one]
    names = [part.partition(" = ") for part in change.split(", ")]
    said = {name.removeprefix("native_delay_"): float(value) for name, _, value in names}
    assert DelaySettings(resolution=said["resolution"], levels=int(said["levels"]))
    with pytest.raises(SettingsError, match="TTL"):
        DelaySettings(resolution=said["resolution"])


def test_delays_that_are_no_multiple_of_the_resolution_are_to_have_a_finer_one() -> None:
    any_fraction = loaded(20, "1..60")
    (found,) = advise(DelaySettings(), any_fraction, SERVICE, 3000, late_p99_ms=110)
    assert found.change == "native_delay_resolution = 0.05, native_delay_levels = 32"
    whole = loaded(20, "1..60", step_seconds=1)
    assert list(advise(DelaySettings(), loaded(20, "60"), SERVICE, 3000, late_p99_ms=110)) == []
    assert list(advise(DelaySettings(), whole, SERVICE, 3000, late_p99_ms=110)) == []
