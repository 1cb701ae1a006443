"""Ids by the hundred are as random, and as valid, as one by one."""

from __future__ import annotations

from uuid import RFC_4122, UUID

from celery_native_delay.transports.bulk_publisher import RandomIds


def test_uuids_are_valid_and_differ() -> None:
    ids = RandomIds()
    made = [ids.uuid() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    for text in made:
        uuid = UUID(text)
        assert (str(uuid), uuid.version, uuid.variant) == (text, 4, RFC_4122)


def test_plain_ids_are_128_bits() -> None:
    ids = RandomIds()
    made = [ids.hex() for _ in range(1_000)]
    assert len(set(made)) == 1_000
    assert all(0 <= int(text, 16) < 2**128 and len(text) == 32 for text in made)
