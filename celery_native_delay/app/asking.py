"""Questions to a broker on a channel of an app's own pool, asked once more if it was stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kombu.exceptions import OperationalError

from .broker import name_broker

T = TypeVar("T")


def ask_on_a_connection(app: Any, question: Callable[[Any], T]) -> T:
    """The answer to *question*, which is asked on a connection.

    Errors of kombu if the broker is not there.
    """
    try:
        with app.connection_or_acquire() as connection:
            for last_try in (False, True):
                try:
                    connection.ensure_connection(max_retries=1)
                    return question(connection)
                except connection.recoverable_connection_errors as exc:
                    # A pooled connection whose broker was restarted knows when it is used.
                    if last_try:
                        raise OperationalError(str(exc)) from exc
                    connection.collect()
    except OperationalError as exc:
        name_broker(exc, app)
        raise
    raise AssertionError("unreachable")
