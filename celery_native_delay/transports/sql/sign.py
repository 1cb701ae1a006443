"""The sign that something dispatches from a store: a row whose time is renewed.

It stands in the table of the numbered batches, whose rows are removed a day after the last change.
"""

from __future__ import annotations

from hashlib import blake2b
from time import time_ns

from sqlalchemy import Connection, bindparam, insert, select, update

from ..virtual.watching import SHOWN_SECONDS
from .schema import OUTBOXES

_THIS = OUTBOXES.c.name == bindparam("this")
_RENEW = update(OUTBOXES).where(_THIS).values(used_us=bindparam("now"))
_FIND = select(OUTBOXES.c.used_us).where(_THIS)


def show(connection: Connection, namespace: str) -> None:
    """Let others know for :data:`SHOWN_SECONDS` that there is a dispatcher."""
    name, now_us = _name_of(namespace), time_ns() // 1000
    if not connection.execute(_RENEW, {"this": name, "now": now_us}).rowcount:
        row = {"name": name, "number": 0, "used_us": now_us}
        connection.execute(insert(OUTBOXES).values(row))


def is_shown(connection: Connection, namespace: str) -> bool:
    """True if a dispatcher has shown itself lately."""
    shown_us = connection.execute(_FIND, {"this": _name_of(namespace)}).scalar()
    return (
        shown_us is not None and abs(time_ns() // 1000 - int(shown_us)) < SHOWN_SECONDS * 1_000_000
    )


def _name_of(namespace: str) -> str:
    # The name of a row has 32 characters, a namespace may have 64.
    return "dispatching." + blake2b(namespace.encode(), digest_size=9).hexdigest()
