"""Sockets that a test leaves to the garbage collector, told in that test and with their origin.

Python warns of an unclosed socket when it is collected, which is during another test as a rule.
"""

from __future__ import annotations

import gc
import socket
import sys
import warnings
from typing import Any
from weakref import WeakKeyDictionary

_FRAMES = 20

_origins: WeakKeyDictionary[socket.socket, list[str]] = WeakKeyDictionary()

_initialize = socket.socket.__init__


def _remember(self: socket.socket, *args: Any, **kwargs: Any) -> None:
    _initialize(self, *args, **kwargs)
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < _FRAMES:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    _origins[self] = lines


def watch_sockets() -> None:
    """Remember each new socket of this process, and who made it."""
    socket.socket.__init__ = _remember  # type: ignore[method-assign]


def forget_sockets() -> None:
    """A test begins: what is open already is not its own."""
    _origins.clear()


def collect_sockets() -> list[str]:
    """Origins of the sockets opened since that were left to the garbage collector, by now closed.

    It runs only if any is open. Python's own warning would blame whatever test it runs in.
    """
    left = {id(each): lines for each, lines in list(_origins.items()) if each.fileno() != -1}
    if left:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        for each in list(_origins):
            left.pop(id(each), None)
    return ["\n  ".join(lines) for lines in left.values()]
