"""Due times at a rate: tasks of one key fall due one after the other, as they may start.

By arithmetic alone, on the rows: a line has one end, and places taken in it for tomorrow would keep
whatever comes today behind them. Other rows, or the same rows later, get other due times: what is
to keep its own is sent again from the ledger of its run. Starts are counted by the workers, in the
same lines as all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pyspark.sql import functions as f

from ..errors import InvalidFanOut, SettingsError
from ..rates.rate import HEADER_PREFIX, Rate

#: How much further apart tasks fall due than their line has places, in thousandths: what came late
#: is made up for, instead of keeping all that are behind it from starting when they come.
SLACK_PER_MILLE = 10

#: Marks the name of a column among what a key may be.
_COLUMN = "\0"


@dataclass(frozen=True)
class Spread:
    """The rate at which the tasks of a fan-out fall due.

    *column* is what a row's key is read from, by the name that it has in ``encode``; None: all are
    in one line.
    """

    spacing_us: int
    burst: int
    column: str | None

    @classmethod
    def of(cls, rate: Rate, column: str | None) -> Self:
        """The spread of tasks that have a *rate*."""
        spacing_us = rate.spacing_us + rate.spacing_us * SLACK_PER_MILLE // 1000
        return cls(spacing_us, rate.burst, column)

    def over(self, frame: Any, now_us: int) -> Any:
        """*frame* with the ``due_us`` of each ``line`` spread from *now_us* on.

        Rows with an error take no place.
        """
        line = "partition by line, error is null order by due_us, task_id"
        ahead_us = (self.burst - 1) * self.spacing_us
        # Each place is one spacing after the one before, or where its task falls due by itself.
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
    """The spread of a *task* with that *rate*, whose function is *run*, None where it is not known.

    Raises:
        InvalidFanOut: Spark cannot tell the keys of its rows.
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
