"""Settings: one frozen object, whose errors name the value and the expectation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import Debounce, DelaySettings, SettingsError, Throttle, Unique, install
from celery_native_delay.settings import InstallKeywords, setting_names


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite+pysqlite:///?cache=shared",
        "sqlite:///file:delays?mode=memory&cache=shared&uri=true",
        "sqlite:///file::memory:?uri=true",
        "user:secret@host",
        "sentinel://:secret@a:26379/shop/0?ssl_cert_reqs=required",
    ],
)
def test_a_store_in_memory_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="a database that outlives the process") as refused:
        DelaySettings(store=url)
    assert "secret" not in str(refused.value) or "://" not in url


def test_a_wrong_url_is_refused_without_showing_its_password() -> None:
    with pytest.raises(SettingsError, match=r"got 'sentinel://ada:.*@host/0'") as refused:
        DelaySettings.from_mapping({"management_url": "sentinel://ada:secret@host/0"})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Debounce(key="user", seconds=0),
        lambda: Debounce(key="user", seconds=5, max_wait_seconds=4),
        lambda: Debounce(key="user", seconds=5, collect=1),
        lambda: Throttle(key="user", seconds="5"),  # type: ignore[arg-type]
        lambda: Throttle(key="user", seconds=5, edge="first"),  # type: ignore[arg-type]
        lambda: Unique(key="user", until="now"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_key_is_refused_where_it_is_declared_not_at_the_first_call(
    declare: Callable[[], object],
) -> None:
    with pytest.raises(ValueError, match=r"expected \w+ (to be|of at least) .*got "):
        declare()


def test_the_default_levels_reach_eight_and_a_half_years_and_schedules_may_be_the_release() -> None:
    assert (DelaySettings().longest_delay_seconds, DelaySettings().resolution_ms) == (
        2**28 - 0.125,
        125,
    )
    for schedules, release in (("2026-11-23", "2026-11-23"), (1, 1), (True, None)):
        assert DelaySettings(schedules=schedules).schedules_version == release


RIGHT: list[tuple[str, Any]] = [
    ("enabled", "drain"),
    ("namespace", "shop.eu-west_1"),
    ("store", "redis+socket:///run/redis.sock"),
    ("store", "sentinel://:secret@a:26379,b:26379/shop/0"),
    ("store", "sentinel://a/shop/0?credential_provider=shop.Credentials"),
    ("store", "postgresql+psycopg://shop:secret@db/shop"),
    ("store", "sqlite:////var/delays.db?synchronous=full"),
    ("store_tasks", ["shop.remind", "billing.*"]),
    ("schedules", 7),
    ("landing", ("jobs", "tenant-*")),
    ("management_url", "https://guest:guest@rabbit:15671"),
    ("telemetry", "/var/log/shop/telemetry"),
]


def test_values_that_are_accepted() -> None:
    for name, value in RIGHT:
        found = getattr(DelaySettings.from_mapping({name: value}), name)
        assert found == (tuple(value) if isinstance(value, list) else value)


#: Wrong values by setting, after a part of what the error expects.
WRONG: list[tuple[str, str, list[Any]]] = [
    ("enabled", 'True, False or "drain"', ["yes"]),
    ("namespace", "1 to 64 letters, digits", ["", "n" * 65, "a.", "a..b", "ä", "a\n"]),
    ("landing", "a list of exchange and queue names", ["news", (1,), ("",)]),
    ("declare", "True or False", [0]),
    ("management_url", "None or an http(s) URL", ["rabbit:15672"]),
    ("store", "outlives the process", ["stream", "redis://store:many"]),
    ("store", "1 to 50 of the characters", ["redis://store?native_delay_prefix=shop_"]),
    ("store", "DELAY_TABLE_PREFIX", ["django?native_delay_prefix=shop_"]),
    ("store", "native_delay_prefix", ["sqlite:////a.db?native_delay_prefix=Shop-"]),
    ("store", "native_delay_prefix", [f"mysql://db/shop?native_delay_prefix={'a' * 51}"]),
    ("store_tasks", 'such as ["shop.remind", "billing.*"]', ["shop.*"]),
    ("once", 'such as {"billing.*": 30}', ["shop.*", (("shop.*", 0),), ((1, 1),)]),
    ("schedules", "a release: a number from 1", [0, ""]),
    ("store_timeout_seconds", "seconds above 0, and at most 3600", [0]),
    ("telemetry", "None or the path of a folder", [""]),
]


@pytest.mark.parametrize(("name", "expected", "values"), WRONG)
def test_the_error_for_a_bad_value_names_the_expectation_and_the_value(
    name: str, expected: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(SettingsError) as refused:
            DelaySettings.from_mapping({name: value})
        assert str(refused.value).startswith(f"expected native_delay_{name} to be ")
        assert expected in str(refused.value)
        assert str(refused.value).endswith(f", got {value!r}")


def test_the_error_for_an_unknown_name_suggests_the_nearest_or_lists_all() -> None:
    for name, meant in (("Declare", "declare"), ("landings", "landing")):
        with pytest.raises(SettingsError) as refused:
            DelaySettings.from_mapping({name: 3})
        assert str(refused.value) == (
            f"unknown setting native_delay_{name}; did you mean native_delay_{meant}?"
        )
    with pytest.raises(SettingsError, match="unknown setting native_delay_zzz; known: ") as refused:
        DelaySettings.from_mapping({"zzz": 3})
    for name in setting_names():
        assert f"native_delay_{name}" in str(refused.value)


def test_there_are_at_most_15_settings() -> None:
    assert len(setting_names()) <= 15
    assert {*setting_names()} == {*InstallKeywords.__annotations__}


@pytest.mark.parametrize(
    ("once", "days"),
    [
        ([], {"shop.pay": None}),
        (["shop.*"], {"shop.pay": 7, "mail": None}),
        ({"shop.pay": 30, "shop.*": 1.5}, {"shop.pay": 30, "shop.mail": 1.5, "mail": None}),
    ],
)
def test_once_says_which_tasks_and_how_long(once: Any, days: dict[str, float | None]) -> None:
    """Seven days, also for a task that is once by its decorator only."""
    chosen = DelaySettings(once=once)
    assert replace(chosen) == chosen
    for task, expected in days.items():
        assert chosen.is_once(task) == (expected is not None)
        assert chosen.once_days(task) == (expected or 7)


def test_equal_settings_have_equal_reprs_and_survive_pickling() -> None:
    """The repr is part of kombu's pool key; the order of a set does not show in it."""
    names = [f"exchange-{number}" for number in range(40)]
    grown = set(names)
    shrunk = {*reversed(names), *map(str, range(1000))} - {*map(str, range(1000))}
    for one, other in ((names, tuple(names)), (grown, shrunk)):
        as_one, as_other = (DelaySettings(landing=each) for each in (one, other))  # type: ignore[arg-type]
        assert as_one == as_other == pickle.loads(pickle.dumps(as_one))
        assert hash(as_one) == hash(as_other)
        assert repr(as_one) == repr(as_other)
        assert eval(repr(as_one), {"DelaySettings": DelaySettings}) == as_one


@pytest.mark.parametrize("name", setting_names())
@pytest.mark.parametrize(
    "junk", [None, 1, "x", (), ((1,),), (("a", 1, 2),), {1: 2}, {"a": [None]}, object()]
)
def test_any_value_of_any_setting_is_right_or_a_settings_error(name: str, junk: object) -> None:
    """From a keyword of install, and from the app's configuration, by which a task is sent."""
    error = ""
    try:
        DelaySettings.from_mapping({name: junk})
    except SettingsError as exc:
        error = str(exc)
    assert not error or ("expected" in error and "got" in error)
    app = install(Celery(broker="memory://", set_as_current=False), store="sqlite:////nowhere.db")
    if name != "store":
        app.conf[f"native_delay_{name}"] = junk
        app.send_task("shop.order")
