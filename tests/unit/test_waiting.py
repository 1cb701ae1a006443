"""The helpers of the tests: waiting, watching sockets, and the ban of networks."""

import gc
import socket
from typing import Any

import pytest

from tests.sockets import collect_sockets, forget_sockets
from tests.waiting import wait_until


def test_wait_until_returns_the_first_value_that_is_neither_none_nor_false() -> None:
    values = iter([None, False, 0])
    assert wait_until(lambda: next(values), timeout_seconds=5) == 0


def test_wait_until_names_the_condition_that_was_not_seen() -> None:
    def queue_is_empty() -> bool:
        return False

    with pytest.raises(pytest.fail.Exception, match=r"queue_is_empty not seen within 0\.1 s"):
        wait_until(queue_is_empty, timeout_seconds=0.1)


def test_a_socket_left_to_the_garbage_collector_is_reported_with_its_origin() -> None:
    forget_sockets()
    gc.disable()  # it may come at any time, and would warn of the socket itself
    try:
        with socket.socket() as closed, socket.socket() as still_used:
            closed.close()
            cycle: list[Any] = [socket.socket()]
            cycle.append(cycle)
            del cycle
            (origin,) = collect_sockets()
            assert "test_waiting.py" in origin
            assert collect_sockets() == []
            assert still_used.fileno() != -1
    finally:
        gc.enable()


def test_a_unit_test_cannot_open_a_connection() -> None:
    with pytest.raises(pytest.fail.Exception, match="must not use the network"):
        socket.create_connection(("127.0.0.1", 5672))
