"""Moving what waits from one place to another, one message at a time.

Rule: a message leaves its place only after the other place has it. A process that dies in between
leaves that one message in both, never in neither; the next run knows it where the place tells.

The record of a key goes with its message:

1. The message and the record are written in the other place, in one step.
2. The source's record lets go of the task.
3. The message is removed from the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from secrets import token_hex
from time import sleep
from typing import Any

from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.utils.limits import TokenBucket

from ..errors import CannotDelay, NativeDelayError, UnsupportedBroker
from ..keyed import rules
from ..keyed.publishing import AnotherStands, KeyedPublish
from ..keyed.record import HEADER, Mark, Record
from ..keyed.rules import Seen, Step
from ..records.waiting import PLACE
from ..settings import DelaySettings, is_store_url
from ..transports.aliases import OPTION, check_url, option_of
from ..transports.moving import Moving, MovingPart, Reach, Source, Stays, Void
from ..urls import without_password
from .installation import delaying_channel

_UNKNOWN = "nothing is named that records the keys (native_delay_records, --records)"

#: The record that tells whether two places are one is kept for so long, should it not be removed.
_PROBE_US = 60_000_000


class MovingKeys:
    """Keys and places of the messages of *source*, which are moved *into* another place."""

    def __init__(self, source: Source, into: MovingPart) -> None:
        self._into = into
        self._is_kept = source.keeps_keys
        self._from = None if self._is_kept else source.key_records()
        self._to = None if self._is_kept else into.key_records()
        self._is_probed = False

    @property
    def warning(self) -> str | None:
        """The warning about tasks under keys, before any is moved; None if they go along."""
        if self._is_kept:
            return None
        if self._from is None:
            return f"tasks under a key stay, if there are any: {_UNKNOWN}"
        if self._to is None:
            return f"tasks under a key become ordinary ones: {self._into.name} keeps no keys"
        return None

    def take_in(self, moving: Moving) -> bool:
        """:meth:`MovingPart.take_in`, with what is recorded of the message's key.

        Raises:
            NativeDelayError: it cannot be taken in, or its key does not let it; it was not sent.
        """
        mark = Mark.of(moving.headers)
        if mark is not None and not self._is_kept and not self._is_probed:
            self._probe()
        if self._is_kept:
            return self._into.take_in(moving)
        # A place counts in its own line. The task comes when it is its turn, and stands anew.
        moving = moving.without(PLACE)
        if mark is None or moving.task_id is None:
            return self._into.take_in(moving)
        if self._from is None:
            raise CannotDelay(f"its task is under a key: {_UNKNOWN}")
        seen = self._from.read(mark.name)
        if rules.runs(seen):
            raise CannotDelay("a task runs under its key: run this again when that is over")
        if self._to is None:
            is_once = self._into.take_in(moving.without(HEADER))
        else:
            is_once = self._carry(moving, moving.task_id, mark, seen.record)
        self._from.change(mark.name, partial(rules.let_go, task_id=moving.task_id))
        return is_once

    def _carry(self, moving: Moving, task_id: str, mark: Mark, known: Record | None) -> bool:
        stands = known is not None and known.id == task_id
        if moving.delayed.cancelled or not (stands or moving.again):
            return self._into.take_in(moving)
        rule = partial(
            rules.carry, task_id=task_id, known=known or Record(), due_us=moving.delayed.due_us
        )
        try:
            return self._into.take_in(moving, KeyedPublish(mark.name, rule, task_id))
        except AnotherStands as exc:
            raise CannotDelay(
                "another task waits for its key there: cancel one of the two, and run this again"
            ) from exc

    def _probe(self) -> None:
        """Find out whether both places have the same records, however they are named."""
        if self._from is not None and self._to is not None:
            token = token_hex(16)
            name = f"probe:{token}"
            self._from.change(name, partial(_set, record=Record(id=token)))
            self._is_kept = self._to.read(name).record is not None
            self._from.change(name, partial(_set, record=None))
        self._is_probed = True


def _set(seen: Seen, *, record: Record | None) -> Step:
    return Step(record, seen.now_us + _PROBE_US)


#: Schemes of stores that are named without the broker beside them.
_DATABASES = ("sqlite", "postgresql", "mysql", "mariadb", "oracle", "mssql")

#: Ids that are told, and different reasons; more of them are counted only.
_TOLD = 100
_REASONS = 20

# ---- the loop ----------------------------------------------------------------------------------


@dataclass
class Account:
    """The numbers of one source: *count* before, then what became of each message.

    *stays* are to stay, *refused* could not be moved, by reason; *void* were thrown away, being
    cancelled or moved before. *computed* had no ETA: their due time was computed, and may be late
    by *late_seconds*. Those *doubtful*, by id, may run twice.
    """

    source: str
    count: int
    moved: int = 0
    stays: int = 0
    void: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    late_seconds: float = 0.0
    doubtful_count: int = 0
    doubtful: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The numbers for ``--json``."""
        return asdict(self) | {"refused": dict(self.refused)}

    def refuse(self, why: str) -> None:
        """One more could not be moved."""
        self.refused[why if why in self.refused or len(self.refused) < _REASONS else "…"] += 1

    def doubt(self, task_id: str | None) -> None:
        """One more may run twice."""
        self.doubtful_count += 1
        if len(self.doubtful) < _TOLD:
            self.doubtful.append(str(task_id))


