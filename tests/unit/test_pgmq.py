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


def opened(**settings: Any) -> Any:
    channel = object.__new__(pgmq.Channel)
    channel.connection = object()
    channel._delays = pgmq.PgmqDelays(channel, DelaySettings(**settings))
    return channel


def delay_of(made: Any, message: dict[str, Any], seconds: float) -> Any:
    """The delay that kombu passes to pgmq's ``send`` if a message is due in so many seconds."""
    message["headers"]["eta"] = eta_of(NOON_NS // 1000 + round(seconds * 1_000_000))
    return made._pgmq_send_kwargs(message).get("delay")


def test_a_delay_is_rounded_up_to_whole_seconds_and_computed_again_at_each_attempt() -> None:
    """As if the attempts before had taken so long."""
    made, message = opened(), {"headers": {}, "properties": {"priority": 0}}
    assert "delay" not in made._pgmq_send_kwargs(message)
    for seconds, delay in ((3600, 3600), (4.5, 5), (0.3, 1), (-5, None)):
        assert delay_of(made, message, seconds) == delay
    with pytest.raises(DelayTooLong, match=r"1 min exceeds the longest delay of 31\.875 s"):
        delay_of(opened(levels=8), message, 60)
