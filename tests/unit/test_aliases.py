"""kombu's aliases lead to our transports, which are kombu's without the option ``native_delay``."""

from __future__ import annotations

import json
import math
import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest
from kombu import Connection
from kombu import transport as kombu_transport
from kombu.transport import pyamqp, resolve_transport
from kombu.transport import redis as kombu_redis
from kombu.transport.SQS import Transport as KombuSqsTransport
from kombu.utils.imports import symbol_by_name

from celery_native_delay import (
    DelaySettings,
    InvalidDueTime,
    SettingsError,
    delay_headers,
    register_transports,
    transport_for,
)
from celery_native_delay.transports import rabbitmq, redis, sqs
from celery_native_delay.transports.aliases import (
    ALIASES,
    option_of,
    originals,
    settings_from_option,
    url_errors_explained,
)

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


# ---- aliases -------------------------------------------------------------------------------


def test_an_alias_leads_to_our_subclass_of_kombus_transport() -> None:
    for alias, ours, kombus in (
        ("amqp", rabbitmq.Transport, pyamqp.Transport),
        ("pyamqp", rabbitmq.Transport, pyamqp.Transport),
        ("amqps", rabbitmq.SSLTransport, pyamqp.SSLTransport),
        ("redis", redis.Transport, kombu_redis.Transport),
        ("rediss", redis.Transport, kombu_redis.Transport),
        ("sentinel", redis.SentinelTransport, kombu_redis.SentinelTransport),
        ("sqs", sqs.Transport, KombuSqsTransport),
        ("SQS", sqs.Transport, KombuSqsTransport),
    ):
        assert Connection(f"{alias}://").get_transport_cls() is ours
        assert issubclass(ours, kombus)
    for alias in ("memory", "filesystem", "sqla", "sqlalchemy"):
        kombus, made = symbol_by_name(originals[alias]), resolve_transport(alias)
        assert issubclass(made, kombus)
        assert made.Channel is kombus.Channel
        assert issubclass(made.delaying_channel, kombus.Channel)


def test_transport_for_a_url() -> None:
    for url, ours in (
        ("amqp://", "rabbitmq"),
        ("redis+socket:///run/redis.sock", "redis"),
        ("sentinel://a;sentinel://b", "redis"),
        (["amqp://a", "amqp://b"], "rabbitmq"),
        ("pgmq://", "pgmq"),
        ("sqla+sqlite:///broker.db", "sql"),
        ("filesystem://", None),
    ):
        assert transport_for(url) == ours
    assert transport_for("filesystem://", store="sqlite:///delays.db") == "sql"
    assert transport_for("azureservicebus://", store="postgresql://db/shop") == "sql"
    for url in ("qpid://", "gcpubsub://projects/shop"):
        assert transport_for(url, store="sqlite:///delays.db") is None
    for wrong in (None, [], 5):
        with pytest.raises(TypeError, match="expected a broker's URL, or a list of them, got "):
            transport_for(wrong)  # type: ignore[arg-type]


def test_other_errors_are_not_replaced() -> None:
    with pytest.raises(KeyError, match="another"), url_errors_explained():
        raise KeyError("another")


def test_all_other_aliases_stay_kombus() -> None:
    ours = {
        alias
        for alias, path in kombu_transport.TRANSPORT_ALIASES.items()
        if path.startswith("celery_native_delay.")
    }
    assert ours | {"pgmq"} == set(ALIASES)  # which kombu has since 5.7


def test_registering_replaces_a_resolved_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        kombu_transport.TRANSPORT_ALIASES, "amqp", "kombu.transport.pyamqp:Transport"
    )
    monkeypatch.setitem(kombu_transport._transport_cache, "amqp", pyamqp.Transport)
    for _ in range(2):
        register_transports()
        assert kombu_transport.get_transport_cls("amqp") is rabbitmq.Transport


# ---- connections ---------------------------------------------------------------------------


def test_an_unresponsive_broker_has_a_minute_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With py-amqp's 1 s, messages are lost silently during a memory alarm."""
    monkeypatch.setattr(amqp.Connection, "connect", lambda *args, **kwargs: None)
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is None:
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    for own, expected in (({}, 60_000), ({"socket_settings": {user_timeout: 5}}, 5)):
        options = {"native_delay": True, **own}
        connection = Connection("amqp://", transport_options=options)
        settings = connection.transport.establish_connection().socket_settings
        assert settings[user_timeout] == expected


# ---- the option ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", [None, False, "yes", DelaySettings])
def test_an_option_of_another_type_is_refused(option: Any) -> None:
    with pytest.raises(SettingsError, match="to be True, a dict of settings or DelaySettings, got"):
        settings_from_option(option)


def test_settings_survive_the_conversion_to_an_option_and_back() -> None:
    for wanted in (DelaySettings(), DelaySettings(landing=("news",), declare=False)):
        assert settings_from_option(option_of(wanted)) == wanted
        assert settings_from_option(wanted) is wanted
        assert json.loads(json.dumps(option_of(wanted)))


def test_equal_errors_have_equal_options() -> None:
    """The repr is part of kombu's pool key: one pool per error, not one per message."""
    one, other = (option_of(SettingsError("levels=0")) for _ in range(2))
    assert repr(one) == repr(other)
    assert "levels=0" in repr(one)


# ---- delay_headers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "eta"),
    [
        ({"countdown": 0.125}, "2026-11-20T12:00:00.125000+00:00"),
        ({"countdown": -60}, "2026-11-20T11:59:00+00:00"),
        ({"eta": datetime(2026, 11, 20, 12, 0)}, "2026-11-20T12:00:00"),
        ({"eta": "2026-11-20T12:00:00Z"}, "2026-11-20T12:00:00Z"),
    ],
)
def test_delay_headers(arguments: dict[str, Any], eta: str) -> None:
    assert delay_headers(**arguments, now=NOON) == {"eta": eta}


def test_delay_headers_count_from_now_and_refuse_a_countdown_before_the_first_date() -> None:
    before = datetime.now(UTC)
    eta = datetime.fromisoformat(delay_headers(countdown=60)["eta"])
    assert before <= eta - timedelta(seconds=60) <= datetime.now(UTC)
    for countdown in (-math.inf, -(10**11)):
        with pytest.raises(InvalidDueTime):
            delay_headers(countdown=countdown)
