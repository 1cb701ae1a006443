"""Ports of 127.0.0.1 that stay claimed while their server is down."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

_LOWEST = 20_000
_COUNT = 12_768
"""Up to 32767: Linux takes client ports from 32768 on, macOS from 49152.

A client that reconnects to a dead server could otherwise be given the very port it connects to.
"""


def claim_ports(count: int) -> list[socket.socket]:
    """Claim *count* free TCP ports; ``port_of`` tells their numbers, closing gives them back.

    A claim is the bound UDP port of the same number. It ends with this process, leaves the TCP
    port to the server, and all that claim ports, in this process or another, see it.
    """
    claims: list[socket.socket] = []
    while len(claims) < count:
        address = ("127.0.0.1", _LOWEST + secrets.randbelow(_COUNT))
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(address)
            claim.bind(address)
            claims.append(claim)
            continue
        claim.close()
    return claims


def port_of(claim: socket.socket) -> int:
    """The number of a claimed port."""
    port: int = claim.getsockname()[1]
    return port
