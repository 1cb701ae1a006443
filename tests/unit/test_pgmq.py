"""pgmq delays messages itself: the delay that each message is sent with. No server is needed."""

from __future__ import annotations

from typing import Any

import pytest

from celery_native_delay import DelaySettings, DelayTooLong
from celery_native_delay.due_time import eta_of
from celery_native_delay.transports.virtual import channel

pgmq = pytest.importorskip(
    "celery_native_delay.transports.pgmq", reason="kombu before 5.7", exc_type=ImportError
)


NOON_NS = 1_795_176_000_000_000_000


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pgmq, channel):
        monkeypatch.setattr(module, "time_ns", lambda: NOON_NS)


def eta_in(seconds: float) -> str:
    return eta_of(NOON_NS // 1000 + round(seconds * 1_000_000))


def opened(**settings: Any) -> Any:
    channel = object.__new__(pgmq.Channel)
    channel.connection = object()
    channel._delays = pgmq.PgmqDelays(channel, DelaySettings(**settings))
    return channel


def sent(made: Any, eta: str | None) -> Any:
    """The delay that kombu passes to pgmq's ``send`` for a message with this header; or None."""
    message = {"headers": {} if eta is None else {"eta": eta}, "properties": {"priority": 0}}
    return made._pgmq_send_kwargs(message).get("delay")


def test_a_delay_is_rounded_up_to_whole_seconds_at_each_attempt() -> None:
    """As if the attempts before had taken so long."""
    made = opened()
    delays = [(3600, 3600), (4.5, 5), (0.3, 1), (-5, None)]
    assert [sent(made, eta_in(seconds)) for seconds, _ in delays] == [delay for _, delay in delays]
    assert sent(made, None) is None


def test_a_delay_beyond_the_levels_is_refused() -> None:
    with pytest.raises(DelayTooLong, match=r"1 min exceeds the longest delay of 31\.875 s"):
        sent(opened(levels=8), eta_in(60))
