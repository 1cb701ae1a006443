"""Sleeping until a moment, or until somebody rings; also from a signal handler."""

from __future__ import annotations

import select
from contextlib import suppress
from socket import socketpair


class Alarm:
    """For one sleeper; anybody may ring."""

    def __init__(self) -> None:
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def ring(self) -> None:
        """Have the present :meth:`wait` return, or else the next one."""
        with suppress(OSError):  # full: it is awake already; closed: nobody sleeps any more
            self._writer.send(b"\0")

    def wait(self, seconds: float) -> None:
        """Sleep so long at most."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        # Rounded up: what is awake too early would have to sleep again.
        if poll.poll(-(-seconds * 1000 // 1) if seconds > 0 else 0):
            with suppress(OSError):
                self._reader.recv(4096)

    def close(self) -> None:
        """Free the sockets."""
        self._reader.close()
        self._writer.close()
