"""The fence of one run, as its driver and its executors use it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from secrets import token_hex
from time import time
from typing import TYPE_CHECKING, Self

from ..durations import duration
from ..errors import FanOutFailed, FenceUnavailable
from ..fence import fence_store
from ..fence.run import ABORTED, ALL, COMMITTED, MARGIN_SECONDS, OPEN, Record, Stamp

if TYPE_CHECKING:
    from .app import AppFacts
    from .options import FanOutOptions
    from .receipts import Receipt

logger = logging.getLogger(__name__)

#: Seconds to try on while the store cannot be reached: before anything is sent, and after all was.
OPEN_PATIENCE_SECONDS = 10.0
SEAL_PATIENCE_SECONDS = 60.0

_BY = "the driver"


@dataclass(frozen=True)
class Fence:
    """The fence of one run, as it goes from the driver to its executors."""

    url: str = field(repr=False)
    run: str
    timeout_seconds: float
    longest_seconds: float
    """The longest delay that a message of the run may have."""
    is_replayed: bool = False
    """True if the same run may be sent again, as a batch of a stream: the first one committed
    counts, and one that workers dropped may be committed after all."""

    @classmethod
    def of(cls, options: FanOutOptions, facts: AppFacts) -> Self | None:
        """The fence that *options* ask for, None without one.

        Sending twice under one run_id is sending two fenced runs: the second may be a repair.
        """
        if options.fence is None:
            return None
        settings = facts.delay_settings
        if settings.fence is None:
            logger.warning(
                "native delay: the run is fenced, but %s has no native_delay_fence: workers "
                "without that setting run what every attempt has sent",
                options.app,
            )
        run = f"{options.run_id}:{token_hex(4)}"
        return cls(options.fence, run, options.fence_timeout, settings.longest_delay_seconds)

    def stamp(self, partition: int, attempt: int) -> Stamp:
        """Stamp of the messages of one attempt, with random digits: Spark's numbers come again."""
        return Stamp(self.run, partition, f"{attempt}-{token_hex(4)}")

    def open(self) -> Record:
        """Say that the run is being sent; the time-out starts again.

        Raises:
            FenceUnavailable: nothing must be sent.
            FanOutFailed: the run is aborted.
        """
        now = time()
        with fence_store(self.url, patience_seconds=OPEN_PATIENCE_SECONDS) as store:
            record = store.open(
                self.run,
                Record(OPEN, now, deadline=now + self.timeout_seconds),
                ttl_seconds=self.longest_seconds + MARGIN_SECONDS,
                reopen=self.is_replayed,
            )
        if record.state == ABORTED:
            raise FanOutFailed(
                f"expected run {self.run} to be open, {record.by} has aborted it; nothing sent"
            )
        return record

    def commit(self, receipts: Sequence[Receipt]) -> None:
        """Seal the run: what the attempts of *receipts* sent runs, nothing else.

        Raises:
            FanOutFailed: it could not be sealed, or a worker had given it up.
        """
        stamps = [Stamp.parse(receipt.fence) for receipt in receipts if receipt.fence]
        now = time()
        last = max((receipt.last_eta for receipt in receipts), default="")
        wait_seconds = max(datetime.fromisoformat(last).timestamp() - now, 0) if last else 0.0
        winners = {str(stamp.partition): stamp.attempt for stamp in stamps}
        try:
            sealed = self._seal(Record(COMMITTED, now, winners=winners, by=_BY), wait_seconds)
        except FenceUnavailable as exc:
            raise FanOutFailed(
                f"run {self.run} is sent but not sealed: {exc}; its tasks wait until "
                f"{duration(self.timeout_seconds)} after it began, then native_delay_fence_policy "
                f"of the workers decides"
            ) from exc
        if sealed.state == ABORTED:
            raise FanOutFailed(
                f"run {self.run} was given up by {sealed.by}, who dropped its tasks "
                f"(native_delay_fence_policy): it was not sealed within "
                f"{duration(self.timeout_seconds)}; send it again with a longer fence_timeout"
            )
        if sealed.state == ALL:
            logger.warning(
                "native delay: run %s was given up by %s before it was sealed: a task that Spark "
                "sent twice may run twice; a longer fence_timeout prevents that",
                self.run,
                sealed.by,
            )

    def abort(self) -> None:
        """Seal the run: nothing of it runs. If the store cannot be reached, say so."""
        try:
            self._seal(Record(ABORTED, time(), by=_BY), self.longest_seconds)
        except FenceUnavailable as exc:
            logger.error(
                "native delay: run %s has failed but could not be sealed, so that "
                "native_delay_fence_policy of the workers decides about what was sent: %s",
                self.run,
                exc,
            )

    def _seal(self, record: Record, wait_seconds: float) -> Record:
        with fence_store(self.url, patience_seconds=SEAL_PATIENCE_SECONDS) as store:
            return store.seal(self.run, record, ttl_seconds=wait_seconds + MARGIN_SECONDS)
