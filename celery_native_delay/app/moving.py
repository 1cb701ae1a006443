"""Moves waiting messages, one by one, to another broker or database, or back to plain Celery.

Steps for each message:

1. Write the message to the destination. If the task has a debounce, throttle or unique key, write
   the key's state to the destination, too.
2. Remove the task from the key's state at the source.
3. Delete the message at the source.

If the process dies between two steps, the source and the destination both have the message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from secrets import token_hex
from time import sleep
from typing import Any

from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.utils.limits import TokenBucket

from ..errors import (
    CannotDelay,
    DelayTooLong,
    NativeDelayError,
    NoStore,
    SettingsError,
    UnsupportedBroker,
)
from ..keyed import rules
from ..keyed.record import HEADER, Mark, Record
from ..keyed.records import publish_under
from ..keyed.rules import Step
from ..records.cancelled import was_cancelled
from ..records.interface import Records
from ..records.publishing import NotPublished
from ..records.waiting import HELD, PLACE
from ..schedules.state import occurrence_of
from ..settings import DRAIN, DelaySettings, is_store_url
from ..store.interface import Store
from ..store.opened import store_of
from ..transports.aliases import OPTION, option_of, url_errors_explained
from ..transports.moving import HELD_STAYS, Found, Moving, MovingPart, Source, Stays, Void
from ..transports.virtual.moving import StoreSource
from ..urls import is_redis_url, without_password
from .installation import delaying_channel
from .schedules import Schedules

#: The name of the app's own store, for tasks of other virtual hosts.
_STORE = "store"

_UNKNOWN = "the state of their keys is not known here"

#: TTL, in microseconds, of the test key that shows if source and destination share stored state.
_PROBE_US = 60_000_000


class MovingKeys:
    """Moves each message together with the state of its debounce, throttle or unique key."""

    def __init__(self, source: Source, into: MovingPart) -> None:
        self._into = into
        self._is_kept = source.keeps_keys
        self._from = None if self._is_kept else source.key_records()
        self._to = None if self._is_kept else into.key_records()
        self._is_probed = False

    @property
    def warning(self) -> str | None:
        """A warning if debounced, throttled or unique tasks cannot move, or lose their key."""
        if self._is_kept:
            return None
        if self._from is None:
            return f"tasks with a key stay, if there are any: {_UNKNOWN}"
        if self._to is None:
            return f"tasks lose their key: {self._into.name} keeps no keys"
        return None

    def take_in(self, moving: Moving) -> bool:
        """Publish a message at the destination; return False if two copies may be there.

        After an interrupted move, the destination may already have the message.
        """
        mark = Mark.of(moving.headers)
        if mark is not None and not self._is_kept and not self._is_probed:
            self._probe()
        if self._is_kept:
            return self._into.take_in(moving)
        # A place in a rate line is valid at the source only. A due task gets a new place.
        moving = moving.without(PLACE)
        if mark is None or moving.task_id is None:
            return self._into.take_in(moving)
        if self._from is None:
            raise CannotDelay(f"its task has a key: {_UNKNOWN}")
        seen = self._from.read(mark.name)
        if rules.runs(seen):
            raise CannotDelay("a task with its key is running: run this again when it has ended")
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
        publish = publish_under(mark.name, rule, task_id)
        try:
            return self._into.take_in(moving, publish)
        except NotPublished as exc:
            if publish.answer[1].stands == task_id:
                return True  # an earlier attempt has published it
            raise CannotDelay(
                "another task with its key waits there: cancel one of them, and run this again"
            ) from exc

    def _probe(self) -> None:
        """Write a test key to find out if source and destination share stored state."""
        if self._from is not None and self._to is not None:
            token = token_hex(16)
            name = f"probe:{token}"
            self._from.change(name, lambda seen: Step(Record(id=token), seen.now_us + _PROBE_US))
            self._is_kept = self._to.read(name).record is not None
            self._from.change(name, lambda seen: Step(None, seen.now_us))
        self._is_probed = True


#: The largest number of different reasons in an :class:`Account`. Further reasons count under "…".
_REASONS = 20

# ---- the loop ----------------------------------------------------------------------------------


@dataclass
class Account:
    """Counts the messages of one source that were moved, left or deleted.

    - *count*: the number of messages at the source before the move.
    - *moved*: messages that the destination stored.
    - *stays*: messages left at the source because they are due within 5 s.
    - *refused*: messages that could not be moved, by reason.
    - *doubtful*: the ids of tasks that may run twice.
    """

    source: str
    count: int
    moved: int = 0
    stays: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    doubtful: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"refused": dict(self.refused)}

    def refuse(self, why: str) -> None:
        self.refused[why if why in self.refused or len(self.refused) < _REASONS else "…"] += 1


def move(
    source: Source,
    into: MovingPart,
    account: Account,
    pace: TokenBucket | None,
    stopped: Callable[[], object],
    on_each: Callable[[], object],
    on_doubt: Callable[[str | None], object],
) -> None:
    """Move all messages of *source*, until *stopped* returns true.

    *pace* limits the number of messages per second; None means no limit. *on_each* is called after
    each message. *on_doubt* is called with the id of each task that may run twice.
    """
    keys = MovingKeys(source, into)
    with closing(source):
        for found in source.found():
            match found:
                case Stays(why, is_error):
                    if is_error:
                        account.refuse(why)
                    else:
                        account.stays += 1
                case Void():
                    source.done()
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
        is_held = isinstance(exc, DelayTooLong) and HELD in moving.headers
        account.refuse(HELD_STAYS if is_held else str(exc))
        return
    if not is_once:
        # Report this before the deletion: if the process dies in between, the next run reports it.
        on_doubt(moving.task_id)
    is_gone = source.done()
    if is_once and not is_gone:
        on_doubt(moving.task_id)
    account.moved += 1
    if not (is_once and is_gone):
        account.doubtful.append(str(moving.task_id))


# ---- places ------------------------------------------------------------------------------------


@contextmanager
def moving(
    app: Any, connection: Any, names: Sequence[str], vhost: str | None = None
) -> Iterator[tuple[MovingPart, list[Source]]]:
    """Yield the destination (the app's broker) and the sources, for a ``with`` block.

    Each name in *names* is the URL of another broker or of a store, or a name that
    ``delay migrate --from`` accepts, such as ``broker``. *vhost* is the virtual host whose tasks
    are taken out of a store; by default that of the app's broker.

    Raises:
        UnsupportedBroker: messages cannot be moved to this broker, or a source does not exist.
    """
    channel, settings = delaying_channel(app, connection)
    part = _part_of(channel, settings, connection.as_uri())
    theirs = replace(settings, store=None, store_tasks=("*",))
    with ExitStack() as stack:
        sources = []
        for name in dict.fromkeys(names):
            if name == _STORE or is_store_url(name):
                found, reason = _stored(name, channel, settings, vhost)
                if not found and is_redis_url(name):  # a Redis may also be another broker
                    other = stack.enter_context(_other_part(name, theirs, connection))
                    found = other.sources(None)
                if reason and not any(source.count() for source in found):
                    raise UnsupportedBroker(reason)
            elif "://" in name:
                other = stack.enter_context(_other_part(name, theirs, connection))
                found = other.sources(None)
            else:
                found = part.sources(name)
            sources += [stack.enter_context(closing(source)) for source in found]
        yield part, sources


def _stored(
    name: str, channel: Any, settings: DelaySettings, vhost: str | None
) -> tuple[list[Source], str]:
    """Return the tasks that wait in a store, and an error's text if all are another app's."""
    own, place = channel.store, channel.delays.place
    if name == _STORE:
        here = channel.needed_store
    else:
        here = store_of(replace(settings, store=name), place)
    others = [each for each in (here, *here.others()) if not _is_same(each, own)]
    full = {each.place: _source_of(each) for each in others if each.census().waiting}
    # A broker that cannot delay has no place in its store.
    wanted = (place, "") if vhost is None else (vhost,)
    found: list[Source] = [full[each] for each in wanted if each in full]
    reason = ""
    if full and not found:
        told = ", ".join(f"{source.count()} of {each!r}" for each, source in full.items())
        reason = f"expected --vhost: {here.where} holds tasks of other virtual hosts only: {told}"
    elif not found and vhost is None and _is_same(here, own):
        reason = f"{here.where} is the app's own store: use --from broker"
    return found, reason


def _source_of(store: Store) -> StoreSource:
    store.release()  # rows of a dispatcher that died
    return StoreSource(store)


def _is_same(one: Store, other: Store | None) -> bool:
    return other is not None and (one.where, one.namespace) == (other.where, other.namespace)


@contextmanager
def _other_part(url: str, settings: DelaySettings, own: Any) -> Iterator[MovingPart]:
    """Connect to another broker."""
    shown = without_password(url)
    with url_errors_explained():
        other = Connection(url)
    # The URL of a Redis does not tell how the names of its lists are built (``global_keyprefix``,
    # ``sep``, ``priority_steps``). SQLAlchemy refuses the options of other brokers.
    if other.transport.driver_type in ("redis", own.transport.driver_type):
        other.transport_options = dict(own.transport_options)
    other.transport_options[OPTION] = option_of(settings)
    with other as connection:
        if (connection.hostname, connection.port) != (own.hostname, own.port):
            settings = replace(settings, management_url=None)
        if connection.as_uri() == own.as_uri():
            raise UnsupportedBroker(f"{shown} is the app's own broker: use --from namespace:NAME")
        try:
            connection.ensure_connection(max_retries=1)
        except OperationalError as exc:
            raise UnsupportedBroker(f"cannot use {shown}: {exc}") from exc
        try:
            yield _part_of(connection.default_channel, settings, shown)
        except (*connection.connection_errors, *connection.channel_errors) as exc:
            raise NativeDelayError(
                f"lost the connection to {shown} or to the app's own broker: {exc}; run this again "
                f"for the rest"
            ) from exc


def _part_of(channel: Any, settings: DelaySettings, shown: str) -> MovingPart:
    if not hasattr(channel, "moving_part"):
        raise UnsupportedBroker(
            f"expected RabbitMQ, Redis or a store to move messages from or to, got {shown}"
        )
    part: MovingPart = channel.moving_part(settings)
    return part


# ---- back to plain Celery ----------------------------------------------------------------------


class Leaving(Source):
    """Waiting tasks of a draining app: as plain ETA tasks, or refused if *moves* is False."""

    #: A plain task has no key.
    keeps_keys = True

    def __init__(self, source: Source, state: Records | None, *, moves: bool) -> None:
        self._source = source
        self._state = state
        self._moves = moves
        self.name = source.name

    def count(self) -> int:
        return self._source.count()

    def found(self) -> Iterator[Found]:
        """Yield the tasks; cancelled tasks and occurrences of schedule entries are void."""
        for found in self._source.found():
            match found:
                case Moving() if self._is_cancelled(found):
                    yield Void()
                case Moving() if occurrence_of(found.headers) is not None:
                    yield Void()  # celery beat sends it
                case Moving() if not self._moves:
                    yield Stays("it waits: let workers run until it is due, or use --move-to-eta")
                case _:
                    yield found

    def _is_cancelled(self, moving: Moving) -> bool:
        if moving.delayed.cancelled or self._state is None or moving.task_id is None:
            return moving.delayed.cancelled
        return was_cancelled(self._state, moving.task_id)

    def done(self) -> bool:
        return self._source.done()

    def close(self) -> None:
        self._source.close()


def leaving(
    app: Any, connection: Any, *, moves: bool
) -> tuple[MovingPart | None, Sequence[Source]]:
    """Remove the schedule entries; return what moves the waiting tasks, and the waiting tasks.

    The result is (None, ()) if messages of this broker cannot be moved: SQS, pgmq without a store.

    Raises:
        SettingsError: the app does not drain, so that new tasks would wait.
    """
    channel, settings = delaying_channel(app, connection)
    if not settings.drains:
        raise SettingsError(
            f'expected native_delay_enabled = "{DRAIN}", got {settings.enabled!r}: set it in '
            f"workers and producers, and deploy them, so that no new task waits"
        )
    with suppress(NoStore):
        Schedules(app).remove_all()
    if not hasattr(channel, "moving_part"):
        return None, ()
    part: MovingPart = channel.moving_part(settings)
    sources: list[Source] = [] if channel.store is None else [_source_of(channel.store)]
    with suppress(UnsupportedBroker):
        sources += part.own_sources()
    state = channel.state_of_revoked()
    found = [Leaving(source, state, moves=moves) for source in sources]
    return (part, found) if found else (None, ())
