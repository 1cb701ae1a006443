"""Lines of rated tasks in a store: each is a row, whose lock decides who comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    MetaData,
    String,
    Table,
    Text,
    and_,
    delete,
    exc,
    insert,
    select,
    update,
)

from ...errors import LedgerUnavailable, StoreUnavailable, TopologyMismatch
from ...rates.line import Line, name_of
from ...rates.lines import RateLine, Turn
from ...rates.rate import Rate
from .database import now_us
from .store import Store

T = TypeVar("T")

#: A table of its own, made when a line is first asked: an app without rates needs none.
METADATA = MetaData()

#: What stands here is frozen: its records carry a version.
LINES = Table(
    "native_delay_rate",
    METADATA,
    Column("namespace", String(64), primary_key=True),
    # Of the name, which may be longer than a key of MySQL's.
    Column("digest", String(32), primary_key=True),
    Column("name", Text, nullable=False),
    Column("record", String(255), nullable=False),
    # The times of its last starts.
    Column("starts", Text, nullable=False),
    # Microseconds since the epoch; then nothing is lost with the row.
    Column("ends_us", BigInteger, nullable=False),
    Index("native_delay_rate_ends", "namespace", "ends_us"),
)

_LINE = LINES.c

#: Another may make the table, then the line, at the same time.
_TRIES = 4


class StoreLines:
    """The lines of one store; see :class:`~celery_native_delay.rates.lines.Lines`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_ready = False

    def ask(
        self, task: str, key: str | None, rate: Rate, place: int | None, *, may_start: bool = True
    ) -> Turn:
        def asked(line: Line, now: int) -> tuple[Line, Turn]:
            return line.ask(rate, now, place, may_start=may_start)

        return self._decide(task, key, rate, asked)

    def hold(self, task: str, key: str | None, rate: Rate, seconds: float) -> int:
        wait_us = round(seconds * 1_000_000)
        return self._decide(task, key, rate, lambda line, now: line.hold(rate, now, wait_us))

    def look(self, limit: int) -> list[RateLine]:
        def looked(connection: Connection) -> list[RateLine]:
            now = now_us(connection)
            rows = connection.execute(
                select(_LINE.name, _LINE.record)
                .where(_LINE.namespace == self._store.namespace, _LINE.ends_us > now)
                .order_by(_LINE.ends_us.desc())
                .limit(limit)
            )
            found = [(name, *Line.decoded(record)) for name, record in rows]
            return [line.seen(name, rate, now) for name, line, rate in found if rate is not None]

        return sorted(self._change(looked), key=lambda line: -line.waiting)

    def sweep(self) -> None:
        """Remove the lines that have ended."""
        mine = _LINE.namespace == self._store.namespace
        self._change(
            lambda connection: connection.execute(
                delete(LINES).where(mine, _LINE.ends_us < now_us(connection))
            )
        )

    def close(self) -> None:
        """The engine is the process's."""

    def _decide(
        self,
        task: str,
        key: str | None,
        rate: Rate,
        decide: Callable[[Line, int], tuple[Line, T]],
    ) -> T:
        name = name_of(task, key)
        digest = blake2b(name.encode(), digest_size=16).hexdigest()
        this = and_(_LINE.namespace == self._store.namespace, _LINE.digest == digest)

        def change(connection: Connection) -> T:
            asked = select(_LINE.record, _LINE.starts).where(this).with_for_update()
            found = connection.execute(asked).first()
            before = Line() if found is None else Line.decoded(*found)[0]
            # Asked for after the lock: another may have held it for a while.
            line, answer = decide(before, now_us(connection))
            values: dict[str, Any] = {
                "record": line.encoded(rate),
                "starts": " ".join(map(str, line.log)),
                "ends_us": line.ends_us(rate),
            }
            if found is None:
                shown = name.replace("\0", "\ufffd")  # PostgreSQL keeps no NUL
                mine = {"namespace": self._store.namespace, "digest": digest, "name": shown}
                connection.execute(insert(LINES).values(mine | values))
            else:
                connection.execute(update(LINES).where(this).values(values))
            return answer

        return self._change(change)

    def _change(self, change: Callable[[Connection], T]) -> T:
        """*change* in a transaction; again if another has made the line or lost the table."""
        with self._explained():
            for tries_left in reversed(range(_TRIES)):
                try:
                    if not self._is_ready:
                        with self._store.engine.begin() as connection:
                            METADATA.create_all(connection)
                        self._is_ready = True
                    with self._store.engine.begin() as connection:
                        return change(connection)
                except (exc.IntegrityError, exc.OperationalError, exc.ProgrammingError):
                    self._is_ready = False
                    if not tries_left:
                        raise
        raise AssertionError("unreachable")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (
            exc.SQLAlchemyError,
            self._store.engine.dialect.loaded_dbapi.Error,
            StoreUnavailable,
            TopologyMismatch,
        ) as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise LedgerUnavailable(
                f"the lines of rated tasks in {self._store.shown_url} are out of reach: {said}"
            ) from error
