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
    UnsupportedBroker,
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


@pytest.mark.parametrize(
    ("alias", "ours", "kombus"),
    [
        ("amqp", rabbitmq.Transport, pyamqp.Transport),
        ("pyamqp", rabbitmq.Transport, pyamqp.Transport),
        ("amqps", rabbitmq.SSLTransport, pyamqp.SSLTransport),
        ("redis", redis.Transport, kombu_redis.Transport),
        ("rediss", redis.Transport, kombu_redis.Transport),
        ("sentinel", redis.SentinelTransport, kombu_redis.SentinelTransport),
        ("sqs", sqs.Transport, KombuSqsTransport),
        ("SQS", sqs.Transport, KombuSqsTransport),
    ],
)
def test_an_alias_leads_to_our_subclass_of_kombus_transport(
    alias: str, ours: type, kombus: type
) -> None:
    assert resolve_transport(alias) is ours
    assert Connection(f"{alias}://").get_transport_cls() is ours
    assert issubclass(ours, kombus)


@pytest.mark.parametrize(
    ("url", "store", "ours"),
    [
        ("amqp://", None, "rabbitmq"),
        ("redis+socket:///run/redis.sock", None, "redis"),
        ("sentinel://a;sentinel://b", None, "redis"),
        (["amqp://a", "amqp://b"], None, "rabbitmq"),
        ("pgmq://", None, "pgmq"),
        ("sqla+sqlite:///broker.db", None, "sql"),
        ("filesystem://", "sqlite:///delays.db", "sql"),
        ("azureservicebus://", "postgresql://db/shop", "sql"),
        ("filesystem://", None, None),
        ("qpid://", "sqlite:///delays.db", None),
        ("gcpubsub://projects/shop", "sqlite:///delays.db", None),
    ],
)
def test_transport_for_a_url(url: str | list[str], store: str | None, ours: str | None) -> None:
    assert transport_for(url, store=store) == ours


@pytest.mark.parametrize("url", [None, [], 5])
def test_transport_for_refuses_anything_but_a_url(url: Any) -> None:
    with pytest.raises(TypeError, match="expected a broker's URL, or a list of them, got "):
        transport_for(url)


def test_a_scheme_that_kombu_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedBroker, match=r"Did you mean amqp\?") as refused:
        with url_errors_explained():
            Connection("amqpp://u:secret@localhost").get_transport_cls()
    assert "secret" not in str(refused.value)


def test_other_errors_are_not_replaced() -> None:
    with pytest.raises(KeyError, match="another"), url_errors_explained():
        raise KeyError("another")


@pytest.mark.parametrize("alias", ["memory", "filesystem", "sqla", "sqlalchemy"])
def test_a_broker_without_delays_has_a_subclass_of_kombus_transport(alias: str) -> None:
    kombus = symbol_by_name(originals[alias])
    ours = resolve_transport(alias)
    assert issubclass(ours, kombus)
    assert ours.Channel is kombus.Channel
    assert issubclass(ours.delaying_channel, kombus.Channel)


def test_all_other_aliases_stay_kombus() -> None:
    ours = {
        alias
        for alias, path in kombu_transport.TRANSPORT_ALIASES.items()
        if path.startswith("celery_native_delay.")
    }
    assert ours | {"pgmq"} == set(ALIASES)  # which kombu has since 5.7


def test_registering_replaces_a_transport_that_kombu_had_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        kombu_transport.TRANSPORT_ALIASES, "amqp", "kombu.transport.pyamqp:Transport"
    )
    monkeypatch.setitem(kombu_transport._transport_cache, "amqp", pyamqp.Transport)
    for _ in range(2):
        register_transports()
        assert kombu_transport.get_transport_cls("amqp") is rabbitmq.Transport


# ---- connections ---------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-amqp connections whose ``connect()`` does nothing."""
    monkeypatch.setattr(amqp.Connection, "connect", lambda *args, **kwargs: None)


def established(**transport_options: Any) -> Any:
    connection = Connection("amqp://", transport_options=transport_options)
    return connection.transport.establish_connection()


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        (True, DelaySettings()),
        ({"declare": False}, DelaySettings(declare=False)),
        (DelaySettings(declare=False), DelaySettings(declare=False)),
    ],
)
def test_a_connection_has_the_settings_of_the_option_and_later_ones_without_it_are_kombus(
    offline: None, option: Any, wanted: DelaySettings
) -> None:
    assert established(native_delay=option).delays.settings == wanted
    for options in ({}, {"confirm_publish": True}, {"native_delay": {"enabled": False}}):
        assert type(established(**options)) is pyamqp.Connection
    assert rabbitmq.Transport.Connection is pyamqp.Connection


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"declare": 0}, "expected native_delay_declare to be"),
        (option_of(SettingsError("expected this, got that")), "expected this, got that"),
    ],
)
def test_a_misconfigured_connection_connects_and_raises_when_it_has_to_delay(
    offline: None, option: Any, said: str
) -> None:
    """Immediate messages can still be sent."""
    connection = established(native_delay=option)
    with pytest.raises(SettingsError, match=said):
        connection.delays.prepare()


def test_an_unresponsive_broker_has_a_minute_to_answer(offline: None) -> None:
    """With py-amqp's 1 s, messages are lost silently during a memory alarm."""
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is None:
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    assert established(native_delay=True).socket_settings[user_timeout] == 60_000
    own = established(native_delay=True, socket_settings={user_timeout: 5})
    assert own.socket_settings[user_timeout] == 5


def test_a_cloned_or_failed_over_connection_keeps_the_option() -> None:
    connection = Connection("amqp://one;amqp://two", transport_options={"native_delay": True})
    for other in (connection, connection.clone()):
        other.switch("amqp://two")
        assert other.hostname == "two"
        assert other.transport_options["native_delay"] is True
        assert other.get_transport_cls() is rabbitmq.Transport


# ---- the option ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", [None, False, "yes", DelaySettings])
def test_an_option_of_another_type_is_refused(option: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        settings_from_option(option)
    assert str(refused.value) == (
        'expected transport_options["native_delay"] to be True, a dict of settings or '
        f"DelaySettings, got {option!r}"
    )


@pytest.mark.parametrize(
    "wanted",
    [
        DelaySettings(),
        DelaySettings(landing=("news",), declare=False),
    ],
)
def test_settings_survive_the_conversion_to_an_option_and_back(wanted: DelaySettings) -> None:
    assert settings_from_option(option_of(wanted)) == wanted
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


def test_delay_headers_count_from_now_by_default() -> None:
    before = datetime.now(UTC)
    eta = datetime.fromisoformat(delay_headers(countdown=60)["eta"])
    assert before <= eta - timedelta(seconds=60) <= datetime.now(UTC)


@pytest.mark.parametrize("countdown", [-math.inf, -(10**11)])
def test_delay_headers_refuse_a_countdown_that_ends_before_the_first_date(countdown: float) -> None:
    with pytest.raises(InvalidDueTime):
        delay_headers(countdown=countdown)
