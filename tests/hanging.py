"""Servers that hang: they answer nothing, and their connections stay open."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.postgresql import PrivatePostgreSQL


@contextmanager
def hung(server: PrivateRedis | PrivatePostgreSQL | PrivateRabbitMQ) -> Iterator[None]:
    """Stop all processes of a server (SIGSTOP) in a ``with`` block."""
    # Each backend of PostgreSQL has a process group of its own.
    groups = server.processes() if isinstance(server, PrivatePostgreSQL) else [server.pid]
    for group in groups:
        assert group is not None, "the server does not run"
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)  # type: ignore[arg-type]
