"""Rates: their arithmetic, the key of a task, and the values that are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from inspect import signature
from typing import Any

import pytest

from celery_native_delay import DelaySettings, InvalidDueTime, Rate, RetryAfter, SettingsError


def call_api(tenant: str, number: int = 0, *, region: str = "eu", **more: Any) -> None:
    """A task's function."""


def test_the_spacing_of_starts_has_a_margin_of_one_percent() -> None:
    """If a start is late and the next one on time, the limit still holds."""
    for limit, count, period_us in (
        ("10/s", 10, 1_000_000),
        ("7/h", 7, 3_600_000_000),
        ("50/10s", 50, 10_000_000),
    ):
        rate = Rate(limit)
        assert (rate.count, rate.period_us) == (count, period_us)
        surplus_us = rate.spacing_us * count - period_us
        assert 0.01 * period_us <= surplus_us <= 0.011 * period_us + count


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rate("10"),
        lambda: Rate("0/s"),
        lambda: Rate(10),  # type: ignore[arg-type]
        lambda: Rate("20000/s"),
        lambda: Rate("1/s", burst=0),
        lambda: Rate("1/s", burst=True),
        lambda: Rate("1/s", key=""),
        lambda: Rate("1/s", key=3),  # type: ignore[arg-type]
        lambda: DelaySettings(rates={"t": {"limit": "1/s", "tenant": "x"}}),
        lambda: DelaySettings(rates={"t": []}),
        lambda: DelaySettings(rates={"t": [Rate("1/s", name="x"), Rate("1/s", name="x")]}),
        lambda: Rate("1/s", name=""),
        lambda: Rate("1/s", overrides={"gold": "fast"}),
        lambda: Rate("1/s", overrides={3: "1/s"}),  # type: ignore[dict-item]
        lambda: Rate("1/s", overrides=3),  # type: ignore[arg-type]
        lambda: Rate("1/s", name="a\nb"),
        lambda: DelaySettings(rates={"t": Rate("1/s", name="x"), "u": Rate("2/s", name="x")}),
        lambda: DelaySettings(rates={"t": "1/s", "u": Rate("2/s", name="t")}),
        lambda: DelaySettings(rates={"": "1/s"}),
        lambda: DelaySettings(rates="1/s"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_rate_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        make()


@pytest.mark.parametrize(
    ("key", "args", "kwargs", "found"),
    [
        (None, ["ada"], {}, None),
        ("tenant", ["ada"], {}, "ada"),
        ("tenant", [], {"tenant": "ada"}, "ada"),
        ("number", ["ada"], {}, "0"),
        ("region", ["ada"], {}, "eu"),
        ("extra", ["ada"], {"extra": "x"}, "x"),
        ("header:tenant", [], {}, "bob"),
        ("header:other", [], {}, None),
        (lambda args, kwargs, headers: args[0] + headers["tenant"], ["ada"], {}, "adabob"),
        (lambda args, kwargs, headers: True, [], {}, "True"),
        ("tenant", ["x" * 1000], {}, "x" * 200),
    ],
)
def test_the_key_of_a_task(
    key: Any, args: list[Any], kwargs: dict[str, Any], found: str | None
) -> None:
    rate = Rate("1/s", key=key)
    assert rate.key_of(args, kwargs, {"tenant": "bob"}, signature(call_api)) == found


def test_a_key_callable_returns_str_int_or_bool_that_can_be_encoded() -> None:
    """The text of an object may differ for each task. Then no task would be limited."""
    for found in (object(), 1.5):
        rate = Rate("1/s", key=lambda args, kwargs, headers, found=found: found)
        with pytest.raises(ValueError, match="key callable to return str, int, bool or None, got "):
            rate.key_of([], {}, {})
    rate = Rate("1/s", key="tenant")
    with pytest.raises(ValueError, match="without lone surrogates, got 'a"):
        rate.key_of([], {"tenant": "a\ud800"}, {})
    assert rate.key_of([], {"tenant": ["\ud800"]}, {}) == "['\\ud800']"


def test_rates_in_the_settings_are_normalized() -> None:
    """Equal rates compare equal however they are written: connections are pooled by settings."""
    settings = DelaySettings(rates={"b": "1/s", "a": {"limit": "100/m", "key": "tenant"}})
    assert settings.rates_by_task == {
        "a": (Rate("100/m", key="tenant", name="a"),),
        "b": (Rate("1/s", name="b"),),
    }
    several = DelaySettings(rates={"a": ["10/s", {"limit": "5000/d", "name": "day"}, "9/s"]})
    assert [each.name for each in several.rates_by_task["a"]] == ["a", "day", "a#3"]
    hash(several)
    assert settings == DelaySettings(rates={"a": Rate("100/m", key="tenant"), "b": Rate("1/s")})
    assert len({settings, settings}) == 1


def test_some_keys_have_limits_of_their_own() -> None:
    for overrides in ({"gold": "1000/m"}, lambda key: "1000/m" if key == "gold" else None):
        rate = Rate("100/m", key="tenant", burst=5, overrides=overrides)
        assert rate.for_key("gold").shown == "1000/m, burst 5"
        assert rate.for_key("ada").shown == rate.for_key(None).shown == "100/m, burst 5"
    hash(Rate("1/s", overrides={"gold": "2/s"}))
    with pytest.raises(SettingsError, match="got 'fast'"):
        Rate("1/s", overrides=lambda key: "fast").for_key("gold")


def test_tasks_may_share_a_rate_by_its_name_and_name_their_keys_differently() -> None:
    shared = {"limit": "100/m", "name": "stripe"}
    rates = {"pay": {**shared, "key": "account"}, "refund": {**shared, "key": "customer"}}
    assert {rate.name for rate in DelaySettings(rates=rates).rates_by_task["pay"]} == {"stripe"}


def test_the_text_of_a_rate_is_the_call_that_makes_it() -> None:
    for rate in (Rate("1/s"), Rate("100/m", key="tenant", burst=10, overrides={"a": "1/s"})):
        assert eval(repr(rate)) == rate


def test_the_seconds_of_retry_after_also_when_it_was_pickled() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for when, seconds in (
        (30, 30.0),
        ("30", 30.0),
        (-3, 0.0),
        ("Thu, 01 Jan 2026 00:01:30 GMT", 90.0),
        ("Wed, 31 Dec 2025 00:01:30 GMT", 0.0),
    ):
        assert pickle.loads(pickle.dumps(RetryAfter(when))).seconds(now) == seconds


@pytest.mark.parametrize("when", [None, "soon", float("nan"), 10**400])
def test_retry_after_refuses_an_invalid_time(when: Any) -> None:
    with pytest.raises(InvalidDueTime, match="an HTTP server's Retry-After") as refused:
        RetryAfter(when)
    assert str(refused.value).endswith(f"got {when!r}")
