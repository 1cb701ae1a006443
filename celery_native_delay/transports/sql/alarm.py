"""Sleeping until a moment, or until an alarm rings; also from a signal handler."""

from __future__ import annotations

import selectors
from contextlib import suppress
from socket import socketpair


class Alarm:
    """An alarm for one sleeping thread; any thread may ring."""

    def __init__(self) -> None:
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)

    def ring(self) -> None:
        """End the present :meth:`wait`, or else the next one."""
        with suppress(OSError):  # full: it is awake already; closed: it sleeps no more
            self._writer.send(b"\0")

    def wait(self, seconds: float) -> None:
        if self._selector.select(max(seconds, 0)):
            with suppress(OSError):
                self._reader.recv(4096)

    def close(self) -> None:
        self._selector.close()
        self._reader.close()
        self._writer.close()
