"""The user's own database transaction, which rows of the store join."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from secrets import token_hex
from types import MappingProxyType
from typing import Any, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import described

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until a worker publishes the immediate task of a process that died after its commit.
RELAY_SECONDS = 5.0

#: Transactions of SQLAlchemy that are open in this context, by their store.
_open: ContextVar[Mapping[Any, UsersTransaction]] = ContextVar(
    "open_transactions", default=MappingProxyType({})
)
_outside: ContextVar[bool] = ContextVar("outside_transaction", default=False)


@contextmanager
def outside_transaction() -> Iterator[None]:
    """Publish tasks at once in a ``with`` block, whatever becomes of the user's transaction."""
    reset = _outside.set(True)
    try:
        yield
    finally:
        _outside.reset(reset)


def is_outside() -> bool:
    return _outside.get()


def transaction_with(store: Any) -> UsersTransaction | None:
    """Return the transaction that :func:`joined` has opened for *store* in this context."""
    return None if _outside.get() else _open.get().get(store)


@contextmanager
def joined(store: Any, transaction: UsersTransaction) -> Iterator[None]:
    """Let *store* read and write in *transaction* in a ``with`` block, in this context."""
    reset = _open.set({**_open.get(), store: transaction})
    try:
        yield
    finally:
        _open.reset(reset)


class UsersTransaction(ABC):
    """An open transaction of the user. Rows that it writes exist if, and only if, it commits.

    Its immediate tasks are rows that this process has already taken with :attr:`token`. After the
    commit it publishes them. If it dies before, their lease ends, and a worker publishes them.
    """

    #: Publishes the rows that were taken with a token; set by the channel that sends tasks.
    relay: Callable[[str], object] = staticmethod(lambda token: None)

    def __init__(self) -> None:
        self.token = token_hex(16)
        self._has_immediate = False

    @abstractmethod
    def do(self, work: Callable[[Any], T]) -> T:
        """Call *work* with a SQLAlchemy connection that is in the transaction."""

    @abstractmethod
    def after_commit(self, call: Callable[[], object]) -> None:
        """Call *call* after the commit. A rollback, also of a savepoint, forgets the call."""

    def added(self, *, immediate: bool, call: Callable[[], object]) -> None:
        """Note rows that were written; *call* follows the commit, as does the relay."""
        if immediate:
            self._has_immediate = True
            self.after_commit(self._relay)
        else:
            self.after_commit(call)

    def _relay(self) -> None:
        if not self._has_immediate:
            return
        token, self.token = self.token, token_hex(16)
        self._has_immediate = False
        try:
            self.relay(token)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # the transaction is committed: its caller must not fail
            logger.warning(
                "native delay: a worker publishes the tasks of a transaction, as this process "
                "cannot: %s",
                described(exc),
            )
