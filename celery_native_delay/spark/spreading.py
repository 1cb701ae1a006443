"""Spread due times by a rate limit: tasks with the same key are due one after another.

In addition, Celery workers enforce the rate limit. The due times depend on all rows and the current
time. A repeated run has the time of its first try, so the same rows have the same due times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pyspark.sql import functions as f

from ..errors import InvalidFanOut, SettingsError
from ..rates.rate import HEADER_PREFIX, Rate

#: Due times are this much further apart than the rate limit asks, in thousandths. Otherwise one
#: late task would delay all tasks after it.
SLACK_PER_MILLE = 10

#: A prefix that distinguishes the name of a column from the value of a key.
_COLUMN = "\0"


@dataclass(frozen=True)
class Spread:
    """A rate limit for due times: the spacing, and the number of tasks due at once (burst)."""

    spacing_us: int
    burst: int
    #: The column with the rate limit's key; None: all tasks share the limit.
    column: str | None

    @classmethod
    def of(cls, rate: Rate, column: str | None) -> Self:
        spacing_us = rate.spacing_us + rate.spacing_us * SLACK_PER_MILLE // 1000
        return cls(spacing_us, rate.burst, column)

    def over(self, frame: Any, now_us: int) -> Any:
        """Return the DataFrame with due times (``due_us``) moved later to obey the rate limit.

        The column ``line`` of *frame* has the rate limit's key; rows with the same key share the
        limit. Rejected rows do not delay accepted rows.
        """
        line = "partition by line, error is null order by due_us, task_id"
        ahead_us = (self.burst - 1) * self.spacing_us
        # A task is due one spacing after the previous task, or at its own later due time.
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
    """Convert a task's rate limit to a Spread; find the column that contains the key.

    *run* is the task's function, or None if the app does not register the task. Each call has
    *args_count* positional arguments, and keyword arguments with the names *kwargs_names*.

    Raises:
        InvalidFanOut: the rate limit's key is a function, or no argument has the key's name.
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
