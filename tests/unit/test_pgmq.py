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


def sent(**headers: Any) -> dict[str, Any]:
    """The arguments that kombu passes to pgmq's ``send`` for a message with these headers."""
    made = opened()
    message = {"headers": headers, "properties": {"priority": 0}}
    found: dict[str, Any] = made._pgmq_send_kwargs(message)
    return found


@pytest.mark.parametrize(("seconds", "delay"), [(0.3, 1), (4.5, 5), (3600, 3600)])
def test_a_delay_is_rounded_up_to_whole_seconds(seconds: float, delay: int) -> None:
    assert sent(eta=eta_in(seconds))["delay"] == delay


def test_a_message_that_is_due_or_has_no_eta_has_no_delay() -> None:
    assert "delay" not in sent(eta=eta_in(-5))
    assert "delay" not in sent(task="shop.remind")


def test_a_delay_beyond_the_levels_is_refused() -> None:
    message = {"headers": {"eta": eta_in(60)}, "properties": {"priority": 0}}
    with pytest.raises(DelayTooLong, match=r"1 min exceeds the longest delay of 31\.875 s"):
        opened(levels=8)._pgmq_send_kwargs(message)


def test_a_second_attempt_computes_its_delay_again() -> None:
    made = opened()
    message = {"headers": {"eta": eta_in(60)}, "properties": {"priority": 0}}
    assert made._pgmq_send_kwargs(message)["delay"] == 60
    message["headers"]["eta"] = eta_in(-1)  # as if the first call had taken this long
    assert "delay" not in made._pgmq_send_kwargs(message)
