"""What is known of the tasks that wait, and what can be asked of them. Pure: time is an argument.

A query's words are those of Flower's search box: ``name:``, ``queue:``, ``uuid:``, ``root:``,
``args:``, ``kwargs:key=value``, and any other text for wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Protocol

from .errors import InvalidQuery


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that waits. *args* and *kwargs* are their reprs, as Celery's events have them.

    *queue* is where it goes, "" where only the exchange knows; *due_us* is in microseconds since
    the epoch. What is no Celery task has no *name*, and an *id* only by its correlation id.
    """

    id: str
    name: str
    args: str
    kwargs: str
    queue: str
    exchange: str
    routing_key: str
    due_us: int
    retries: int
    root_id: str
    delivery_id: str
    keeps_result: bool = True

    @classmethod
    def of(
        cls,
        headers: Mapping[str, Any],
        properties: Mapping[str, Any],
        *,
        queue: str,
        exchange: str,
        routing_key: str,
        due_us: int,
        delivery_id: str,
    ) -> Waiting:
        """By the headers and properties of a message of task protocol 2, or of any other."""
        task_id = headers.get("id") or properties.get("correlation_id") or delivery_id
        return cls(
            str(task_id),
            str(headers.get("task") or ""),
            str(headers.get("argsrepr") or ""),
            str(headers.get("kwargsrepr") or ""),
            queue,
            exchange,
            routing_key,
            due_us,
            int(headers.get("retries") or 0),
            str(headers.get("root_id") or ""),
            delivery_id,
            not headers.get("ignore_result"),
        )

    @property
    def due(self) -> datetime:
        """The due time, in UTC."""
        return datetime.fromtimestamp(self.due_us / 1_000_000, UTC)

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and for Flower's REST."""
        return {
            "id": self.id,
            "name": self.name,
            "args": self.args,
            "kwargs": self.kwargs,
            "queue": self.queue,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "due": self.due.isoformat(timespec="milliseconds"),
            "retries": self.retries,
            "root_id": self.root_id,
            "delivery_id": self.delivery_id,
        }


_FIELDS = {
    "name": "name",
    "queue": "queue",
    "uuid": "id",
    "id": "id",
    "root": "root_id",
    "args": "args",
    "kwargs": "kwargs",
}

#: Flower: words, or what stands between quotes.
_WORD = re.compile(r'((?:[^\s"]|"(?:\\.|[^"\\])*")+)')
_KEY_AND_VALUE = re.compile(r"(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Query:
    """Which of the waiting: those that have all of *words*, and are due in the range.

    *words* are pairs of a field of :class:`Waiting`, "" for any, and what it must contain.
    *from_us* is included, *until_us* is not; None is without limit. *name* and *queue* must be
    exactly so.
    """

    words: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    queue: str | None = None
    from_us: int | None = None
    until_us: int | None = None

    @classmethod
    def parse(cls, text: str) -> Query:
        """From the text of a search box.

        Raises:
            InvalidQuery: a quote is left open, a word has nothing behind its colon, or words are
                not to be there together.
        """
        words = []
        if _WORD.sub("", text).strip():
            raise InvalidQuery(f"expected every quote to be closed, got {text!r}")
        for word in _WORD.findall(text):
            if word == "AND":
                continue
            if word in ("OR", "NOT"):
                raise InvalidQuery(
                    f"expected words that all must be there, got {word!r}: search twice, or put it "
                    f"between quotes"
                )
            field, colon, value = word.partition(":")
            if not colon or field not in _FIELDS:
                field, value = "", word
            value = _unquoted(value)
            if not value:
                raise InvalidQuery(f"expected something behind the colon of {word!r}")
            words.append((_FIELDS.get(field, ""), value))
        return cls(tuple(words))

    def due_within(self, from_us: int | None, until_us: int | None) -> Query:
        """The same, of those due from then until then."""
        return replace(self, from_us=from_us, until_us=until_us)

    @property
    def is_by_time_only(self) -> bool:
        """Whether due times alone decide."""
        return not (self.words or self.name or self.queue)

    @property
    def needles(self) -> list[str]:
        """Texts that stand somewhere in every message that matches, character by character."""
        words = [_value_of(field, value) for field, value in self.words]
        return [text for text in (self.name, self.queue, *words) if text]

    def matches(self, task: Waiting) -> bool:
        """Whether *task* is one of them."""
        return (
            (self.name is None or task.name == self.name)
            and (self.queue is None or task.queue == self.queue)
            and (self.from_us is None or task.due_us >= self.from_us)
            and (self.until_us is None or task.due_us < self.until_us)
            and all(_contains(task, field, value) for field, value in self.words)
        )


#: Everything that waits.
ALL = Query()

_SEARCHED = ("id", "name", "args", "kwargs", "queue", "root_id", "exchange", "routing_key")


def _contains(task: Waiting, field: str, value: str) -> bool:
    if not field:
        return any(value in getattr(task, name) for name in _SEARCHED)
    if field == "kwargs" and (pair := _KEY_AND_VALUE.fullmatch(value)):
        key, wanted = pair.groups()
        shown = rf"'{re.escape(key)}': ['\"]?{re.escape(_unquoted(wanted))}"
        return re.search(shown, task.kwargs) is not None
    return value in getattr(task, field)


def _value_of(field: str, value: str) -> str:
    pair = _KEY_AND_VALUE.fullmatch(value) if field == "kwargs" else None
    return _unquoted(pair[2]) if pair else value


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


@dataclass(frozen=True)
class Page:
    """Some of the waiting, earliest first, and how many match in all; None: nobody has counted."""

    tasks: tuple[Waiting, ...]
    total: int | None


@dataclass(frozen=True)
class Bar:
    """How many are due from then until then, in microseconds since the epoch."""

    from_us: int
    until_us: int
    count: int


#: Seconds that a bar may be wide: what people count in.
_WIDTHS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * 60 for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * 3600 for hours in (1, 2, 3, 6, 12)),
    *(days * 86_400 for days in (1, 2, 7, 14, 28, 91, 182, 364)),
)


