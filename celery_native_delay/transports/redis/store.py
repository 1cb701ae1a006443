"""Store the waiting messages in one Redis database.

The scripts need a plain redis-py client, because kombu's client adds ``global_keyprefix`` only to
the first key of a script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ResponseError

from ...errors import BrokerFull, NotPermitted
from ...records.redis import RedisRecords
from ...records.redis_link import digest_of
from ...records.redis_listing import throw_away
from ...redis_server import RIGHTS, now_us
from ..watching import SHOWN_SECONDS
from .keys import RedisBrokerKeys
from .scripts import ADD, ALLOW_OOM, CENSUS, HAND_OVER, REMOVE, REPLACE

#: How many messages one script moves into their queues. More are hardly faster, and block other
#: clients of Redis for longer: 0.45 ms for 100, 4.7 ms for 1000.
BATCH = 100

#: Scripts may have flags since this version of Redis.
#: https://redis.io/docs/latest/develop/programmability/
_FLAGS_SINCE = (7,)


@dataclass(frozen=True)
class HandedOver:
    """The result of the Lua script that moves due messages to their queues."""

    taken: int  # messages that left the sorted set
    delivered: int
    parked: int  # messages that their queue rejected
    now_us: int  # by the server's clock
    next_us: int | None  # the next due time
    refusal: str  # the last error

    @property
    def wait_us(self) -> int | None:
        """Return the microseconds until the next due time, or None if no message waits."""
        return None if self.next_us is None else max(self.next_us - self.now_us, 0)


class RedisBrokerCensus(NamedTuple):
    """Counts of delayed messages in Redis at one moment; the fields are as in a store's census.

    *entries*: the number of all stored messages, waiting, rejected or lost.
    """

    waiting: int
    parked: int
    entries: int
    overdue: int
    until_first_us: int | None
    promoting: bool


class RedisBrokerStore:
    """The waiting messages of one ``native_delay_namespace`` in a Redis broker.

    Each message has a name (*member* of the sorted sets), and a content (*entry* of the hash).
    """

    def __init__(self, client: Any, keys: RedisBrokerKeys) -> None:
        """*client* is a plain ``redis.Redis`` that returns bytes."""
        self.client = client
        self.keys = keys
        self._scripts: dict[str, Any] = {}

    def run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a Lua script; raise BrokerFull or NotPermitted if Redis refuses."""
        if script not in self._scripts:
            self._scripts[script] = self.client.register_script(script)
        with refusals_explained(self.keys):
            return self._scripts[script](keys=keys, args=arguments)

    def ask(self, *command: Any) -> Any:
        with refusals_explained(self.keys):
            return self.client.execute_command(*command)

    # --- one message in ------------------------------------------------------------------

    def add(self, member: str, due_us: int, entry: bytes) -> None:
        """Store a delayed message; replace a waiting message with the same *member*."""
        self.run(ADD, self._add_keys, member, due_us, entry)

    def add_command(self, member: str, due_us: int, entry: bytes) -> tuple[str, list[Any]]:
        """Return the redis-py method and arguments that store a message in a pipeline."""
        # A pipeline cannot load a missing script, so the method is not ``evalsha``.
        return "eval", [ADD, len(self._add_keys), *self._add_keys, member, due_us, entry]

    @property
    def _add_keys(self) -> list[str]:
        return [self.keys.due, self.keys.messages, self.keys.wake, self.keys.ids]

    # --- one message changed -------------------------------------------------------------

    def replace(self, member: str, old: bytes, due_us: int | None, new: bytes) -> int | None:
        """Replace the content of a waiting message; return the new due time in microseconds.

        If *due_us* is None, the message is due now. If the content is no longer *old*, change
        nothing and return None.
        """
        keys = [self.keys.due, self.keys.messages, self.keys.wake, self.keys.parked]
        due = int(self.run(REPLACE, keys, member, old, "" if due_us is None else due_us, new))
        return None if due < 0 else due

    def remove(self, member: str, old: bytes) -> bool:
        """Remove a waiting message; return False if the message's content is no longer *old*."""
        keys = [self.keys.due, self.keys.messages, self.keys.ids, self.keys.parked]
        return bool(self.run(REMOVE, keys, member, old))

    # --- many out ------------------------------------------------------------------------

    def promote(self, *, version: tuple[int, ...]) -> HandedOver:
        """Move up to :data:`BATCH` due messages to their queues; *version* is the Redis version."""
        return self._hand_over(self.keys.due, "", version)

    def rescue(self, *, version: tuple[int, ...], before_us: int) -> HandedOver:
        """Retry up to :data:`BATCH` undeliverable messages that last failed before *before_us*."""
        return self._hand_over(self.keys.parked, f"({before_us}", version)

    def _hand_over(self, source: str, highest: str, version: tuple[int, ...]) -> HandedOver:
        keys = [source, self.keys.messages, self.keys.parked, self.keys.ids]
        return _handed_over(self.run(_hand_over_on(version), keys, BATCH, highest))

    # --- the heartbeat of a promoter --------------------------------------------------------

    def show_promoting(self) -> None:
        """Write the heartbeat that shows that this process moves due messages."""
        key = self.keys.promoting
        if not self.client.expire(key, SHOWN_SECONDS):
            self.client.set(key, "", ex=SHOWN_SECONDS)

    # --- looking -------------------------------------------------------------------------

    def now_us(self) -> int:
        return now_us(self.client)

    def census(self) -> RedisBrokerCensus:
        keys = [self.keys.due, self.keys.messages, self.keys.parked, self.keys.promoting]
        waiting, parked, entries, overdue, first, promoting = self.run(CENSUS, keys)
        until_first_us = first if isinstance(first, int) else None
        return RedisBrokerCensus(waiting, parked, entries, overdue, until_first_us, bool(promoting))

    def peek_parked(self, *, limit: int) -> list[bytes]:
        """Return up to *limit* due but undeliverable messages."""
        members = self.client.zrange(self.keys.parked, 0, limit - 1)
        entries = self.client.hmget(self.keys.messages, members) if members else []
        return [entry for entry in entries if entry is not None]

    # --- throwing away -------------------------------------------------------------------

    def purge(self, *, parked: bool) -> int:
        """Delete all undeliverable messages if *parked* is True, otherwise all waiting messages."""
        source = self.keys.parked if parked else self.keys.due
        return throw_away(self, [source, self.keys.messages, self.keys.ids], "-inf", "+inf")


