"""A store in a database: PostgreSQL, SQLite, MySQL or MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from secrets import token_hex
from typing import Any

from sqlalchemy import (
    Boolean,
    Connection,
    Engine,
    and_,
    bindparam,
    case,
    delete,
    exc,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite

from ..errors import CannotDelay, StoreUnavailable
from ..finding import UNCHECKED, WRONG, Finding, clock_finding
from ..now import time_ns
from ..records.waiting import WaitingTasks
from ..texts import digest_of, storable
from .database import Database, clock_ahead_seconds, now_us
from .interface import (
    BATCH,
    LEASE_SECONDS,
    Census,
    ParkedRow,
    Refusal,
    Row,
    Store,
    Taken,
    TakenRow,
    WaitingRow,
)
from .joined import RELAY_SECONDS
from .sql_state import SqlState
from .sql_table import (
    CANCELLED,
    CANCELLED_AND_TAKEN,
    PARKED,
    TAKEN,
    TASKS,
    WAITING,
    short_id,
)
from .sql_tasks import SqlTasks

_ROW = TASKS.c

#: The columns that a row of the same name overwrites.
_OVERWRITTEN = ("task_id", "state", "next_us", "taken_by", "refusals", "reason", "entry")

_MINE = _ROW.namespace == bindparam("mine")
_WAITS = _ROW.state == WAITING

#: The first times of cancelled and of waiting rows, in one statement.
_FIRSTS = select(
    *(
        select(func.min(_ROW.next_us)).where(_MINE, _ROW.state == state).scalar_subquery()
        for state in (CANCELLED, WAITING)
    )
)
_DUE = (
    select(_ROW.id, _ROW.entry, _ROW.refusals)
    .where(_MINE, _ROW.state == bindparam("which"), _ROW.next_us <= bindparam("until"))
    .order_by(_ROW.next_us, _ROW.id)  # tasks that are due at once, as they were sent
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)
_THESE = _ROW.id.in_(bindparam("ids", expanding=True))
_TAKE = (
    update(TASKS)
    .where(_THESE)
    .values(state=_ROW.state + 1, taken_by=bindparam("token"), next_us=bindparam("lease"))
)
_STILL_TAKEN = _ROW.taken_by == bindparam("token")
# MySQL's updates by an index wait for the rows of each other open transaction. So rows are found by
# a statement that skips locked ones, and are changed by their ids.
_RETAKEN = (
    select(_ROW.id, _ROW.entry, _ROW.refusals)
    .where(_MINE, _ROW.state == TAKEN, _STILL_TAKEN)
    .order_by(_ROW.id)
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)
_RETAKE = update(TASKS).where(_THESE).values(next_us=bindparam("lease"))
_PUBLISHED = delete(TASKS).where(_THESE, _STILL_TAKEN)
_REFUSED = (
    update(TASKS)
    .where(_ROW.id == bindparam("one"), _STILL_TAKEN)
    .values(
        state=case((bindparam("parks", type_=Boolean), PARKED), else_=_ROW.state - 1),
        taken_by=None,
        next_us=bindparam("at"),
        refusals=bindparam("count"),
        reason=bindparam("why"),
    )
)
_GIVEN_BACK = (
    update(TASKS)
    .where(_THESE, _STILL_TAKEN)
    .values(state=_ROW.state - 1, taken_by=None, next_us=bindparam("at"))
)
_FREE = (
    select(_ROW.id)
    .where(_MINE, _ROW.state == bindparam("which"), _ROW.next_us <= bindparam("until"))
    .limit(BATCH)
    .with_for_update(skip_locked=True)
)
_RELEASE = (
    update(TASKS)
    .where(_THESE)
    .values(state=bindparam("then"), taken_by=None, next_us=bindparam("at"))
)

#: The states of rows that become free when their lease or pause has ended, and the next states.
_FREED = {TAKEN: WAITING, CANCELLED_AND_TAKEN: CANCELLED, PARKED: WAITING}

_RELAY_US = round(RELAY_SECONDS * 1_000_000)

#: Later than any time in microseconds.
_EVER = 1 << 62

#: Refusals that are counted. The number must fit into its column.
_MOST_REFUSALS = 30_000


class SqlStore(Database, Store):
    """The waiting tasks of one namespace in a database."""

    def __init__(
        self, url: str, namespace: str, *, timeout_seconds: float, engine: Engine | None = None
    ) -> None:
        Store.__init__(self)
        super().__init__(url, timeout_seconds=timeout_seconds, engine=engine)
        self._use(namespace)
        self.look_seconds = 0.05 if self.is_file else 0.25

    def _use(self, namespace: str) -> None:
        self.namespace = namespace
        self._mine = {"mine": namespace}

    @cached_property
    def state(self) -> SqlState:
        return SqlState(self)

    def tasks(self, delays: Any) -> WaitingTasks:
        return SqlTasks(self, delays)

    def _namespaces(self) -> list[str]:
        after = select(func.min(_ROW.namespace)).where(_ROW.namespace > bindparam("last"))

        def walked(connection: Connection) -> list[str]:
            # One look into the index for each namespace: DISTINCT would read all of it.
            names = [""]
            while (name := connection.execute(after, {"last": names[-1]}).scalar()) is not None:
                names.append(name)
            return names

        return self.look_up(walked) if self.is_made() else []

    # --- in ------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row]) -> None:
        users = self.users()
        taken_us = 0 if users is None else time_ns() // 1000
        token = None if users is None else users.token
        written = [self.row(row, token if row.due_us <= taken_us else None) for row in rows]
        if users is None:
            # The same row in another order would be a deadlock with another producer.
            written.sort(key=lambda row: str(row["digest"]))
        try:
            self.do(lambda connection: connection.execute(self.upsert, written))
        except StoreUnavailable as error:
            if isinstance(error.__cause__, exc.DataError | exc.IntegrityError):
                raise CannotDelay(f"{self.where} refuses the task: {error}") from error
            raise
        first_us = min(row.due_us for row in rows)
        self.note_added(first_us, immediate=first_us <= taken_us)

    def note_added(self, due_us: int, *, immediate: bool = False) -> None:
        """Wake the dispatcher of this process; if the user's transaction is open, at its commit."""
        users = self.users()
        if users is None:
            self.on_add(due_us)
        else:
            users.added(immediate=immediate, call=partial(self.on_add, due_us))

    def row(self, row: Row, token: str | None = None) -> dict[str, Any]:
        """Return the columns of a row, which is already taken if there is a *token*."""
        return {
            "namespace": self.namespace,
            "digest": digest_of(row.name),
            "task_id": short_id(row.task_id),
            "state": WAITING if token is None else TAKEN,
            "next_us": row.due_us + (0 if token is None else _RELAY_US),
            "taken_by": token,
            "refusals": 0,
            "reason": None,
            "entry": row.entry,
        }

    @cached_property
    def upsert(self) -> Any:
        """The statement that writes rows, and overwrites rows of the same names."""
        if self.engine.dialect.name in ("mysql", "mariadb"):
            into = mysql.insert(TASKS)
            return into.on_duplicate_key_update(
                {name: into.inserted[name] for name in _OVERWRITTEN}
            )
        kind: Any = sqlite if self.is_file else postgresql
        added = kind.insert(TASKS)
        return added.on_conflict_do_update(
            index_elements=[_ROW.namespace, _ROW.digest],
            set_={name: added.excluded[name] for name in _OVERWRITTEN},
        )

    # --- out -----------------------------------------------------------------------------

    def next_due_us(self) -> int | None:
        """Return the due time of the first waiting row, in microseconds; None if no row waits."""

        def looked(connection: Connection) -> int | None:
            firsts = connection.execute(_FIRSTS, self._mine).one()
            return min((us for us in firsts if us is not None), default=None)

        return self.look_up(looked)

    def take(self, *, late_us: int = 0) -> Taken:
        def looked(connection: Connection) -> tuple[int, int | None, int | None]:
            cancelled_us, waiting_us = connection.execute(_FIRSTS, self._mine).one()
            return now_us(connection), cancelled_us, waiting_us

        # One state after another, because an index finds the first rows of one state only.
        at_us, cancelled_us, next_us = self.look_up(looked)
        until_us = at_us - late_us
        # Due tasks do not wait for the announcements of cancelled ones.
        due = {WAITING: next_us, CANCELLED: cancelled_us}
        states = [state for state, us in due.items() if us is not None and us <= until_us]
        if not states:
            return Taken("", (), at_us, next_us)
        token = token_hex(16)

        def taken(connection: Connection) -> Sequence[Any]:
            which = self._mine | {"until": until_us, "which": states[0]}
            rows = connection.execute(_DUE, which).all()
            if rows:
                lease_us = at_us + round(LEASE_SECONDS * 1_000_000)
                these = {"ids": [row.id for row in rows], "token": token, "lease": lease_us}
                connection.execute(_TAKE, these)
            return rows

        rows = [TakenRow(row.id, row.entry, row.refusals) for row in self.do_soon(taken)]
        return Taken(token, rows, at_us, next_us)

    def retake(self, token: str) -> Taken:
        these = {**self._mine, "token": token}

        def retaken(connection: Connection) -> Taken:
            at_us = now_us(connection)
            lease_us = at_us + round(LEASE_SECONDS * 1_000_000)
            found = connection.execute(_RETAKEN, these).all()
            if found:
                ids = [row.id for row in found]
                connection.execute(_RETAKE, {"ids": ids, "lease": lease_us})
            rows = [TakenRow(row.id, row.entry, row.refusals) for row in found]
            return Taken(token, rows, at_us, None)

        return self.do_soon(retaken)

    def settle(
        self, taken: Taken, published: Sequence[TakenRow], refused: Sequence[Refusal]
    ) -> None:
        def settled(connection: Connection) -> None:
            mine = {"token": taken.token}
            if published:
                ids = [row.key for row in published]
                connection.execute(_PUBLISHED, mine | {"ids": ids})
            if len(published) == len(taken.rows):
                return
            at_us = now_us(connection)
            if refused:
                connection.execute(_REFUSED, [mine | _refused(each, at_us) for each in refused])
            known = {row.key for row in published} | {each.row.key for each in refused}
            if ids := [row.key for row in taken.rows if row.key not in known]:
                connection.execute(_GIVEN_BACK, mine | {"ids": ids, "at": at_us})

        self.do_soon(settled)

    def release(self, *, parked: bool = False) -> int:
        def released(connection: Connection) -> int:
            at_us = now_us(connection)
            released = 0
            for state, then in _FREED.items():
                until_us = _EVER if parked and state == PARKED else at_us
                which = self._mine | {"which": state, "until": until_us}
                while ids := connection.execute(_FREE, which).scalars().all():
                    these = {"ids": ids, "then": then, "at": at_us}
                    released += connection.execute(_RELEASE, these).rowcount
            return released

        return self.do_soon(released)

    # --- seen ----------------------------------------------------------------------------

    def census(self) -> Census:
        counts = select(_ROW.state, func.count()).where(_MINE).group_by(_ROW.state)
        is_late = _ROW.state.in_((WAITING, TAKEN)), _ROW.next_us <= bindparam("until")
        late = select(_ROW.state, func.count(), func.min(_ROW.next_us)).where(_MINE, *is_late)
        late = late.group_by(_ROW.state)

        def counted(connection: Connection) -> Census:
            at_us = now_us(connection)
            found: dict[int, int] = dict(connection.execute(counts, self._mine).all())
            _, first_us = connection.execute(_FIRSTS, self._mine).one()
            overdue = connection.execute(late, self._mine | {"until": at_us}).all()
            lapsed = sum(count for state, count, _ in overdue if state == TAKEN)
            firsts = [us for us in (first_us, *(us for _, _, us in overdue)) if us is not None]
            return Census(
                found.get(WAITING, 0) + lapsed,
                found.get(TAKEN, 0) - lapsed + found.get(CANCELLED_AND_TAKEN, 0),
                found.get(PARKED, 0),
                sum(count for _, count, _ in overdue),
                min(firsts) - at_us if firsts else None,
                False,
            )

        return self.look_up(counted)._replace(promoting=self._is_dispatched())

    def parked(self, limit: int) -> list[ParkedRow]:
        asked = select(_ROW.entry, _ROW.reason).where(_MINE, _ROW.state == PARKED)
        asked = asked.order_by(_ROW.id).limit(limit)
        rows = self.look_up(lambda connection: connection.execute(asked, self._mine).all())
        return ParkedRow.all_of((row.entry, row.reason or "") for row in rows)

    def rows_after(self, row: WaitingRow | None, *, limit: int) -> list[WaitingRow]:
        asked = select(_ROW.id, _ROW.next_us, _ROW.entry).where(_MINE, _WAITS)
        if row is not None:
            same_time = and_(_ROW.next_us == row.next_us, _ROW.id > row.key)
            asked = asked.where(or_(_ROW.next_us > row.next_us, same_time))
        asked = asked.order_by(_ROW.next_us, _ROW.id).limit(limit)
        found = self.look_up(lambda connection: connection.execute(asked, self._mine).all())
        return [WaitingRow(each.id, each.next_us, each.entry) for each in found]

    def remove(self, key: Any, entry: str) -> bool:
        this = delete(TASKS).where(_ROW.id == key, _WAITS, _ROW.entry == entry)
        return bool(self.do_soon(lambda connection: connection.execute(this).rowcount))

    def now_us(self) -> int:
        return self.look_up(now_us)

    def purge(self, *, parked: bool) -> int:
        these = delete(TASKS).where(_MINE, _ROW.state == (PARKED if parked else WAITING))
        return self.do(lambda connection: connection.execute(these, self._mine).rowcount)

    def clear(self) -> int:
        these = delete(TASKS).where(_MINE)
        rows = self.do(lambda connection: connection.execute(these, self._mine).rowcount)
        return rows + self.state.clear()

    def findings(self) -> list[Finding]:
        try:
            if not self.is_made():
                return [Finding("store", WRONG, *self.not_made())]
            # The statement fails if this user may not write, although no row matches.
            nothing = delete(TASKS).where(_ROW.id < 0)
            self.do(lambda connection: connection.execute(nothing))
            ahead_seconds = self.look_up(clock_ahead_seconds)
        except StoreUnavailable as error:
            way_out = (
                "start the database, or correct native_delay_store in workers and producers; its "
                "user must be able to write"
            )
            return [Finding("store", WRONG, str(error), way_out)]
        if ahead_seconds is None:
            problem = f"the clock of {self.where}: it is not known how to ask for it"
            return [
                Finding("clocks", UNCHECKED, problem, "have all machines follow one time server")
            ]
        effect = "delayed tasks are early or late by that"
        return list(clock_finding("the database's clock", ahead_seconds, effect))


def _refused(refusal: Refusal, at_us: int) -> dict[str, Any]:
    return {
        "one": refusal.row.key,
        "parks": refusal.parks,
        "at": at_us + refusal.pause_us,
        "count": min(refusal.row.refusals + 1, _MOST_REFUSALS),
        "why": storable(refusal.reason),
    }
