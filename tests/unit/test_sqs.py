"""Messages on SQS: payloads and entries, delay queues, and the hops of a long delay."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import CannotDelay, install
from celery_native_delay.app.broker import bounded_connection
from celery_native_delay.transports.sqs import relay
from celery_native_delay.transports.sqs.entry import (
    MOST_BYTES,
    Payload,
    SqsEntry,
    check_size,
    opened,
)
from celery_native_delay.transports.sqs.hops import Reception, seconds_up
from celery_native_delay.transports.sqs.queues import (
    attributes_of,
    can_delay,
    delay_queue_of,
    mismatches,
    overdue_in,
    waiting_in,
)

ATTRIBUTES = {
    "customer": {"DataType": "String", "StringValue": "Ada ä"},
    "key": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
}


def message(**properties: Any) -> dict[str, Any]:
    return {"body": "Ym9keQ==", "headers": {"id": "task-1"}, "properties": properties}


@pytest.mark.parametrize("base64", [True, False])
def test_a_payload_is_what_kombu_sends(base64: bool) -> None:
    sent = message(delivery_tag="tag", message_attributes=ATTRIBUTES, MessageGroupId="customer-7")
    payload = Payload.of(sent, base64=base64)
    text = b64decode(payload.body).decode() if base64 else payload.body
    assert json.loads(text) == message(delivery_tag="tag", MessageGroupId="customer-7")
    assert payload.arguments() == {
        "MessageBody": payload.body,
        "MessageAttributes": ATTRIBUTES,
        "MessageGroupId": "customer-7",
    }
    assert "message_attributes" in sent["properties"], "another queue may get it, too"


@given(
    body=st.text(max_size=200),
    left_ms=st.integers(0, 2**48),
    due_ms=st.integers(0, 2**48),
    entry_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
    with_attributes=st.booleans(),
)
def test_an_entry_survives_every_hop(
    body: str, left_ms: int, due_ms: int, entry_id: str, with_attributes: bool
) -> None:
    payload = Payload(body, ATTRIBUTES if with_attributes else {}, "group")
    entry = SqsEntry(entry_id, left_ms, due_ms, payload)
    for _ in range(3):
        assert opened(entry.text()) == entry
        assert entry.text().endswith(f"\n{body}")
        entry = entry.again(left_ms // 2)


def test_the_deduplication_id_differs_per_hop_and_not_per_attempt() -> None:
    first = SqsEntry("id", 5000, 1, Payload("body"))
    assert first.arguments()["MessageDeduplicationId"] == "id:0"
    assert first.again(1).arguments()["MessageDeduplicationId"] == "id:1"
    assert first.again(9).again(1).arguments()["MessageDeduplicationId"] == "id:2"
    assert first.arguments()["MessageGroupId"] == first.again(1).arguments()["MessageGroupId"]


def test_a_foreign_message_in_a_delay_queue_is_recognized() -> None:
    for text in ("", "{}\n", "hello\nworld", '{"v": 1}\nbody', "[1]\n", '{"v":2}\n'):
        with pytest.raises(ValueError):
            opened(text)


def test_a_message_of_the_largest_size_passes_and_one_byte_more_is_refused() -> None:
    payload = Payload("x" * (MOST_BYTES - 7), {"n": {"DataType": "", "StringValue": "123456"}})
    assert payload.size_bytes == MOST_BYTES
    check_size(payload.size_bytes, queue="jobs")
    with pytest.raises(CannotDelay, match=r"at most 1,048,576 bytes.*got 1,048,577 for 'jobs'"):
        check_size(MOST_BYTES + 1, queue="jobs")
    entry = SqsEntry("id", 5000, 1, Payload("x" * (MOST_BYTES - 10)))
    assert entry.size_bytes > MOST_BYTES, "the line in front counts as well"


# ---- delay queues ----------------------------------------------------------------------------


def test_a_delay_queue_that_we_create_passes_our_checks() -> None:
    """With the users' attributes, without a redrive policy."""
    assert delay_queue_of("jobs") == "jobs-delay.fifo"
    assert can_delay("jobs")
    assert not can_delay("jobs.fifo")
    wanted = {"KmsMasterKeyId": "alias/shop", "RedrivePolicy": "…", "DelaySeconds": "5"}
    made = attributes_of(wanted)
    assert made == attributes_of({}) | {"KmsMasterKeyId": "alias/shop"}
    assert (made["DelaySeconds"], made["MessageRetentionPeriod"]) == ("900", str(14 * 86400))
    assert mismatches("jobs-delay.fifo", made) == []
    assert "expected a FIFO queue: delete it" in str(mismatches("jobs-delay.fifo", {})[-1])
    (redrives,) = mismatches("jobs-delay.fifo", made | {"RedrivePolicy": "{}"})
    assert "jobs-delay.fifo: RedrivePolicy is" in str(redrives)


def test_visible_messages_are_overdue_if_no_relay_holds_any() -> None:
    numbers = {
        "ApproximateNumberOfMessages": "3",
        "ApproximateNumberOfMessagesDelayed": "4",
        "ApproximateNumberOfMessagesNotVisible": "0",
    }
    assert waiting_in(numbers) == 7
    assert overdue_in(numbers) == 3
    assert overdue_in(numbers | {"ApproximateNumberOfMessagesNotVisible": "2"}) == 0
    assert overdue_in({}) == 0


def test_the_group_of_a_message_is_the_users_or_its_tenant() -> None:
    """The text of a tenant may be none that SQS takes as a group."""
    tenant = message(delivery_tag="tag")
    tenant["headers"] = {"native_delay_tenant": "acme"}
    assert Payload.of(tenant, base64=False).arguments()["MessageGroupId"] == "acme"
    tenant["headers"] = {"native_delay_tenant": "käse & Söhne"}
    group = Payload.of(tenant, base64=False).arguments()["MessageGroupId"]
    assert group.isascii()
    assert len(group) <= 128
    tenant["properties"]["MessageGroupId"] = "mine"
    assert Payload.of(tenant, base64=False).arguments()["MessageGroupId"] == "mine"
    assert "MessageGroupId" not in Payload.of(message(delivery_tag="tag"), base64=False).arguments()


def test_on_sqs_a_command_waits_seconds_for_an_answer_and_the_relay_a_long_poll() -> None:
    """By default, boto waits five minutes for an SQS that hangs."""
    app = install(Celery(broker="sqs://", set_as_current=False))
    connection = bounded_connection(app)
    config = connection.transport_options["client-config"]
    assert (config["read_timeout"], config["retries"]) == (5, {"total_max_attempts": 2})
    relay._leave_room(connection, 1)
    config = connection.transport_options["client-config"]
    assert config["read_timeout"] > relay.LONG_POLL_SECONDS


# ---- hops ----------------------------------------------------------------------------------------


def test_a_delay_is_rounded_up_to_whole_seconds() -> None:
    assert [seconds_up(ms) for ms in (-5, 0, 1, 1000, 1001)] == [0, 0, 1, 1, 2]


delays_ms = st.integers(0, 10 * 365 * 86_400_000)


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
