"""What drivers, executors and workers ask of any store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import urlsplit

from ..errors import FenceUnavailable
from ..finding import Finding
from ..settings import FENCE_URLS_TEXT, is_fence_url
from .run import Record

#: Modules by the schemes of ``run``; imported when first used.
_MODULES = {"redis": ".redis", "rediss": ".redis", "redis+socket": ".redis"}


class FenceStore(Protocol):
    """Records of runs. Every method raises FenceUnavailable when the store cannot be asked."""

    def open(self, run: str, record: Record, *, ttl_seconds: float, reopen: bool = False) -> Record:
        """Keep an open *record*; one that is open already gets the later deadline.

        Args:
            run: the name of the run.
            record: an open one.
            ttl_seconds: how long to keep it.
            reopen: replace one that is aborted.

        Returns:
            the record in force: a sealed one stays.
        """

    def seal(self, run: str, record: Record, *, ttl_seconds: float) -> Record:
        """Replace an open record, or none, by *record*.

        Returns:
            the record in force: what was sealed before stays.
        """

    def load(self, runs: Sequence[str]) -> list[Record | None]:
        """The records of these runs, None for those that the store has not."""

    def findings(self) -> list[Finding]:
        """What is wrong with the store; that it is away as well."""


def fence_store(
    url: str, *, timeout_seconds: float = 5.0, patience_seconds: float = 0.0
) -> AbstractContextManager[FenceStore]:
    """The store at *url*, whose connections end with the ``with`` block.

    Args:
        url: redis://, rediss:// or redis+socket://.
        timeout_seconds: of connecting, and of each answer.
        patience_seconds: to try on while it cannot be reached.

    Raises:
        FenceUnavailable: no such kind of store, or its client is not installed.
    """
    scheme = urlsplit(url).scheme
    if not is_fence_url(url):
        raise FenceUnavailable(
            f"expected a fence URL that starts with {FENCE_URLS_TEXT}, "
            f"got {scheme or 'no scheme'!r}"
        )
    module = import_module(_MODULES[scheme], __package__)
    store = module.Store(url, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds)
    return cast("AbstractContextManager[FenceStore]", store)
