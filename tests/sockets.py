"""Find sockets that a test left open, and the code that opened them.

Python warns of an unclosed socket when it collects it, usually during another test.
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
    """Remember each new socket of this process and the code that opened it."""
    socket.socket.__init__ = _remember  # type: ignore[method-assign]


def forget_sockets() -> None:
    """Forget the sockets that were open before the test."""
    _origins.clear()


def collect_sockets() -> list[str]:
    """The origins of sockets opened since then and left to the garbage collector; closes them.

    Collects garbage only if a socket is open. Python's own warning could appear in another test.
    """
    left = {id(each): lines for each, lines in list(_origins.items()) if each.fileno() != -1}
    if left:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        for each in list(_origins):
            left.pop(id(each), None)
    return ["\n  ".join(lines) for lines in left.values()]
