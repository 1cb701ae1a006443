"""The simulation of level queues, against what is known of queues."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from celery_native_delay import DelaySettings
from celery_native_delay.capacity.load import InvalidLoad, Load, Spread, spread_of
from celery_native_delay.capacity.sends import Send, fan_out_sends, steady_sends
from celery_native_delay.capacity.service import Service
from celery_native_delay.capacity.simulation import Outcome, simulate, simulate_load
from celery_native_delay.transports.rabbitmq.topology import Topology

TOPOLOGY = Topology(DelaySettings())

#: Only places and commits: processors do everything at once.
WAITS_ONLY = Service(cores=1, message_ms=1e-9, hop_ms=0, turn_ms=0, commit_ms=100)

#: Only work: commits take no time.
WORKS_ONLY = Service(cores=2, message_ms=0.2, hop_ms=0.3, turn_ms=0, commit_ms=0)

REAL = Service(cores=2, message_ms=0.2, hop_ms=0.2, turn_ms=0.5, commit_ms=4)

ONE_HOP = "8"
"""A delay of one hop."""


def loaded(per_second: float, *delays: str, tick_seconds: float = 0.0) -> Load:
    return Load(per_second, tuple(spread_of(one) for one in delays), tick_seconds)


def run(load: Load, service: Service, count: int, *, seed: int = 1) -> Outcome:
    sends = islice(steady_sends(load, random.Random(seed)), count)
    return simulate(TOPOLOGY, service, sends)


@pytest.mark.parametrize("prefetch", [1, 8, 32, 100])
def test_a_full_queue_passes_its_places_per_service_time(prefetch: int) -> None:
    """All expire at once; the last is through after as many rounds as it takes."""
    service = replace(WAITS_ONLY, prefetch=prefetch)
    sends = [Send(0, 8_000_000)] * (50 * prefetch)
    late_ms = simulate(TOPOLOGY, service, sends).late_ms
    taken_in_ms = arrives_ms = service.commit_ms / 2
    assert late_ms[0] == pytest.approx(taken_in_ms + arrives_ms, abs=1.1)
    assert late_ms[-1] - late_ms[0] == pytest.approx(49 * service.service_ms)
    pace = (len(sends) - prefetch) / (late_ms[-1] - late_ms[0]) * 1000
    assert pace == pytest.approx(service.ceiling_per_second)


def test_below_its_ceiling_a_queue_keeps_up_and_above_it_falls_behind() -> None:
    ceiling = WAITS_ONLY.ceiling_per_second
    below = run(loaded(0.8 * ceiling, ONE_HOP), WAITS_ONLY, 10_000)
    assert not below.growing
    assert below.percentile_ms(99) < 10 * WAITS_ONLY.service_ms
    seconds = 10
    load = loaded(1.25 * ceiling, ONE_HOP, tick_seconds=0.02)
    above = run(load, WAITS_ONLY, round(1.25 * ceiling * seconds))
    assert above.growing
    # What comes in 10 s takes 12.5 s to pass.
    assert above.late_ms[-1] / 1000 == pytest.approx(seconds * 0.25, rel=0.1)


@pytest.mark.parametrize("used", [0.3, 0.7, 0.85])
def test_one_place_is_a_queue_with_random_arrivals_and_a_fixed_service_time(used: float) -> None:
    """M/D/1: its mean wait is known (Pollaczek and Khinchine)."""
    service = replace(WAITS_ONLY, prefetch=1)
    per_second = used * service.ceiling_per_second
    outcome = run(loaded(per_second, ONE_HOP), service, 30_000)
    wait_ms = used * service.service_ms / (2 * (1 - used))
    # Taken in and arrived: half a commit each.
    assert mean(outcome.late_ms) == pytest.approx(wait_ms + service.commit_ms, rel=0.1)


def test_processors_carry_what_their_time_is_enough_for() -> None:
    limit = WORKS_ONLY.limit_per_second(1)
    assert limit == pytest.approx(4000)
    four_queues = ("8", "9", "10", "11")  # each has a turn on one processor at a time
    below = simulate_load(TOPOLOGY, loaded(0.9 * limit, *four_queues), WORKS_ONLY)
    assert not below.growing
    assert below.cpu_ms_per_task == pytest.approx(0.5)
    above = simulate_load(TOPOLOGY, loaded(1.5 * limit, *four_queues), WORKS_ONLY)
    assert above.growing


def test_part_of_a_processor_takes_longer() -> None:
    whole = Service(cores=1, message_ms=20, hop_ms=30, turn_ms=0, commit_ms=0)
    load = loaded(1, ONE_HOP)
    slow = run(load, replace(whole, cores=0.5), 300)
    assert mean(slow.late_ms) == pytest.approx(2 * mean(run(load, whole, 300).late_ms), rel=0.05)


def test_a_full_turn_costs_less_for_each_than_many_lone_ones() -> None:
    alone = run(loaded(20, ONE_HOP), REAL, 2_000)
    together = run(loaded(1000, ONE_HOP, tick_seconds=0.02), REAL, 5_000)
    each_ms = REAL.message_ms + REAL.hop_ms
    assert alone.cpu_ms_per_task == pytest.approx(each_ms + REAL.turn_ms, rel=0.1)
    assert each_ms < together.cpu_ms_per_task < each_ms + REAL.turn_ms / 2


loads = some.builds(
    Load,
    per_second=some.floats(1, 3000),
    spreads=some.lists(
        some.builds(
            Spread,
            first_us=some.integers(0, 10**9),
            step_us=some.sampled_from([1, 1_000_000]),
            count=some.integers(1, 10**6),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    tick_seconds=some.sampled_from([0.0, 0.02]),
)


@settings(max_examples=30)
@given(loads, some.booleans(), some.integers(0, 3))
def test_every_task_comes_out_once_and_none_early(load: Load, shortened: bool, seed: int) -> None:
    sends = list(islice(steady_sends(load, random.Random(seed)), 400))
    outcome = simulate(TOPOLOGY, REAL, sends, shortened=shortened, tick_ms=load.tick_seconds * 1000)
    assert len(outcome.late_ms) == 400
    assert outcome.late_ms[0] >= -1e-6


@settings(max_examples=20)
@given(loads, some.integers(0, 3))
def test_one_seed_has_one_outcome(load: Load, seed: int) -> None:
    first, second = (run(load, REAL, 300, seed=seed) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("delays", ["8", "1..10", "4..20"])
def test_shortened_waits_tell_the_same(delays: str) -> None:
    load = loaded(600, delays)
    whole, shorter = run(load, REAL, 15_000), simulate_load(TOPOLOGY, load, REAL)
    for percent in (50, 99):
        assert shorter.percentile_ms(percent) == pytest.approx(
            whole.percentile_ms(percent), rel=0.3
        )


def test_a_delay_of_any_fraction_is_late_by_less_than_a_unit_more() -> None:
    """It lies behind one that expires later, which a multiple of the resolution never does."""
    unit_ms = TOPOLOGY.resolution_ms
    quick = replace(WAITS_ONLY, commit_ms=0.1)
    late_ms = run(loaded(300, "4..16"), quick, 6_000).late_ms
    assert unit_ms / 2 < late_ms[-1] < unit_ms + 5
    whole = Load(300, (Spread(4_000_000, 1_000_000, 13),))
    assert run(whole, quick, 6_000).late_ms[-1] < 5


def test_a_batch_now_and_then_is_no_load_that_grows() -> None:
    outcome = simulate_load(TOPOLOGY, loaded(1, "60", tick_seconds=1800), REAL)
    assert not outcome.growing
    assert outcome.late_ms[-1] > 100  # as long as it takes to hand over 1,800
    with pytest.raises(InvalidLoad, match="fan-out"):
        simulate_load(TOPOLOGY, loaded(100, "60", tick_seconds=3600), REAL)


def test_tasks_due_together_are_as_late_as_they_take_to_hand_over() -> None:
    """A herd of a fan-out, whenever each of it was sent."""
    load = Load(5_000, (Spread(60_000_000, 1, 1, 3_000.0),), fixed_dues=True)
    sends = fan_out_sends(load, random.Random(1))
    assert len(sends) == 3_000
    assert {round(send.at_ms * 1000) + send.delay_us for send in sends} <= {
        60_000_000 + rounding for rounding in (-1, 0, 1)
    }
    outcome = simulate_load(TOPOLOGY, load, REAL)
    spread_out = simulate_load(TOPOLOGY, loaded(100, "60"), REAL)
    at_least_ms = 3_000 * (REAL.hop_ms + REAL.message_ms / 2) / REAL.cores
    assert outcome.late_ms[-1] > at_least_ms > spread_out.late_ms[-1]


def test_of_a_large_fan_out_the_densest_moment_is_simulated() -> None:
    all_day = Spread.between(0, 86_400, weight=1_000_000)
    peak = Spread(43_200_000_000, 1, 1, 4_000.0)
    load = Load(20_000, (all_day, peak), fixed_dues=True)
    sends = fan_out_sends(load, random.Random(1))
    assert 4_000 < len(sends) < 4_100
    assert sends == sorted(sends)
    assert all(send.delay_us > 0 for send in sends)
