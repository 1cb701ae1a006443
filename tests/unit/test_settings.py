"""Settings: one frozen object, whose errors name the value and the expectation."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from celery_native_delay import DelaySettings, SettingsError
from celery_native_delay.settings import check_settings, setting_names

STORE = (
    "None, the URL of a Redis that starts with redis://, rediss:// or redis+socket://, or is "
    "sentinel://host:26379,host2:26379/service/0, or a "
    "SQLAlchemy URL of a database that outlives the process, such as "
    '"postgresql+psycopg://host/shop", or "django" or "django:alias" for a database of Django'
)


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
    with pytest.raises(SettingsError) as refused:
        DelaySettings(store=url)
    assert STORE in str(refused.value)
    assert "secret" not in str(refused.value) or "://" not in url


@pytest.mark.parametrize("name", ["store", "management_url"])
def test_a_wrong_url_is_refused_without_showing_its_password(name: str) -> None:
    with pytest.raises(SettingsError, match=r"got 'sentinel://ada:.*@host/0'") as refused:
        check_settings({name: "sentinel://ada:secret@host/0"})
    assert "secret" not in str(refused.value)


def test_the_default_levels_reach_eight_and_a_half_years() -> None:
    assert DelaySettings().longest_delay_seconds == 2**28 - 0.125
    assert DelaySettings().resolution_ms == 125


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", False),
        ("enabled", "drain"),
        ("namespace", "a"),
        ("namespace", "shop.eu-west_1"),
        ("namespace", "n" * 64),
        ("confirm_publish", False),
        ("store", "redis+socket:///run/redis.sock"),
        ("store", "sentinel://:secret@a:26379,b:26379/shop/0"),
        ("store", "sentinel://a/shop/0?credential_provider=shop.Credentials"),
        ("store", "postgresql+psycopg://shop:secret@db/shop"),
        ("store_tasks", ["shop.remind", "billing.*"]),
        ("store_timeout_seconds", 0.5),
        ("once", ["shop.*"]),
        ("once_days", 30),
        ("store", "sqlite:///delays.db"),
        ("store", "sqlite:////var/delays.db?synchronous=full"),
        ("store", "mysql+mysqldb://u:p@h/d"),
        ("landing_exchanges", ["news"]),
        ("landing_exchanges", ("news", "a.b")),
        ("landing_queues", ("jobs", "tenant-*")),
        ("declare", False),
        ("management_url", "https://guest:guest@rabbit:15671"),
        ("telemetry", "/var/log/shop/telemetry"),
        ("telemetry", "telemetry"),
    ],
)
def test_values_that_are_accepted(name: str, value: Any) -> None:
    check_settings({name: value})
    found = getattr(DelaySettings.from_mapping({name: value}), name)
    assert found == (tuple(value) if isinstance(value, list) else value)


NAMESPACE = "1 to 64 letters, digits, _, - or inner dots"
PREFIX = (
    "the URL of a database whose native_delay_prefix has 1 to 50 of the characters a-z, 0-9 and _, "
    'and no digit at its beginning; for "django", set DELAY_TABLE_PREFIX in Django\'s settings'
)
TASKS = 'a list of task names such as ["shop.remind", "billing.*"]'


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("enabled", "yes", 'True, False or "drain"'),
        ("enabled", 1, 'True, False or "drain"'),
        ("enabled", None, 'True, False or "drain"'),
        ("namespace", "", NAMESPACE),
        ("namespace", "n" * 65, NAMESPACE),
        ("namespace", ".a", NAMESPACE),
        ("namespace", "a.", NAMESPACE),
        ("namespace", "a..b", NAMESPACE),
        ("namespace", "a b", NAMESPACE),
        ("namespace", "a#", NAMESPACE),
        ("namespace", "ä", NAMESPACE),
        ("namespace", "a\n", NAMESPACE),
        ("namespace", None, NAMESPACE),
        ("namespace", b"a", NAMESPACE),
        ("confirm_publish", "window", "True or False"),
        ("landing_exchanges", "news", "a list of exchange names"),
        ("landing_exchanges", [1], "a list of exchange names"),
        ("landing_exchanges", [""], "a list of exchange names"),
        ("landing_exchanges", None, "a list of exchange names"),
        ("landing_queues", "jobs", "a list of queue names"),
        ("declare", 0, "True or False"),
        ("management_url", "rabbit:15672", "None or an http(s) URL"),
        ("management_url", 15672, "None or an http(s) URL"),
        ("store", "stream", STORE),
        ("store", "amqp://", STORE),
        ("store", "redis://store:many", STORE),
        ("store", "redis://store?native_delay_prefix=shop_", PREFIX),
        ("store", "django?native_delay_prefix=shop_", PREFIX),
        ("store", "sqlite:////a.db?native_delay_prefix=Shop-", PREFIX),
        ("store", f"mysql://db/shop?native_delay_prefix={'a' * 51}", PREFIX),
        ("store_tasks", "shop.*", TASKS),
        ("once", [""], TASKS),
        ("once_days", 0, "days above 0, and at most 3660"),
        ("store_timeout_seconds", 0, "seconds above 0, and at most 3600"),
        ("store", True, STORE),
        ("telemetry", "", "None or the path of a folder"),
        ("telemetry", True, "None or the path of a folder"),
    ],
)
def test_the_error_for_a_bad_value_names_the_expectation_and_the_value(
    name: str, value: Any, expected: str
) -> None:
    is_list = name in ("landing_exchanges", "once") and isinstance(value, list)
    shown = tuple(value) if is_list else value
    text = f"expected native_delay_{name} to be {expected}, got {shown!r}"
    for refuse in (check_settings, DelaySettings.from_mapping):
        with pytest.raises(SettingsError) as refused:
            refuse({name: value})
        assert str(refused.value) == text
    with pytest.raises(SettingsError) as refused:
        DelaySettings(**{name: value})
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("delcare", "declare"),
        ("Declare", "declare"),
        ("confirm_publich", "confirm_publish"),
        ("landing_exchange", "landing_exchanges"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(SettingsError) as refused:
        DelaySettings.from_mapping({name: 3})
    assert str(refused.value) == (
        f"unknown setting native_delay_{name}; did you mean native_delay_{meant}?"
    )


def test_the_error_for_an_unknown_name_lists_all_if_none_is_near() -> None:
    with pytest.raises(SettingsError, match="unknown setting native_delay_zzz; known: ") as refused:
        DelaySettings.from_mapping({"zzz": 3})
    for name in setting_names():
        assert f"native_delay_{name}" in str(refused.value)


def test_settings_cannot_be_changed() -> None:
    wanted = DelaySettings()
    with pytest.raises(FrozenInstanceError):
        wanted.levels = 3  # type: ignore[misc]


def test_settings_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        DelaySettings(True)  # type: ignore[misc]


def test_equal_settings_have_equal_reprs() -> None:
    """The repr is part of kombu's pool key."""
    as_list = DelaySettings(landing_exchanges=["a", "b"])  # type: ignore[arg-type]
    as_tuple = DelaySettings(landing_exchanges=("a", "b"))
    assert as_list == as_tuple
    assert hash(as_list) == hash(as_tuple)
    assert repr(as_list) == repr(as_tuple)
    assert eval(repr(as_tuple), {"DelaySettings": DelaySettings}) == as_tuple


def test_the_order_of_a_set_does_not_show_in_the_repr() -> None:
    names = [f"exchange-{number}" for number in range(40)]
    grown = set(names)
    shrunk = {*reversed(names), *map(str, range(1000))} - {*map(str, range(1000))}
    assert grown == shrunk
    one, other = (DelaySettings(landing_exchanges=wanted) for wanted in (grown, shrunk))  # type: ignore[arg-type]
    assert repr(one) == repr(other)


def test_settings_survive_pickling() -> None:
    wanted = DelaySettings(levels=12, landing_exchanges=("news",), management_url="http://rabbit")
    assert pickle.loads(pickle.dumps(wanted)) == wanted
