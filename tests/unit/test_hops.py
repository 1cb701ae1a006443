"""A delay on SQS is cut into hops: never early, at most a second late, with the fewest hops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.transports.sqs.hops import (
    HOP_SECONDS,
    Reception,
    remainders,
    retry_seconds,
)

delays_ms = st.integers(0, 10 * 365 * 86_400_000)


@pytest.mark.parametrize(
    ("delay_ms", "sends"),
    [
        (-5, [0]),
        (0, [0]),
        (1, [1]),
        (1000, [1]),
        (1001, [2]),
        (900_000, [900]),
        (900_001, [901, 1]),
        (1_800_000, [1800, 900]),
        (845_000, [845]),  # the examples that NServiceBus publishes
        (1_925_000, [1925, 1025, 125]),
    ],
)
def test_the_edges_of_a_hop_and_of_a_second(delay_ms: int, sends: list[int]) -> None:
    assert remainders(delay_ms) == sends


@given(delay_ms=st.integers(0, 4 * 86_400_000))
def test_every_hop_but_the_last_is_whole_and_their_sum_is_the_delay(delay_ms: int) -> None:
    sends = remainders(delay_ms)
    waits = [HOP_SECONDS] * (len(sends) - 1) + [sends[-1]]
    assert 0 <= sum(waits) * 1000 - delay_ms < 1000
    assert 0 <= sends[-1] <= HOP_SECONDS
    assert (sends[-1] == 0) == (delay_ms == 0)


@given(
    delay_ms=delays_ms,
    sent_ms=st.integers(0, 2**45),
    waited_ms=st.integers(0, 2**40),
    again_ms=st.integers(0, 2**40),
    receive_count=st.integers(1, 9),
)
def test_the_remaining_delay_is_never_shorter_than_by_the_brokers_clock(
    delay_ms: int, sent_ms: int, waited_ms: int, again_ms: int, receive_count: int
) -> None:
    """This holds for a message that was received before.

    The broker dates its answers in whole seconds.
    """
    first_ms = sent_ms + waited_ms
    truly_ms = first_ms if receive_count == 1 else first_ms + again_ms
    reception = Reception(sent_ms, first_ms, receive_count, truly_ms // 1000 * 1000)
    found_ms = reception.left_ms(delay_ms)
    exact_ms = delay_ms - (truly_ms - sent_ms)
    assert 0 <= found_ms - exact_ms < 1000
    if receive_count == 1:
        assert found_ms == exact_ms


@pytest.mark.parametrize(
    ("received_after_seconds", "again_after_seconds", "home"),
    [
        (900, None, False),  # 901 s are left
        (901, None, True),  # 900
        (900, 30, False),  # 871 s, but a worker has put it back already
        (900, 299, False),
        (900, 301, True),  # the put-back is forgotten by now
        (7200, None, True),  # no relay ran for hours
    ],
)
def test_a_repeated_send_takes_the_same_way_as_the_first(
    received_after_seconds: int, again_after_seconds: int | None, home: bool
) -> None:
    first_ms = received_after_seconds * 1000
    count, now_ms = (1, 0)
    if again_after_seconds is not None:
        count, now_ms = 2, first_ms + again_after_seconds * 1000
    reception = Reception(0, first_ms, count, now_ms)
    assert reception.is_last_hop(1_801_000) == home


def test_the_pause_of_a_message_that_cannot_be_sent_on_doubles() -> None:
    assert [retry_seconds(count) for count in (1, 2, 3, 9)] == [2, 4, 8, 512]
    assert retry_seconds(10_000) == 900


def test_a_year_takes_35040_waits_the_last_in_the_destination_queue() -> None:
    assert len(remainders(365 * 86_400_000)) == 35_040
    assert remainders(500) == [1]