def edges(first_us: int, last_us: int, *, bars: int) -> list[int]:
    """Where the bars of a histogram begin and end: at round times, *bars* of them at most."""
    span_us = max(last_us - first_us, 1)
    for width in _WIDTHS:
        width_us = width * 1_000_000
        start_us = first_us // width_us * width_us
        count = (last_us - start_us) // width_us + 1
        if count <= bars:
            break
    else:
        count, start_us = bars, first_us
        width_us = span_us // bars + 1
    return [start_us + number * width_us for number in range(count + 1)]


class Verdict(Enum):
    """What became of a wish to change something."""

    DONE = "done"
    TOO_LATE = "too late"
    """It was there, and was handed over before it could be changed, or is about to be."""
    UNKNOWN = "unknown"
    """Nothing waits under this id: its time has come, or it never waited."""


@dataclass(frozen=True)
class Outcome:
    """What became of a wish to cancel or move the task *id*; true if it was done.

    *due_us* is when it is due now, None if it is not. *tasks* are what it was about, as it was;
    *late* says why it was too late.
    """

    id: str
    verdict: Verdict
    due_us: int | None = None
    tasks: tuple[Waiting, ...] = ()
    late: str = "it was handed over meanwhile"

    def __bool__(self) -> bool:
        return self.verdict is Verdict.DONE

    def __str__(self) -> str:
        match self.verdict:
            case Verdict.DONE if self.due_us is None:
                return f"{self.id} cancelled"
            case Verdict.DONE:
                due = datetime.fromtimestamp((self.due_us or 0) / 1_000_000, UTC)
                return f"{self.id} is due {due.isoformat(timespec='milliseconds')}"
            case Verdict.TOO_LATE:
                return f"{self.id}: too late, {self.late}"
        return f"{self.id}: nothing waits under this id"


class Ledger(Protocol):
    """What waits on one broker, by due time. Every method may raise LedgerUnavailable."""

    def count(self, query: Query = ALL) -> int:
        """How many match."""

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        """Those that match, earliest first, from the *offset*-th on."""

    def get(self, task_id: str) -> list[Waiting]:
        """What waits under this id: most often one, none if it does not wait."""

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        """How many are due between each two neighbours of *edges_us*."""

    def span(self) -> tuple[int, int] | None:
        """When the first and the last are due; None if nothing waits."""

    def close(self) -> None:
        """Give up what it has of its own."""

    def cancel(self, task_id: str) -> Outcome:
        """Have the task never run: its message is handed over at once, for a worker to announce."""

    def move(self, task_id: str, due_us: int | None) -> Outcome:
        """Have it due then instead, None for now.

        Raises:
            DelayTooLong, CannotDelay: it cannot wait that long; it is due when it was.
        """


def histogram(ledger: Ledger, *, bars: int = 40) -> list[Bar]:
    """How due times are spread, in *bars* bars at most; empty if nothing waits."""
    span = ledger.span()
    if span is None:
        return []
    found = edges(*span, bars=bars)
    counts = ledger.counts(found)
    return [Bar(*bar) for bar in zip(found, found[1:], counts, strict=False)]
