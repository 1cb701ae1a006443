"""Lets tasks wait in ``native_delay_store`` beside any broker.

A task waits in one place: in the store, if there is one and ``native_delay_store_tasks`` names the
task, or if the task has a key, a rate or a schedule; else in the broker.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from shlex import quote
from threading import Thread
from typing import Any, TypeVar

from kombu import Connection
from kombu.exceptions import OperationalError

from ..due_time import check_due
from ..errors import SettingsError, StoreUnavailable, UnsupportedBroker
from ..finding import ADVICE, WRONG, Finding
from ..keyed.records import keep_key
from ..message import Delayed
from ..now import time_ns
from ..per_process import PerProcess
from ..rates.in_records import RecordedLines
from ..records.cancelled import note_cancelled
from ..records.interface import Records
from ..records.publishing import RecordedPublish
from ..records.waiting import HELD, WaitingTasks
from ..settings import DelaySettings
from ..store.dispatcher import Dispatcher, Publisher, TransactionRelay
from ..store.entry import StoreEntry
from ..store.interface import ParkedRow, Row, Store
from ..within import Within
from .aliases import limited
from .interface import (
    AdminPart,
    Backlog,
    ParkedTask,
    Promoter,
    Rescue,
    Told,
    Wait,
    WorkerPart,
    without_store,
)
from .status import Status, refuse_waiting, warn_if_nothing_promotes

T = TypeVar("T")

#: Calls of the store in a worker's consumer, and in its thread that puts tasks back.
_in_consumer = Within(0.3, name="native-delay-store")
_beside_consumer = Within(2.0, name="native-delay-store")

#: Seconds that a dispatcher waits for the confirms of a batch. Its lease on the batch is longer.
PUBLISH_SECONDS = 20.0

#: Seconds that the process of the user's transaction waits for them.
CONFIRM_SECONDS = 5.0


class StoringChannel:
    """A channel mixin: tasks wait in the store, if there is one."""

    connection: Any
    delays: Any

    @property
    def keeps_all_in_store(self) -> bool:
        """True if no task waits in the broker."""
        return bool(self.delays.settings.is_all_in_store)

    @property
    def store(self) -> Store | None:
        """The store beside this broker, or None if tasks wait in the broker."""
        store: Store | None = self.delays.store
        return store

    @property
    def needed_store(self) -> Store:
        """The store; raises NoStore if there is none."""
        if self.store is None:
            raise without_store(self)
        return self.store

    def records(self, settings: DelaySettings) -> Records:
        """Return the state of keys, rates and schedules; raise NoStore without a store."""
        return self.needed_store.state

    def waiting_tasks(self, settings: DelaySettings) -> WaitingTasks:
        """Return the tasks that wait in the store; raise NoStore without a store."""
        found = self.needed_store.tasks(self.delays)
        if not self.keeps_all_in_store:
            found.note_elsewhere = self._note_cancelled
        return found

    def state_of_revoked(self) -> Records | None:
        """Return the state that knows cancelled tasks whose messages wait in the broker."""
        return None if self.store is None else self.store.state

    def _note_cancelled(self, task_id: str) -> None:
        """Let workers announce a task as revoked when its message comes from the broker."""
        longest_us = round(self.delays.settings.longest_delay_seconds * 1_000_000)
        note_cancelled(self.needed_store.state, task_id, kept_us=longest_us)

    def lines(self, settings: DelaySettings) -> RecordedLines:
        """Return the lines of rate-limited tasks; raise NoStore without a store."""
        return self.needed_store.lines()

    # --- publishing ------------------------------------------------------------------------

    def due_in_store(self, headers: Mapping[str, Any] | None, due_us: int | None) -> int | None:
        """Return when the store publishes a message, in µs; None if it goes to the broker.

        *due_us*: the ETA of the message, or None without one. In the user's transaction, an
        immediate task goes into the store, too. In a draining app, all tasks are immediate.
        """
        now_us = time_ns() // 1000
        if due_us is not None and due_us > now_us and not self.delays.settings.drains:
            return due_us if self.waits_in_store(headers) else None
        return now_us if self.joins(headers) else None

    def waits_in_store(self, headers: Mapping[str, Any] | None) -> bool:
        """Return True if a message with these headers waits in the store, if it is delayed."""
        return self.joins(headers) or (
            not self.delays.settings.drains and self.returns_to_store(headers)
        )

    def joins(self, headers: Mapping[str, Any] | None) -> bool:
        """Return True if a task is sent with the user's open transaction."""
        settings = self.delays.settings
        if settings.store is None:
            return False
        if not headers or "task" not in headers:  # Celery's events and commands
            return False
        try:
            store = self.needed_store
        except (UnsupportedBroker, SettingsError):  # as without it, immediate tasks are sent
            return False
        return store.users() is not None

    def let_join(self, headers: Mapping[str, Any] | None) -> bool:
        """Let the user's open transaction publish this immediate task after its commit.

        Returns False if the task is sent outside of a transaction.
        """
        users = self.needed_store.users() if self.joins(headers) else None
        if users is None:
            return False
        store, client = self.needed_store, self.connection.client
        users.relay = _relays.get(
            (store.where, store.namespace),
            lambda: TransactionRelay(
                store, lambda: self.publisher_of(_copy_of(client), CONFIRM_SECONDS)
            ),
        )
        return True

    def returns_to_store(self, headers: Mapping[str, Any] | None) -> bool:
        """Return True if a message that a worker puts back waits in the store."""
        settings: DelaySettings = self.delays.settings
        task = str((headers or {}).get("task") or "")
        return self.store is not None and settings.waits_in_store(task)

    def store_one(self, entry: StoreEntry) -> None:
        """Write the message of a delayed task into the store."""
        if HELD not in entry.headers:
            self.check_reach(entry.due_us)
        self.let_join(entry.headers)
        self.needed_store.add([Row.of(entry)])
        self._watch()

    def _watch(self) -> None:
        """Log a warning if tasks are overdue and no process dispatches them."""
        store = self.needed_store
        if store.users() is not None:  # a failing count would break the user's transaction
            return
        warn_if_nothing_promotes(store.where, lambda: Status.of(store.where, store.census()))

    def store_keyed(self, keyed: RecordedPublish, entry: StoreEntry) -> None:
        """Change the state of a key or schedule entry, and write its task, in one step."""

        def row(due_us: int, delivery_id: str, clock_ahead_us: int) -> Row:
            if HELD not in entry.headers:
                self.check_reach(due_us, ahead_us=clock_ahead_us)
            return Row.of(keyed.collected(entry.due_at(due_us)))

        self.let_join(entry.headers)
        keyed.settle(self.needed_store.state, row, StoreEntry.decoded)
        self._watch()

    def check_reach(self, due_us: int, *, ahead_us: int = 0) -> None:
        """Raise DelayTooLong for a due time too far away.

        This machine's clock is *ahead_us* microseconds ahead of the clock that set the due time.
        """
        check_due(
            due_us,
            now_us=time_ns() // 1000 - ahead_us,
            longest_delay_seconds=self.delays.settings.longest_delay_seconds,
        )

    # --- parts -----------------------------------------------------------------------------

    @abstractmethod
    def own_worker_part(self, settings: DelaySettings) -> WorkerPart:
        """Return what a worker needs for tasks that wait in this broker."""

    @abstractmethod
    def own_admin_part(self, settings: DelaySettings) -> AdminPart:
        """Return what the commands need for tasks that wait in this broker."""

    @abstractmethod
    def entry_of_wait(self, wait: Wait) -> StoreEntry:
        """Return the message of a task that a worker puts back, for one queue."""

    @abstractmethod
    def publisher_of(self, connection: Any, timeout_seconds: float = PUBLISH_SECONDS) -> Publisher:
        """Return a publisher of due messages over a kombu connection.

        *timeout_seconds*: how long it waits for the confirms of a batch.
        """

    def worker_part(self, settings: DelaySettings) -> WorkerPart:
        own = self.own_worker_part(settings)
        return own if self.store is None else StoreWorkerPart(self, settings, own)

    def admin_part(self, settings: DelaySettings) -> AdminPart:
        own = self.own_admin_part(settings)
        return own if self.store is None else StoreAdminPart(self, own)


