"""A connection of our own to the user's broker: made and given up."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from amqp.exceptions import AMQPError
from kombu import Connection

#: py-amqp raises AttributeError where a connection went away under it.
LOST = (AMQPError, OSError, AttributeError)


def connection_like(client: Any) -> Connection:
    """A kombu connection to the same broker as *client*, another one, which is not touched.

    Without heartbeats, which no thread would send; TCP_USER_TIMEOUT finds out about a dead peer.
    """
    return Connection(**dict(client._info(resolve=False), heartbeat=0))


def hang_up(client: Any) -> None:
    """Close a kombu connection, whatever state it is in; it can connect again."""
    connection = client._connection
    if connection is not None:
        with suppress(*LOST):
            connection.collect()
    with suppress(*LOST):
        client.close()