class BrokerRecords(RedisRecords):
    """Stores task state, such as debounce keys, in the Redis broker."""

    needs_connection = True

    def __init__(self, store: RedisBrokerStore) -> None:
        super().__init__(store, store.keys, (store.keys.wake, store.keys.parked))


class Rounds:
    """Uses a Redis connection of its own to call the script that moves due messages."""

    def __init__(self, connection: Any, keys: RedisBrokerKeys, *, version: tuple[int, ...]) -> None:
        """*connection* is a redis-py connection; *version* is the server's version."""
        self._connection = connection
        self._keys = keys
        script = _hand_over_on(version)
        words = (4, keys.due, keys.messages, keys.parked, keys.ids, BATCH, "")
        self._evalsha = connection.pack_command("EVALSHA", digest_of(script), *words)
        self._eval = connection.pack_command("EVAL", script, *words)
        #: The monotonic times of the script calls that the server has not answered yet.
        self._asked: deque[float] = deque()
        self.last_asked_at = 0.0
        """The monotonic time at which the last answered script call was sent."""

    def connect(self) -> None:
        """Connect to Redis, or through Sentinel to the current master."""
        self._connection.connect()

    @property
    def asked_count(self) -> int:
        return len(self._asked)

    def ask(self) -> None:
        self._asked.append(monotonic())
        self._connection.send_packed_command(self._evalsha, check_health=False)

    def answer(self) -> HandedOver:
        """Wait for the result of the oldest unanswered script call, and return the result."""
        while True:
            try:
                with refusals_explained(self._keys):
                    reply = self._connection.read_response()
            except NoScriptError:
                # All calls are equal, so this call may come after the calls that are already sent.
                self._connection.send_packed_command(self._eval, check_health=False)
                continue
            self.last_asked_at = self._asked.popleft()
            return _handed_over(reply)

    def close(self) -> None:
        self._connection.disconnect()


def _hand_over_on(version: tuple[int, ...]) -> str:
    return (ALLOW_OOM if version >= _FLAGS_SINCE else "") + HAND_OVER


def _handed_over(reply: Any) -> HandedOver:
    taken, delivered, parked, now_us, next_us, refusal = reply
    told = refusal.decode("utf-8", "replace")
    return HandedOver(taken, delivered, parked, now_us, None if next_us < 0 else next_us, told)


@contextmanager
def refusals_explained(keys: RedisBrokerKeys) -> Iterator[None]:
    """In a ``with`` block, turn permission and memory errors into NotPermitted and BrokerFull."""
    try:
        yield
    except ResponseError as exc:
        # In a script such an error has no class of its own: texts of Redis 7.0 and of later ones.
        told = "The user executing the script", "ACL failure in script"
        if isinstance(exc, NoPermissionError) or str(exc).startswith(told):
            raise NotPermitted(
                f"{exc}. Delayed delivery needs +@all or at least {RIGHTS} +@blocking on "
                f"~{keys.space}.*: grant them with ACL SETUSER"
            ) from exc
        # Before Redis 7 a script's error has no class of its own.
        if isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in str(exc):
            raise BrokerFull(
                f"Redis has reached maxmemory and takes no more delayed messages; nothing was "
                f"sent, and waiting messages are still delivered: {exc}"
            ) from exc
        raise
