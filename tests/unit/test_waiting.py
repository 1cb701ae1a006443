"""What the tests themselves rely on."""

import socket

import pytest

from tests.waiting import wait_until


def test_wait_until_returns_the_first_value_that_counts() -> None:
    values = iter([None, False, 0])
    assert wait_until(lambda: next(values), timeout_seconds=5) == 0


def test_wait_until_names_what_was_not_seen() -> None:
    def queue_is_empty() -> bool:
        return False

    with pytest.raises(pytest.fail.Exception, match=r"queue_is_empty not seen within 0\.1 s"):
        wait_until(queue_is_empty, timeout_seconds=0.1)


def test_a_unit_test_cannot_open_a_connection() -> None:
    with pytest.raises(pytest.fail.Exception, match="must not use the network"):
        socket.create_connection(("127.0.0.1", 5672))