#: What publishes the immediate tasks of this process's transactions, by store.
_relays: PerProcess[tuple[str, str], TransactionRelay] = PerProcess()


def _copy_of(client: Any) -> Any:
    """Return another kombu connection like *client*, whose calls end in time.

    It has no heartbeats, which no thread would send.
    """
    # The method clone() of a pooled connection does not work.
    return limited(Connection(**dict(client._info(resolve=False), heartbeat=0)))


class StoreWorkerPart(WorkerPart):
    """The operations of a worker whose tasks wait in a store, and perhaps in the broker, too."""

    comes_back_late_seconds = 0.3  # other processes look for the row every 0.25 s

    def __init__(self, channel: StoringChannel, settings: DelaySettings, own: WorkerPart) -> None:
        super().__init__(channel, settings)
        self._own = own
        self._store = channel.needed_store

    def serve(self, queues: Sequence[str]) -> None:
        self._own.serve(queues)

    def prepare(self, where: str) -> str:
        """Prepare the store and, if some tasks wait there, the broker."""

        def counted() -> str:
            self._store.prepare()
            census = self._store.census()
            return f"{census.waiting} waiting, {census.parked} parked"

        try:
            found = _briefly(counted, _in_consumer)
        except StoreUnavailable as exc:
            found = f"it does not answer yet ({exc})"
        told = f"{self._store.where} holds delayed tasks of {where}: {found}"
        if self._channel.keeps_all_in_store:
            return f"{told}; {self.terms}"
        return f"{told}; other tasks wait in the broker: {self._own.prepare(where)}"

    def dangers(self) -> Iterator[Finding]:
        yield from self._store.findings()
        yield from stranded(self._store, WRONG)
        yield from self._own.dangers()

    def watch_queues(self) -> list[str]:
        return [] if self._channel.keeps_all_in_store else self._own.watch_queues()

    def put_back(self, waits: Sequence[Wait]) -> list[Exception | None]:
        stored = [wait for wait in waits if self._is_stored(wait)]
        stays = [wait for wait in waits if not self._is_stored(wait)]
        into_store = iter(super().put_back(stored))
        into_broker = iter(self._own.put_back(stays) if stays else ())
        return [next(into_store if self._is_stored(wait) else into_broker) for wait in waits]

    def _is_stored(self, wait: Wait) -> bool:
        if wait.in_broker:
            return False
        # A task of a rate has its place in the headers.
        return bool(wait.headers) or self._channel.returns_to_store(wait.message.headers)

    def put_one_back(self, wait: Wait) -> None:
        entry = self._channel.entry_of_wait(wait)
        self._store.add([Row.of(entry)])
        now_us = time_ns() // 1000
        keep_key(self._store.state, entry.headers, due_us=wait.due_us, now_us=now_us)

    def rescue(self) -> Rescue | None:
        """Publish messages that are parked in the broker; let the dispatcher try parked rows."""
        return self._rescued(self._own.rescue)

    def rescue_in_turn(self) -> Rescue | None:
        return self._rescued(self._own.rescue_in_turn)

    def _rescued(self, own: Callable[[], Rescue | None]) -> Rescue | None:
        outcome = Rescue() if self._channel.keeps_all_in_store else own()
        _briefly(partial(self._store.release, parked=True))
        return outcome

    def promoter(self, connect: Callable[..., Any]) -> Any:
        dispatcher = Dispatcher(self._store, lambda: self._channel.publisher_of(connect()))
        own = self._own.promoter(connect)
        return dispatcher if own is None else _Both(dispatcher, own)

    def sweep(self) -> int:
        return int(_briefly(getattr(self._store.state, "sweep", int)))


