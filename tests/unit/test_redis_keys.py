"""Names in Redis: under the prefix, one namespace each, one member per message and destination."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.transports.redis.keys import Keys, member_of


def message(tag: str = "tag-1", **headers: Any) -> dict[str, Any]:
    return {"headers": headers, "properties": {"delivery_tag": tag}}


def test_the_names_of_version_2_are_frozen() -> None:
    """Messages in production wait under them; to change them, add a version."""
    keys = Keys("shop:", "celery_delay")
    assert [keys.due, keys.messages, keys.wake, keys.parked, keys.ids] == [
        "shop:celery_delay.v2.due",
        "shop:celery_delay.v2.messages",
        "shop:celery_delay.v2.wake",
        "shop:celery_delay.v2.parked",
        "shop:celery_delay.v2.ids",
    ]
    assert member_of(message(id="task-1"), "celery") == "task-1:u2yCm81Mnozy"


def test_a_hash_tag_in_the_prefix_comes_first() -> None:
    """Then all keys share the slot of the queues."""
    assert Keys("{queue}:", "d").due.startswith("{queue}:")


def test_retries_and_copies_of_one_task_are_told_apart() -> None:
    members = {
        member_of(message(tag, id="task-1"), queue) for tag in ("1", "2") for queue in ("a", "b")
    }
    assert len(members) == 4
    assert all(member.startswith("task-1:") for member in members)


def test_the_same_message_has_the_same_member_again() -> None:
    assert member_of(message(id="1"), "a") == member_of(message(id="1"), "a")


def test_a_message_without_task_id_goes_by_what_it_has() -> None:
    named = message() | {"properties": {"delivery_tag": "tag-1", "correlation_id": "c-1"}}
    assert member_of(named, "a").startswith("c-1:")
    assert member_of(message(), "a").startswith("tag-1:")
    assert member_of({"properties": {"delivery_tag": "t"}, "headers": None}, "a").startswith("t:")


@given(st.uuids(), st.uuids(), st.text())
def test_a_member_with_a_uuid_stays_in_its_memory_class(task: Any, tag: Any, queue: str) -> None:
    assert len(member_of(message(str(tag), id=str(task)), queue)) <= 52
