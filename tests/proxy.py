"""A proxy between a client and a server on this machine; it delays or swallows what it passes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

_CHUNK = 65_536


def connected(path: Path) -> socket.socket:
    """A connection to a server at a Unix socket."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


class Proxy:
    """Passes the bytes of each connection on; what it swallows never arrives.

    Args:
        listener: a listening socket for clients; the proxy closes it.
        connect: returns a connection to the server.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self.delay_seconds = 0.0
        """Seconds by which each chunk is late, in both directions."""
        self.swallows = False
        """True to lose all bytes, as a network does without a word to either side."""
        self._listener = listener
        self._connect = connect
        self._closed = Event()
        self._open: list[socket.socket] = []
        self._threads: list[Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Cut all connections."""
        self._closed.set()
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._open):
            each.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        thread = Thread(target=work, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:  # the server restarts
                    client.close()
                    continue
                self._open += client, server
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # one side was closed
            while chunk := source.recv(_CHUNK):
                if self.swallows:
                    continue
                self._closed.wait(self.delay_seconds)
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
