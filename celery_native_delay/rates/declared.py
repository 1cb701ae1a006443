"""Keys that are declared for a task: ``Debounce``, ``Throttle`` and ``Unique``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import Any, Literal

from .rate import KeyFunction, Rate


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


@dataclass(frozen=True)
class Throttle(DeclaredKey):
    """Throttles each call of a task, as ``Delay.throttle`` does with the same arguments."""

    seconds: float
    edge: Literal["leading", "trailing", "both"] = "leading"
    announce: bool = False


@dataclass(frozen=True)
class Unique(DeclaredKey):
    """Makes each call of a task unique, as ``Delay.unique`` does with the same arguments."""

    until: Literal["start", "end"] = "end"