def _briefly(call: Callable[[], T], within: Within = _beside_consumer) -> T:
    """Return the result of *call*, for a thread of a worker that must not wait for the store."""
    try:
        return within(call)
    except TimeoutError as exc:
        raise StoreUnavailable(f"the store does not answer the worker: {exc}") from exc


class _Both:
    """Runs the dispatcher of a store beside the promoter of its broker."""

    def __init__(self, dispatcher: Dispatcher, own: Promoter) -> None:
        self._dispatcher = dispatcher
        self._own = own

    @property
    def promoted(self) -> int:
        return self._dispatcher.promoted + self._own.promoted

    @property
    def parked(self) -> int:
        return self._dispatcher.parked + self._own.parked

    def run(self) -> None:
        beside = Thread(target=self._own.run, name="native-delay-own-promoter", daemon=True)
        beside.start()
        self._dispatcher.run()
        beside.join()

    def stop(self) -> None:
        self._dispatcher.stop()
        self._own.stop()


class StoreAdminPart(AdminPart):
    """The operations of the ``delay`` commands for tasks that wait in a store."""

    def __init__(self, channel: StoringChannel, own: AdminPart) -> None:
        self._channel = channel
        self._store = channel.needed_store
        self.own = own
        """The part of the broker, in which other tasks wait, or waited before."""
        self.name = self._store.where
        self.parking = f"{self._store.where} (parked)"

    def serve(self, queues: Sequence[Any]) -> None:
        self.own.serve(queues)

    def declare(self, queues: Sequence[Any]) -> Told:
        """Create the store's tables, the app's queues and, if tasks wait there, delay queues."""
        self._store.prepare()
        told = Told({"store": self.name}, [f"{self.name} is ready"])
        if self._channel.keeps_all_in_store:
            for queue in queues:
                queue(self._channel).declare()
            return told
        own = self.own.declare(queues)
        return Told({**told.facts, **own.facts}, [*told.sentences, *own.sentences])

    def examine(self) -> Iterator[Finding]:
        found = self._store.findings()
        yield from found
        if not any(finding.level == WRONG and finding.check == "store" for finding in found):
            with suppress(StoreUnavailable):  # it has just answered: the broker's part comes, too
                yield from self._status().findings()
        yield from stranded(self._store, ADVICE)
        if self._channel.keeps_all_in_store:
            yield from self._left_in_broker(self.in_broker() or 0)
        else:
            with suppress(OperationalError):  # the store says enough while the broker is away
                yield from self.own.examine()

    def in_broker(self) -> int | None:
        """Return the number of tasks that wait in the broker itself; None while it is away."""
        backlog = _unless_away(self.own.backlog)
        return None if backlog is None else backlog.waiting

    def status(self) -> Told:
        told = self._status().told()
        if self._channel.keeps_all_in_store:
            left = self.in_broker()
            found = [*told.found, *self._left_in_broker(left or 0)]
            found = [_AWAY, *found] if left is None else found
            return Told({**told.facts, "in_broker": left}, told.sentences, found)
        own = _unless_away(self.own.status)
        if own is None:
            return Told({**told.facts, "broker": None}, told.sentences, [_AWAY, *told.found])
        lines = [f"{self.name}:", *told.sentences, "", "in the broker:", *own.sentences]
        return Told({**told.facts, "broker": own.facts}, lines, [*told.found, *own.found])

    def backlog(self) -> Backlog:
        own = _unless_away(self.own.backlog)
        try:
            census = self._store.census()
        except StoreUnavailable:
            if own is None:
                raise
            return replace(own, store_answers=False)
        own = own or Backlog(0, 0)
        return replace(
            own,
            waiting=own.waiting + census.waiting,
            parked=own.parked + census.parked,
            store_answers=True,
            until_first_us=census.until_first_us,
            in_store=census.waiting,
        )

    def purge(self) -> int:
        return self._store.purge(parked=False) + self.own.purge()

    def uninstall(self) -> list[str]:
        refuse_waiting(self.name, self._store.census())
        return [*self.own.uninstall(), f"{self._store.clear()} item(s) of {self.name}"]

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        found = self.own.parked(limit=limit)
        if found is None:
            return None
        total, tasks = found
        rows = [_parked(row) for row in self._store.parked(max(limit - len(tasks), 0))]
        return total + self._store.census().parked, tasks + rows

    def requeue(self) -> Rescue | None:
        own = self.own.requeue()
        if own is not None:
            own.waiting_again += self._store.release(parked=True)
        return own

    def purge_parked(self) -> int:
        return self._store.purge(parked=True) + self.own.purge_parked()

    def _status(self) -> Status:
        return Status.of(self.name, self._store.census())

    @staticmethod
    def _left_in_broker(number: int) -> list[Finding]:
        """Report tasks that wait in the broker, from before the store was set."""
        if not number:
            return []
        problem = f"{number} task(s) still wait in the broker, where nothing can change them"
        way_out = "move them into the store: `celery -A PROJ delay migrate --from broker`"
        return [Finding("broker", ADVICE, problem, way_out)]


_AWAY = Finding(
    "broker",
    WRONG,
    "the broker is away: what is due waits in the store",
    "start the broker; workers then publish the overdue tasks in order",
)


def _unless_away(ask: Callable[[], T]) -> T | None:
    """Return the broker's answer, or None on a connection that reaches the store alone."""
    try:
        return ask()
    except OperationalError:
        return None


def stranded(store: Store, level: str) -> list[Finding]:
    """Report tasks of other virtual hosts, such as the app's former one, without a dispatcher."""
    try:
        known = [(other.place, other.census()) for other in store.others()]
    except StoreUnavailable:  # the store's own findings say so
        return []
    return [
        Finding(
            "virtual hosts",
            level,
            f"{census.waiting} task(s) in {store.where} wait for workers of the virtual host "
            f"{place!r}, and none runs",
            "start them or, if this app has moved from there, run `celery -A PROJ delay migrate "
            f"--from store --vhost {quote(place)}`",
        )
        for place, census in known
        if census.waiting and not census.promoting
    ]


def _parked(row: ParkedRow) -> ParkedTask:
    entry = row.entry
    like = Delayed(entry.delivery_id, entry.due_us, entry.exchange, entry.routing_key, entry.queue)
    return ParkedTask.of(entry.headers, like)
