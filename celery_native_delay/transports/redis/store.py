"""Messages that wait in one Redis database: add, promote, rescue, look, throw away.

A thin layer over the scripts, on a plain client: kombu's own adds ``global_keyprefix`` to some
commands and to the first key of a script, and to none of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from ...core.errors import BrokerFull, NotPermitted
from .keys import Keys
from .scripts import ADD, ALLOW_OOM, CENSUS, DISCARD, MOVE_ON

#: Messages that one script promotes. More are hardly faster and keep Redis from everybody else
#: for longer: 0.45 ms for 100, 4.7 ms for 1000.
BATCH = 100

#: Scripts know their flags from here on. https://redis.io/docs/latest/develop/programmability/
_FLAGS_SINCE = (7,)


@dataclass(frozen=True)
class Moved:
    """What one script run did, as numbers of messages.

    *taken* left the sorted set: *delivered*, *parked* with *refusal* as Redis' last word, or they
    had lost their entry. *wait_us* are microseconds until the next one, None if there is none.
    """

    taken: int
    delivered: int
    parked: int
    wait_us: int | None
    refusal: str


@dataclass(frozen=True)
class Census:
    """How much there is, at one instant. *overdue_ms* belongs to the longest overdue message."""

    waiting: int
    parked: int
    entries: int
    overdue: int
    overdue_ms: int
    next_due_ms: int | None
    """Milliseconds until the next message is due; None if none waits."""


class Store:
    """The waiting messages under *keys*, through *client*."""

    def __init__(self, client: Any, keys: Keys) -> None:
        """*client* is a plain redis.Redis that returns bytes."""
        self.client = client
        self.keys = keys
        self._add = client.register_script(ADD)
        self._move_on = {
            flagged: client.register_script((ALLOW_OOM if flagged else "") + MOVE_ON)
            for flagged in (True, False)
        }
        self._census = client.register_script(CENSUS)
        self._discard = client.register_script(DISCARD)

    # --- one message in ------------------------------------------------------------------

    def add(self, member: str, due_ms: int, entry: bytes) -> None:
        """Store *entry* until *due_ms*, milliseconds since the epoch. Again is the same as once.

        Raises:
            BrokerFull: ``maxmemory`` is reached; nothing was stored.
            NotPermitted: the Redis user may not.
        """
        with refusals_explained(self.keys):
            self._add(keys=self._add_keys, args=[member, due_ms, entry])

    def add_command(self, member: str, due_ms: int, entry: bytes) -> tuple[str, list[Any]]:
        """:meth:`add` as the name and arguments of a pipeline's method.

        ``eval``, because a pipeline cannot answer an unknown script with loading it.
        """
        return "eval", [ADD, len(self._add_keys), *self._add_keys, member, due_ms, entry]

    @property
    def _add_keys(self) -> list[str]:
        return [self.keys.due, self.keys.messages, self.keys.wake]

    # --- many out ------------------------------------------------------------------------

    def promote(self, *, version: tuple[int, ...], limit: int = BATCH) -> Moved:
        """Hand over what is due by the server's clock, at most *limit* messages."""
        return self._move(self.keys.due, "", version, limit)

    def rescue(self, *, version: tuple[int, ...], before_ms: int, limit: int = BATCH) -> Moved:
        """Try parked messages again, at most *limit* of those parked before *before_ms*.

        What is refused again is parked with the present time, so it is not met twice in a round.
        """
        return self._move(self.keys.parked, f"({before_ms}", version, limit)

    def _move(self, source: str, highest: str, version: tuple[int, ...], limit: int) -> Moved:
        script = self._move_on[version >= _FLAGS_SINCE]
        keys = [source, self.keys.messages, self.keys.parked]
        with refusals_explained(self.keys):
            taken, delivered, parked, wait_us, refusal = script(keys=keys, args=[limit, highest])
        return Moved(
            taken,
            delivered,
            parked,
            None if wait_us < 0 else wait_us,
            refusal.decode("utf-8", "replace"),
        )

    # --- looking -------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Milliseconds since the epoch by the server's clock."""
        seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def census(self) -> Census:
        """Count what waits and what is parked."""
        keys = [self.keys.due, self.keys.messages, self.keys.parked]
        with refusals_explained(self.keys):
            waiting, parked, entries, overdue, first = self._census(keys=keys)
        wait_ms = first if isinstance(first, int) else None
        return Census(
            waiting,
            parked,
            entries,
            overdue,
            overdue_ms=max(0, -(wait_ms or 0)),
            next_due_ms=None if wait_ms is None else max(0, wait_ms),
        )

    def peek_parked(self, *, limit: int) -> list[bytes]:
        """Entries of the first *limit* parked messages; they stay."""
        members = self.client.zrange(self.keys.parked, 0, limit - 1)
        entries = self.client.hmget(self.keys.messages, members) if members else []
        return [entry for entry in entries if entry is not None]

    def kinds(self) -> dict[str, str]:
        """Key → its Redis type, of those that exist."""
        names = [self.keys.due, self.keys.messages, self.keys.wake, self.keys.parked]
        kinds = {name: self.client.type(name).decode() for name in names}
        return {name: kind for name, kind in kinds.items() if kind != "none"}

    # --- throwing away -------------------------------------------------------------------

    def purge(self) -> int:
        """Throw away all that waits; how many."""
        return self._discard_all(self.keys.due)

    def purge_parked(self) -> int:
        """Throw away all that is parked; how many."""
        return self._discard_all(self.keys.parked)

    def _discard_all(self, source: str) -> int:
        thrown = 0
        while True:
            with refusals_explained(self.keys):
                taken = int(self._discard(keys=[source, self.keys.messages], args=[1000]))
            thrown += taken
            if taken < 1000:
                return thrown


@contextmanager
def refusals_explained(keys: Keys) -> Iterator[None]:
    """Turn Redis' refusals into our errors, with the way out."""
    try:
        yield
    except NoPermissionError as exc:
        raise NotPermitted(
            f"{exc}. Delayed delivery needs +@all or at least +@read +@write +@scripting "
            f"+@blocking +info on ~{keys.space}.*: grant them with ACL SETUSER"
        ) from exc
    except ResponseError as exc:
        # Before Redis 7 a script's error has no class of its own.
        if isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in str(exc):
            raise BrokerFull(
                f"Redis has reached maxmemory and takes no more delayed messages; nothing was "
                f"sent, what waits is still delivered: {exc}"
            ) from exc
        raise
