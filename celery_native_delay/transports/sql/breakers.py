"""Breakers, which tell when something has been away for too long. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..interface import Outage


@dataclass
class Breaker:
    """A breaker opens when what it watches has failed again and again for *outage_seconds*.

    *what* is what is done. It opens once; the first success closes it.
    """

    what: str
    outage_seconds: float
    since: float | None = None
    """Seconds on the caller's clock of the first failure; None while all is well."""
    is_open: bool = False

    def failed(self, error: BaseException, *, now: float) -> Outage | None:
        """Note a failure; the outage to tell of, if it has just become too long."""
        if self.since is None:
            self.since = now
        away_seconds = now - self.since
        if self.is_open or away_seconds < self.outage_seconds:
            return None
        self.is_open = True
        return Outage(self.what, away_seconds, f"{type(error).__name__}: {error}")

    def succeeded(self, *, now: float) -> float | None:
        """Note that it works; for how many seconds it had not, None if it always has."""
        if self.since is None:
            return None
        away_seconds, self.since, self.is_open = now - self.since, None, False
        return away_seconds


def not_told(outage: Outage) -> None:
    """Tell of no outage: a process that only publishes is told by an error."""


@dataclass
class Breakers:
    """Breakers for all that a store is asked to do; *on_outage* is called when one opens."""

    outage_seconds: float
    on_outage: Callable[[Outage], object] = not_told
    store: Breaker = field(init=False)
    fetch: Breaker = field(init=False)
    dispatch: Breaker = field(init=False)

    def __post_init__(self) -> None:
        self.store = Breaker("storing", self.outage_seconds)
        self.fetch = Breaker("fetching what is due", self.outage_seconds)
        self.dispatch = Breaker("dispatching what is due", self.outage_seconds)

    def give_up_after(self, outage_seconds: float) -> None:
        """Take an outage of *outage_seconds* for too long from now on."""
        for breaker in (self.store, self.fetch, self.dispatch):
            breaker.outage_seconds = outage_seconds

    def failed(self, breaker: Breaker, error: BaseException, *, now: float) -> None:
        outage = breaker.failed(error, now=now)
        if outage is not None:
            self.on_outage(outage)
