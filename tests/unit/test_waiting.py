"""The helpers of the tests: waiting, watching sockets, and the ban of networks."""

import gc
import socket
from typing import Any

import pytest

from tests.sockets import collect_sockets, forget_sockets


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
