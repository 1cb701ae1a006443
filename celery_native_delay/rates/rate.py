"""``Rate``: a limit on the number of task starts per period."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import Parameter, Signature, signature
from typing import Any

from ..errors import SettingsError
from ..texts import is_text

#: Computes the key of a task from its arguments, keyword arguments and headers.
KeyFunction = Callable[[Sequence[Any], Mapping[str, Any], Mapping[str, Any]], object]

#: Limits of some keys: by key, or a function that returns the limit of a key, or None.
Overrides = Mapping[str, str] | Callable[[str], str | None]

#: Start times are further apart than the rate requires, by this many thousandths. So the limit also
#: holds if a task starts this many thousandths of a period after the worker's decision.
MARGIN_PER_MILLE = 10

#: If a task starts late by at most this many microseconds, and at most half a period, the tasks
#: behind it start on time.
_CATCH_UP_US = 1_000_000

#: Start times that are kept of each line. If more tasks start in a period, the time of every
#: second, third, … start is kept.
MOST_KEPT_STARTS = 256

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_RATE = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,5})?([smhd])")
_EXPECTED = 'such as "100/m", tasks per s, m, h or d, or "50/10s", tasks per 10 s'

#: The highest rate: start times are whole microseconds, and a worker cannot start more tasks.
MOST_PER_SECOND = 10_000
MOST_BURST = 1_000_000
#: The limit of a rate that only limits concurrent tasks.
UNLIMITED = f"{MOST_PER_SECOND}/1s"

#: The prefix of a key that names a header.
HEADER_PREFIX = "header:"

#: Characters of a key that count; the rest of a longer key is ignored.
LONGEST_KEY = 200


@dataclass(frozen=True)
class Rate:
    """A limit on the number of task starts per period, counted separately for each key.

    >>> Rate("100/m", key="tenant", burst=10)
    Rate('100/m', key='tenant', burst=10)

    Args:
        limit: tasks per period: "10/s", "100/m", "5/h", "1000/d", "50/10s". Without a limit, only
            *concurrent* limits the tasks.
        key: tasks with the same key share the limit. The key is the name of an argument,
            ``header:NAME``, or a callable of the task's args, kwargs and headers that returns str,
            int, bool or None. Without a key, all calls of the task share the limit.
        burst: tasks that may start at once after a pause. At most limit + *burst* - 1 tasks start
            in any window of one period.
        name: tasks whose rates have the same name share the limit, per key. The rates must be equal
            except for *key*. By default each task has a limit of its own.
        overrides: other limits for some keys, such as ``{"gold-corp": "1000/m"}``, or a callable
            that gets a key and returns its limit, or None for the usual limit.
        concurrent: tasks of one key that may run at the same time, on all workers. None means no
            such limit.

    Raises:
        SettingsError: an argument is invalid.
    """

    limit: str = UNLIMITED
    key: str | KeyFunction | None = None
    burst: int = 1
    name: str | None = None
    overrides: Overrides | None = field(default=None, hash=False)
    concurrent: int | None = None

    def __post_init__(self) -> None:
        found = isinstance(self.limit, str) and _RATE.fullmatch(self.limit)
        _expect(found, f"a rate {_EXPECTED}", self.limit)
        most = MOST_PER_SECOND * self.period_us // 1_000_000
        _expect(self.count <= most, f"a rate of at most {MOST_PER_SECOND}/s, or none", self.limit)
        has_limit = self.limit != UNLIMITED or self.concurrent is not None
        _expect(has_limit, f"a rate {_EXPECTED}, or with concurrent=2", self)
        is_name = isinstance(self.key, str) and self.key.removeprefix(HEADER_PREFIX) != ""
        _expect(
            self.key is None or is_name or callable(self.key),
            f"the key of a rate to be the name of an argument, {HEADER_PREFIX}NAME, a callable of "
            "(args, kwargs, headers), or None",
            self.key,
        )
        concurrent = 1 if self.concurrent is None else self.concurrent
        for name, value in (("burst", self.burst), ("concurrent", concurrent)):
            fits = type(value) is int and 1 <= value <= MOST_BURST
            _expect(fits, f"{name} to be a whole number from 1 to {MOST_BURST}", value)
        is_line = isinstance(self.name, str) and is_text(self.name) and "\n" not in self.name
        _expect(
            self.name is None or (is_line and 0 < len(self.name) <= LONGEST_KEY),
            f"the name of a rate to be one line of 1 to {LONGEST_KEY} characters, or None",
            self.name,
        )
        by_key = {} if callable(self.overrides) else self.overrides or {}
        _expect(
            isinstance(by_key, Mapping) and all(isinstance(key, str) for key in by_key),
            'the overrides of a rate to be a dict of limits by key, such as {"gold-corp": '
            '"1000/m"}, or a callable of the key',
            self.overrides,
        )
        for limit in by_key.values():
            self._at(limit)

    def __repr__(self) -> str:
        given = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        more = [f"{name}={value!r}" for name, value, usual in given if value != usual]
        return f"Rate({', '.join(more)})".replace("(limit=", "(")

    @classmethod
    def of(cls, value: Any) -> Rate:
        """Convert a Rate, a text such as "100/m", or a dict of Rate's arguments to a Rate."""
        if isinstance(value, Rate):
            return value
        if not isinstance(value, Mapping):
            return cls(value)
        names = [each.name for each in fields(cls)]
        if not value.keys() <= set(names):
            raise SettingsError(f"expected a rate as a dict of {names}, got {dict(value)!r}")
        return cls(**value)

    @property
    def shown(self) -> str:
        """The limit and the burst, as tables show them."""
        limit = "unlimited" if self.limit == UNLIMITED else self.limit
        return limit if self.burst == 1 else f"{limit}, burst {self.burst}"

    # --- as numbers ----------------------------------------------------------------------

    @cached_property
    def count(self) -> int:
        """The number of tasks that may start in a period."""
        return int(self._parts[0])

    @cached_property
    def period_us(self) -> int:
        return int(self._parts[1] or 1) * _SECONDS[self._parts[2]] * 1_000_000

    @cached_property
    def spacing_us(self) -> int:
        """Microseconds between two task starts at a steady rate."""
        return -(-self.period_us * (1000 + MARGIN_PER_MILLE) // (1000 * self.count))

    @cached_property
    def window_us(self) -> int:
        """The length of one period plus a safety margin, in microseconds."""
        return self.period_us + self.period_us * MARGIN_PER_MILLE // 1000

    @cached_property
    def most(self) -> int:
        """The maximum number of task starts within :attr:`window_us` microseconds."""
        return self.count + self.burst - 1

    @cached_property
    def catch_up_us(self) -> int:
        """The microseconds by which a task may start late without delaying the tasks behind it."""
        return min(self.period_us // 2, _CATCH_UP_US)

    @cached_property
    def ahead_us(self) -> int:
        """Microseconds by which a burst lets a task start before its regular start time."""
        return (self.burst - 1) * self.spacing_us

    @cached_property
    def noted_each(self) -> int:
        """The interval between stored task starts: 3 means that each third start is stored."""
        return -(-self.most // MOST_KEPT_STARTS)

    @cached_property
    def noted(self) -> int:
        """The maximum number of stored start times."""
        return self.most // self.noted_each

    @cached_property
    def numbers(self) -> str:
        """The rate in numbers (spacing, period and so on) as text, for the Redis scripts."""
        pace = f"{self.spacing_us} {self.ahead_us} {self.period_us} {self.window_us}"
        return f"{pace} {self.catch_up_us} {self.noted_each} {self.noted}"

    @property
    def _parts(self) -> tuple[str, str, str]:
        found = _RATE.fullmatch(self.limit)
        assert found is not None
        return found[1], found[2], found[3]

    # --- whose line ----------------------------------------------------------------------

    def for_key(self, key: str | None) -> Rate:
        """Return the rate of one *key*: this rate, or its override for the key.

        Raises any error of a callable *overrides*, and SettingsError if its result is neither a
        valid limit nor None.
        """
        if key is None or not self.overrides:
            return self
        found = self.overrides(key) if callable(self.overrides) else self.overrides.get(key)
        return self if found is None else self._at(found)

    def _at(self, limit: str) -> Rate:
        return replace(self, limit=limit, overrides=None)

    # --- the key ----------------------------------------------------------------------

    def signature_of(self, task: str, run: Callable[..., Any]) -> Signature | None:
        """Return the signature of *run*, the task's function, or None if unknown.

        Raises SettingsError if the rate's key is not an argument of the function.
        """
        try:
            found = signature(run)
        except (TypeError, ValueError):
            return None
        key, parameters = self.key, found.parameters
        if not isinstance(key, str) or key.startswith(HEADER_PREFIX) or key in parameters:
            return found
        if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            return found
        raise SettingsError(
            f"native_delay_rates: expected the key of {task} to be one of its arguments, "
            f"{', '.join(parameters) or 'of which it has none'}; got {key!r}"
        )

    def key_of(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        headers: Mapping[str, Any],
        signature: Signature | None = None,
    ) -> str | None:
        """Return the key of a task call, or None if the call has no key.

        *signature* is the signature of the task's function. Raises ValueError for an invalid key,
        and any error of a callable key.
        """
        key = self.key
        if key is None:
            return None
        if not isinstance(key, str):
            found = key(args, kwargs, headers)
            if not isinstance(found, str | int | None):
                # The text of another object may differ for each task, and so the key would, too.
                raise ValueError(
                    f"expected the key callable to return str, int, bool or None, got {found!r}"
                )
        elif key.startswith(HEADER_PREFIX):
            found = headers.get(key.removeprefix(HEADER_PREFIX))
        elif key in kwargs:
            found = kwargs[key]
        else:
            found = _positional(key, args, signature)
        return None if found is None else key_text(found)


def key_text(key: object) -> str:
    """Return the text of a task's key: its first 200 characters. Raises ValueError if invalid."""
    text = str(key)[:LONGEST_KEY]
    if not is_text(text):
        raise ValueError(f"expected a key without lone surrogates, got {text!r}")
    return text


def _positional(name: str, args: Sequence[Any], signature: Signature | None) -> Any:
    """Return the value or the default of the argument *name*, or None."""
    if signature is None:
        return None
    for number, parameter in enumerate(signature.parameters.values()):
        if parameter.name != name or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY and number < len(args):
            return args[number]
        return None if parameter.default is parameter.empty else parameter.default
    return None


def _expect(fits: object, expected: str, got: object) -> None:
    if not fits:
        raise SettingsError(f"expected {expected}, got {got!r}")