def move(
    source: Source,
    into: MovingPart,
    account: Account,
    pace: TokenBucket | None,
    stopped: Callable[[], object],
    on_each: Callable[[], object],
    on_doubt: Callable[[str | None], object],
) -> None:
    """Move what waits in *source*, as fast as *pace* lets, until it is through or *stopped*.

    *on_doubt* is told at once, by its task's id, of each message that may run twice.
    """
    keys = MovingKeys(source, into)
    with closing(source):
        for found in source.found():
            match found:
                case Stays(why, should):
                    if should:
                        account.refuse(why)
                    else:
                        account.stays += 1
                case Void():
                    source.done()
                    account.void += 1
                case Moving():
                    _move_one(source, keys, found, account, on_doubt)
                    while pace is not None and not pace.can_consume():
                        sleep(pace.expected_time())
            on_each()
            if stopped():
                return


def _move_one(
    source: Source,
    keys: MovingKeys,
    moving: Moving,
    account: Account,
    on_doubt: Callable[[str | None], object],
) -> None:
    try:
        is_once = keys.take_in(moving)
    except NativeDelayError as exc:
        account.refuse(str(exc))
        return
    if not is_once:
        # Before it is gone: killed in between, the next run tells it.
        on_doubt(moving.task_id)
    is_gone = source.done()
    if is_once and not is_gone:
        on_doubt(moving.task_id)
    account.moved += 1
    if not (is_once and is_gone):
        account.doubt(moving.task_id)
    if moving.late_seconds is not None:
        account.computed += 1
        account.late_seconds = max(account.late_seconds, moving.late_seconds)


# ---- places ------------------------------------------------------------------------------------


def reaches_of(app: Any) -> list[Reach]:
    """The bindings of the app's queues."""
    return [
        Reach(each.exchange.name, each.exchange.type, each.routing_key or "", queue.name)
        for queue in app.amqp.queues.values()
        for each in (queue.bindings or (queue,))
        if each.exchange is not None
    ]


@contextmanager
def moving(
    app: Any, connection: Any, names: Sequence[str], *, records: str | None
) -> Iterator[tuple[MovingPart, list[Source]]]:
    """The part to move into, on *connection*, and the places that *names* stand for.

    Args:
        records: URL of another broker's records; None for the app's own.

    Raises:
        UnsupportedBroker: nothing can be moved into this broker, or there is no such place.
    """
    channel, settings = delaying_channel(app, connection)
    part = _part_of(channel, settings, connection.as_uri())
    reaches = reaches_of(app)
    theirs = replace(settings, store=None, records=records or settings.records)
    with ExitStack() as stack:
        sources = []
        for name in dict.fromkeys(names):
            if "://" in name:
                other = stack.enter_context(_other_part(name, theirs, connection))
                found = other.sources(None, reaches)
            else:
                found = part.sources(name, reaches)
            sources += [stack.enter_context(closing(source)) for source in found]
        yield part, sources


@contextmanager
def _other_part(url: str, settings: DelaySettings, own: Any) -> Iterator[MovingPart]:
    """The part on another broker, or of a store that is named alone."""
    if url.partition("://")[0].partition("+")[0] in _DATABASES and is_store_url(url):
        url = f"sqla+{url}"
    check_url(url)
    shown = without_password(url)
    with Connection(url, transport_options={OPTION: option_of(settings)}) as connection:
        if (connection.hostname, connection.port) != (own.hostname, own.port):
            settings = replace(settings, management_url=None)
        if connection.as_uri() == own.as_uri():
            raise UnsupportedBroker(
                f"{shown} is the app's own broker: name celery, sets or a queue"
            )
        try:
            connection.ensure_connection(max_retries=1)
        except OperationalError as exc:
            raise UnsupportedBroker(f"{shown} cannot be used: {exc}") from exc
        try:
            yield _part_of(connection.default_channel, settings, shown)
        except (*connection.connection_errors, *connection.channel_errors) as exc:
            raise NativeDelayError(
                f"{shown}, or the app's own broker, was lost: {exc}; run this again for the rest"
            ) from exc


def _part_of(channel: Any, settings: DelaySettings, shown: str) -> MovingPart:
    if not hasattr(channel, "moving_part"):
        raise UnsupportedBroker(
            f"what waits can be moved to and from RabbitMQ, Redis and stores, not {shown}"
        )
    part: MovingPart = channel.moving_part(settings)
    return part
