"""A load is split over the level queues exactly as its messages are, one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import DelaySettings
from celery_native_delay.due_time import units_until
from celery_native_delay.transports.rabbitmq.load import Delays, queue_loads
from celery_native_delay.transports.rabbitmq.topology import Topology


@given(
    fused_bits=st.sampled_from([0, 3, 7]),
    first_us=st.integers(0, 30_000),
    width_us=st.sampled_from([0, 1, 999, 1_000, 3_333]),
)
def test_each_queue_gets_what_every_single_delay_brings_it(
    fused_bits: int, first_us: int, width_us: int
) -> None:
    topology = Topology(DelaySettings(levels=8, resolution=0.001, fused_bits=fused_bits))
    delays = range(first_us, first_us + width_us + 1)
    passed = Counter(
        hop.queue
        for delay_us in delays
        for hop in topology.path(units_until(delay_us, now_us=0, resolution_ms=1))
    )
    found = queue_loads(topology, len(delays), [Delays(delays[0], delays[-1])])
    assert {one.queue: pytest.approx(one.per_second) for one in found} == passed


def test_several_delays_are_equally_frequent() -> None:
    topology = Topology(DelaySettings())
    minute, hour = (Delays(us, us) for us in (60_000_000, 3_600_000_000))
    found = queue_loads(topology, 100, [minute, hour])
    assert sum(one.waiting for one in found) == pytest.approx(100 * (60 + 3600) / 2)
    assert {one.per_second for one in found} == {50}
