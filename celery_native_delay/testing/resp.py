"""One command to a Redis or Valkey, without a client library.

https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP 2)
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from .errors import BrokerFailed

Address = Path | int
"""A unix socket, or a port of 127.0.0.1."""


def ask(
    address: Address, *words: str | float, password: str | None = None, timeout_seconds: float = 60
) -> Any:
    """Send one command over a connection of its own; return the reply.

    Texts come as str, numbers as int, lists as list, "nothing there" as None.

    Raises BrokerFailed with the server's words when it refuses, OSError when it is not there.
    """
    commands: list[Sequence[str | float]] = [words]
    if password is not None:
        commands.insert(0, ("AUTH", password))
    if isinstance(address, Path):
        connection = socket.socket(socket.AF_UNIX)
    else:
        connection = socket.socket(socket.AF_INET)
    with connection:
        connection.settimeout(timeout_seconds)
        connection.connect(str(address) if isinstance(address, Path) else ("127.0.0.1", address))
        with connection.makefile("rb") as replies:
            reply = None
            for command in commands:
                connection.sendall(_encoded(command))
                reply = _decoded(replies)
                if isinstance(reply, BrokerFailed):
                    raise BrokerFailed(f"{command[0]}: {reply}")
            return reply


def _encoded(words: Sequence[str | float]) -> bytes:
    encoded = [str(word).encode() for word in words]
    return b"".join(
        [b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)]
    )


def _decoded(replies: IO[bytes]) -> Any:
    line = replies.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server closed the connection")
    kind, text = line[:1], line[1:-2].decode(errors="replace")
    match kind:
        case b"+":
            return text
        case b"-":
            return BrokerFailed(text)
        case b":":
            return int(text)
        case b"$":
            size = int(text)
            return None if size < 0 else replies.read(size + 2)[:-2].decode(errors="replace")
        case b"*":
            return None if text == "-1" else [_decoded(replies) for _ in range(int(text))]
    raise BrokerFailed(f"expected a RESP 2 reply, got {line!r}")
