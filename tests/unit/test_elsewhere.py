"""Reading messages that wait in Celery's own delay levels or in an earlier set of ours."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu.transport import native_delayed_delivery as celerys

from celery_native_delay.due_time import due_us
from celery_native_delay.message import Delayed
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.moving import Found, Moving, Reach, Stays
from celery_native_delay.transports.rabbitmq.elsewhere import (
    celerys_levels,
    celerys_queues,
    deliveries_of,
    read_celerys,
    read_ours,
)
from celery_native_delay.transports.rabbitmq.topology import Topology
from celery_native_delay.transports.rabbitmq.wrapping import wrap

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NOW_US = due_us(NOW)
ETA = (NOW + timedelta(seconds=60)).isoformat()

REACHES = [
    Reach("shop", "topic", "orders.#", "orders"),
    Reach("mail", "topic", "welcome", "mails"),
    Reach("post", "topic", "sent.welcome", "letters"),
    Reach("billing", "direct", "invoice", "invoices"),
    Reach("", "direct", "celery", "celery"),
]


def read(
    countdown: int,
    routing_key: str,
    *,
    properties: dict[str, Any] | None = None,
    eta: str | None = ETA,
    **headers: Any,
) -> Found:
    if eta is not None:
        headers["eta"] = eta
    own = {"application_headers": headers, **(properties or {})}
    info = {
        "exchange": "celery_delayed_27",
        "routing_key": celerys.calculate_routing_key(countdown, routing_key),
        "redelivered": False,
    }
    return read_celerys(b"[]", own, info, now_us=NOW_US, reaches=REACHES)


def moving(found: Found) -> Moving:
    assert isinstance(found, Moving), found
    return found


# ---- Celery's own levels -----------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(celerys, "_celery_delayed_delivery_exchange"), reason="no prefixes in this kombu"
)
@pytest.mark.parametrize("prefix", ["", "eu", "shop_eu"])
def test_the_names_of_celerys_levels_are_kombus(prefix: str) -> None:
    queues = [celerys.level_name(number, prefix) for number in reversed(range(28))]
    delivery = celerys._celery_delayed_delivery_exchange(prefix)
    (levels,) = celerys_levels([*queues, delivery, "celery"])
    assert celerys_queues(levels) == queues


def test_the_names_without_a_prefix_are_the_same_in_every_kombu() -> None:
    queues = [celerys.level_name(number) for number in reversed(range(28))]
    assert celerys_queues("celery_delayed_") == queues


def test_only_celerys_levels_are_found_with_every_prefix() -> None:
    names = ["celery_delayed_0", "eu_celery_delayed_27", "celery_delayed_28", "celery_delayed_x"]
    assert celerys_levels(names) == ["celery_delayed_", "eu_celery_delayed_"]
    assert celerys_levels(["celery_delay.v1.31x125ms.f12.quorum.level-00"]) == []


def test_the_end_of_the_routing_key_names_the_destination_and_the_eta_the_due_time() -> None:
    eta = (NOW + timedelta(seconds=99.25)).isoformat()
    found = moving(read(99, "orders.new", task="shop.remind", id="order-7", eta=eta))
    delayed = found.delayed
    assert (delayed.exchange, delayed.routing_key, delayed.queue) == ("shop", "orders.new", None)
    assert delayed.due_us == due_us(eta)
    assert found.headers == {"task": "shop.remind", "id": "order-7", "eta": eta}


def test_of_two_bindings_with_one_ending_the_exact_key_decides() -> None:
    """Celery would deliver the message through both."""
    assert moving(read(5, "welcome")).delayed.exchange == "mail"
    assert moving(read(5, "sent.welcome")).delayed.exchange == "post"


def test_a_message_for_two_exchanges_stays_and_the_reason_names_both() -> None:
    two = [*REACHES, Reach("spam", "topic", "welcome", "spams")]
    info = {"exchange": "x", "routing_key": celerys.calculate_routing_key(5, "welcome")}
    found = read_celerys(b"", {}, info, now_us=NOW_US, reaches=two)
    assert isinstance(found, Stays)
    assert "mail, spam" in found.why
    assert found.is_error


def test_a_message_with_a_key_unknown_to_the_app_stays() -> None:
    assert isinstance(read(5, "unknown"), Stays)


def test_a_message_to_a_direct_exchange_stays() -> None:
    assert "task_queues" in getattr(read(5, "invoice"), "why", "")


@pytest.mark.parametrize("key", ["orders.new", "0.1.orders", "2." * 28 + "orders.new", "0." * 28])
def test_a_message_with_a_foreign_routing_key_stays(key: str) -> None:
    info = {"exchange": "celery_delayed_27", "routing_key": key}
    found = read_celerys(b"", {}, info, now_us=NOW_US, reaches=REACHES)
    assert isinstance(found, Stays)


def test_a_message_without_an_eta_stays() -> None:
    assert "no ETA" in getattr(read(13, "orders.new", eta=None), "why", "")


def test_death_headers_of_celerys_levels_are_removed() -> None:
    headers = {
        "x-death": [{"queue": "celery_delayed_3"}],
        "x-first-death-queue": "celery_delayed_3",
        "x-first-death-reason": "expired",
        "x-first-death-exchange": "celery_delayed_3",
        "task": "shop.remind",
    }
    assert moving(read(5, "orders.new", **headers)).headers == {"task": "shop.remind", "eta": ETA}


def test_an_expiration_ends_when_the_task_expires() -> None:
    expires = (NOW + timedelta(seconds=60)).isoformat()
    own = {"expiration": "90000"}
    found = moving(read(99, "orders.new", properties=own, expires=expires))
    assert found.delayed.expires_ms == NOW_US // 1000 + 60_000
    found = moving(read(99, "orders.new", properties=own))
    assert found.delayed.expires_ms == NOW_US // 1000 + 90_000


def test_a_message_with_an_invalid_eta_stays() -> None:
    assert "ISO 8601" in getattr(read(5, "orders.new", task="x", eta="soon"), "why", "")


# ---- our levels of another namespace -----------------------------------------------------------


def test_a_message_of_ours_is_unwrapped() -> None:
    delayed = Delayed("ab" * 16, NOW_US + 9_000_000, "shop", "orders.new", "orders", 5_000)
    own = {"priority": 3, "application_headers": {"task": "shop.remind", "id": "order-7"}}
    wrapped = wrap(own | {"expiration": "7"}, delayed, now_us=NOW_US, limit_priority=False)
    topology = Topology(DelaySettings())
    info = {"exchange": topology.level_exchange(12), "routing_key": "0.1", "redelivered": True}
    found = moving(read_ours(b"[]", wrapped, info))
    assert found.delayed == delayed
    assert found.properties == own | {"expiration": "7"}
    assert found.again


def test_a_message_without_our_header_stays() -> None:
    assert isinstance(read_ours(b"", {}, {"exchange": "", "routing_key": ""}), Stays)


def test_deliveries_are_read_from_the_brokers_headers() -> None:
    assert deliveries_of({}) == 0
    assert deliveries_of({"application_headers": {"x-delivery-count": 3}}) == 3
    assert deliveries_of({"application_headers": {"x-acquired-count": 7}}) == 7
