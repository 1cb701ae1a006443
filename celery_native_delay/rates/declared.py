"""Keys that are declared for a task: ``Debounce``, ``Throttle`` and ``Unique``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import Any, Literal, TypeAlias, get_args

from ..due_time import LONGEST_COUNTDOWN_SECONDS
from ..durations import duration
from ..errors import InvalidDueTime, SettingsError
from .rate import KeyFunction, Rate

Edge: TypeAlias = Literal["leading", "trailing", "both"]
Until: TypeAlias = Literal["start", "end"]


@dataclass(frozen=True)
class DeclaredKey:
    """A key of each call of a task: the name of an argument, or as the *key* of a ``Rate``."""

    key: str | KeyFunction

    def __post_init__(self) -> None:
        Rate("1/s", key=self.key)  # raises SettingsError

    def key_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], headers: Any, run: Any
    ) -> str | None:
        """Return the key of one call; None without one: then the call is an ordinary one."""
        rate = Rate("1/s", key=self.key)
        found: Signature | None = rate.signature_of("the task", run)
        return rate.key_of(args, kwargs, headers, found)


@dataclass(frozen=True)
class Debounce(DeclaredKey):
    """Debounces each call of a task, as ``Delay.debounce`` does with the same arguments.

    >>> install(app, keys={"shop.reindex": Debounce(key="user", seconds=5)})
    """

    seconds: float
    max_wait_seconds: float | None = None
    announce: bool = False
    collect: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        periods_us(self.seconds, self.max_wait_seconds)
        check_collect(self.collect)


@dataclass(frozen=True)
class Throttle(DeclaredKey):
    """Throttles each call of a task, as ``Delay.throttle`` does with the same arguments."""

    seconds: float
    edge: Edge = "leading"
    announce: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        microseconds("seconds", self.seconds)
        check_word("edge", self.edge, Edge)


@dataclass(frozen=True)
class Unique(DeclaredKey):
    """Makes each call of a task unique, as ``Delay.unique`` does with the same arguments."""

    until: Until = "end"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word("until", self.until, Until)


def microseconds(name: str, seconds: object) -> int:
    """Convert the argument *name* of a key. Raises InvalidDueTime."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds <= LONGEST_COUNTDOWN_SECONDS):  # type: ignore[operator]
        longest = duration(LONGEST_COUNTDOWN_SECONDS)
        raise InvalidDueTime(
            f"expected {name} to be a number above 0, of at most {longest}, got {seconds!r}"
        )
    return round(seconds * 1_000_000)  # type: ignore[operator]


def periods_us(seconds: float, max_wait_seconds: float | None) -> tuple[int, int | None]:
    """Convert the periods of a debounce to microseconds. Raises InvalidDueTime."""
    quiet_us = microseconds("seconds", seconds)
    if max_wait_seconds is None:
        return quiet_us, None
    longest_us = microseconds("max_wait_seconds", max_wait_seconds)
    if longest_us < quiet_us:
        raise InvalidDueTime(
            f"expected max_wait_seconds of at least {seconds=}, got {max_wait_seconds!r}"
        )
    return quiet_us, longest_us


def check_collect(collect: int | None) -> None:
    """Check how many calls a debounce collects. Raises SettingsError."""
    if collect is not None and (type(collect) is not int or not 2 <= collect <= 1000):
        raise SettingsError(f"expected collect to be a number from 2 to 1000, got {collect!r}")


def check_word(name: str, value: object, words: Any) -> None:
    """Check that *value* is one of *words*, a ``Literal``. Raises SettingsError."""
    known = get_args(words)
    if value not in known:
        raise SettingsError(f"expected {name} to be {' or '.join(map(repr, known))}, got {value!r}")
