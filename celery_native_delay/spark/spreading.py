"""Spread due times by a rate: tasks of one key fall due one after another, as they may start.

Due times are computed from the rows alone; workers enforce the rate later. Other rows, or the same
rows at another time, get other due times: to keep these, send tasks again from ``ledger()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pyspark.sql import functions as f

from ..errors import InvalidFanOut, SettingsError
from ..rates.rate import HEADER_PREFIX, Rate

#: Tasks fall due this much further apart than the rate asks, in thousandths. Otherwise one late
#: task would delay all tasks after it.
SLACK_PER_MILLE = 10

#: A prefix that marks a column's name among the values that a key may have.
_COLUMN = "\0"


@dataclass(frozen=True)
class Spread:
    """The spread of a fan-out's due times by a rate.

    *column* is the slot that has a row's key; None if all tasks share the rate.
    """

    spacing_us: int
    burst: int
    column: str | None

    @classmethod
    def of(cls, rate: Rate, column: str | None) -> Self:
        """The spread by *rate*."""
        spacing_us = rate.spacing_us + rate.spacing_us * SLACK_PER_MILLE // 1000
        return cls(spacing_us, rate.burst, column)

    def over(self, frame: Any, now_us: int) -> Any:
        """Spread ``due_us`` of the rows with the same ``line``, from *now_us* on.

        Rejected rows are left out.
        """
        line = "partition by line, error is null order by due_us, task_id"
        ahead_us = (self.burst - 1) * self.spacing_us
        # A task is due one spacing after the task before it, or at its own due time if later.
        return (
            frame.withColumn("nth_us", f.expr(f"row_number() over ({line}) * {self.spacing_us}L"))
            .withColumn(
                "place_us",
                f.expr(
                    f"nth_us + max(greatest(due_us, {now_us}L) - nth_us) over ({line} "
                    "rows between unbounded preceding and current row)"
                ),
            )
            .withColumn("due_us", f.expr(f"greatest(due_us, place_us - {ahead_us}L)"))
        )


def spread_of(
    rate: Rate, task: str, run: Any, args_count: int, kwargs_names: Sequence[str]
) -> Spread:
    """The spread of a *task* by its *rate*; *run* is the task's function, None if unknown.

    Raises:
        InvalidFanOut: the rate's key is not among the columns.
    """
    if callable(rate.key):
        raise InvalidFanOut(
            f"expected the rate of {task} to have the name of an argument for its key, got a "
            'function, which Spark cannot ask: say rate=Rate("100/m", key="tenant")'
        )
    try:
        known = None if run is None else rate.signature_of(task, run)
    except SettingsError as exc:
        raise InvalidFanOut(str(exc)) from exc
    key = rate.key
    is_argument = key is not None and not key.startswith(HEADER_PREFIX)
    if is_argument and known is None and key not in kwargs_names:
        raise InvalidFanOut(
            f"expected {key!r}, the key of the rate of {task}, among kwargs "
            f"({', '.join(kwargs_names) or 'none'}): which of args it is only the task could tell"
        )
    args = [f"{_COLUMN}arg{number}" for number in range(args_count)]
    kwargs: Mapping[str, str] = {
        name: f"{_COLUMN}kwarg{number}" for number, name in enumerate(kwargs_names)
    }
    found = rate.key_of(args, kwargs, {}, known) or ""
    column = found.removeprefix(_COLUMN) if found.startswith(_COLUMN) else None
    return Spread.of(rate, column)
