"""Executors report the number of sent tasks to the driver by UDP, during a Spark job.

The driver shows these numbers in a terminal or a notebook. If the job is interrupted, the driver
logs them, because Spark has results only of ended Spark tasks. If a UDP datagram is lost, the
numbers are too low.

On Ctrl-C, PySpark fails to cancel the Spark job: PySpark's signal handler calls the JVM on a
connection that is in use. So this module cancels the job, and tells executors to stop.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Condition, Thread
from time import monotonic
from typing import Any, Self

from pyspark import TaskContext

from ..bulk.batch import Bulk
from ..durations import duration
from ..now import moment, time_ns

logger = logging.getLogger(__name__)

#: Seconds between two reports of a Spark task.
_REPORT_SECONDS = 0.2

#: Seconds for which an interrupted driver waits for the last reports; Spark kills tasks after 2 s.
_LAST_REPORT_SECONDS = 2.0

_STOP = b"stop"


#: Seconds between two lines of progress, and from the first confirm to the estimate of the end.
_SHOWN_EVERY_SECONDS, _ESTIMATED_AFTER_SECONDS = 0.5, 5.0


@dataclass(frozen=True)
class CountsReport:
    """The number of Celery tasks that one Spark task attempt has sent until now.

    Before, an attempt that encodes rows reports their number, and some of their due times.
    """

    job: str
    partition: int
    attempt: int
    sent: int = 0
    confirmed: int = 0
    in_doubt: int = 0
    is_last: bool = False
    encoded: int = 0
    some_us: Sequence[int] = ()


class LiveCounts:
    """Receives the number of sent tasks from executors, during a ``with`` block."""

    def __init__(self, spark: Any, job: str) -> None:
        self._job = job
        self._reports: dict[tuple[int, int], CountsReport] = {}
        self._senders: set[Any] = set()
        self._changed = Condition()
        self._is_stopped = False
        #: By partition: the report about its encoded rows.
        self._encoded: dict[int, CountsReport] = {}
        self._shows = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._began = self._next_shown = 0.0
        self._is_estimated = False
        self._socket: socket.socket | None = None
        self.address: tuple[str, int] | None = None
        """The host and port to which executors report; None with Spark Connect."""
        self._context = context_of(spark)
        if self._context is not None:
            conf = self._context.getConf()
            host = conf.get("spark.driver.host", "127.0.0.1").strip("[]")
            bind = conf.get("spark.driver.bindAddress", host).strip("[]")
            with suppress(OSError):
                family, kind, *_, at = socket.getaddrinfo(bind, 0, type=socket.SOCK_DGRAM)[0]
                self._socket = socket.socket(family, kind)
                self._socket.bind(at)
                self.address = host, self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        if self._context is not None:
            self._context.addJobTag(self._job)
        if self.address is not None:
            Thread(target=self._listen, name="native-delay-live-counts", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._next_shown:
            sys.stderr.write("\n")
        if self._context is not None:
            with suppress(Exception):  # the JVM may be gone
                self._context.removeJobTag(self._job)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(b"", self._socket.getsockname())  # ends the thread
            self._socket.close()

    def stop(self) -> str:
        """Cancel the Spark job; return a text with the number of tasks that executors sent."""
        with self._changed:
            self._is_stopped = True
            for sender in self._senders:
                self._send_stop(sender)
            self._changed.wait_for(
                lambda: all(report.is_last for report in self._reports.values()),
                _LAST_REPORT_SECONDS,
            )
            account = self._account()
        if self._context is not None:
            with suppress(Exception):  # the JVM may be gone
                self._context.cancelJobsWithTag(self._job)
        return account

    def sent_again(self, kept: Collection[tuple[int, int]]) -> int:
        """Return how many tasks were sent by attempts that Spark repeated, at least.

        *kept* has the partition and the attempt of each result.
        """
        with self._changed:
            reports = self._reports.items()
            return sum(report.sent for attempt, report in reports if attempt not in kept)

    def _account(self) -> str:
        reports = self._reports.values()
        if not reports:
            return "no executor has reported what it has sent"
        sent, confirmed, in_doubt = (
            sum(getattr(report, name) for report in reports)
            for name in ("sent", "confirmed", "in_doubt")
        )
        counts = f"{sent:,} sent, {confirmed:,} confirmed, {in_doubt:,} in doubt"
        silent = sum(not report.is_last for report in reports)
        more = f"; {silent} of {len(reports)} partitions may have sent more" if silent else ""
        return counts + more

    def _listen(self) -> None:
        assert self._socket is not None
        while True:
            try:
                text, sender = self._socket.recvfrom(1024)
                if not text:
                    return
                report = CountsReport(**json.loads(text))
            except OSError:
                return
            except (ValueError, TypeError):
                continue  # this datagram is not from our executors
            if report.job == self._job:
                self._add(report, sender, monotonic())

    def _add(self, report: CountsReport, sender: Any, now: float) -> None:
        if report.encoded:
            self._encoded[report.partition] = report
            return
        with self._changed:
            key = report.partition, report.attempt
            known = self._reports.get(key)
            if known is None or report.is_last or report.sent > known.sent:
                self._reports[key] = report
            self._senders.add(sender)
            if self._is_stopped:
                self._send_stop(sender)
            self._changed.notify()
        if report.confirmed and not self._began:
            self._began = now
        self._show(now)

    def _show(self, now: float) -> None:
        """Show the progress; after some seconds, log which tasks will be sent too late."""
        reports = self._reports.values()
        sent, confirmed = (sum(getattr(r, name) for r in reports) for name in ("sent", "confirmed"))
        total = sum(report.encoded for report in self._encoded.values())
        per_second = confirmed / (now - self._began) if now > self._began > 0 else 0.0
        left_seconds = max(total - confirmed, 0) / per_second if per_second else None
        if self._shows and now >= self._next_shown:
            self._next_shown = now + _SHOWN_EVERY_SECONDS
            left = "" if left_seconds is None else f", {duration(round(left_seconds))} left"
            sys.stderr.write(
                f"\r{sent:,} of {total:,} tasks sent, {confirmed:,} confirmed, "
                f"{per_second:,.0f}/s{left}\033[K"
            )
            sys.stderr.flush()
        is_measured = now >= self._began + _ESTIMATED_AFTER_SECONDS
        if left_seconds and is_measured and not self._is_estimated:
            self._is_estimated = True
            self._warn_of_late(per_second, time_ns() // 1000 - round((now - self._began) * 1e6))

    def _warn_of_late(self, per_second: float, began_us: int) -> None:
        """Log which tasks will be sent after they are due; those due first are sent first."""
        due = sorted(
            (due_us, report.encoded / len(report.some_us))
            for report in self._encoded.values()
            for due_us in report.some_us
        )
        sent, late, late_us = 0.0, 0.0, []
        for due_us, count in due:
            sent += count
            if due_us < began_us + sent / per_second * 1e6:
                late += count
                late_us.append(due_us)
        if late_us:
            ends_us = began_us + round(sent / per_second * 1e6)
            logger.warning(
                "native delay: at %s tasks/s, sending ends at %s: about %s of %s tasks will be "
                "late, those due from %s to %s",
                f"{per_second:,.0f}",
                f"{moment(ends_us):%Y-%m-%d %H:%M:%SZ}",
                f"{late:,.0f}",
                f"{sent:,.0f}",
                f"{moment(late_us[0]):%H:%M:%SZ}",
                f"{moment(late_us[-1]):%H:%M:%SZ}",
            )

    def _send_stop(self, sender: Any) -> None:
        assert self._socket is not None
        with suppress(OSError):
            self._socket.sendto(_STOP, sender)


def context_of(spark: Any) -> Any:
    """Return the SparkContext of a session; None with Spark Connect."""
    try:
        return spark.sparkContext
    except Exception:  # the error differs between releases of Spark
        return None


def tell_encoded(
    address: tuple[str, int] | None, job: str, count: int, some_us: Sequence[int]
) -> None:
    """Tell the driver how many rows a Spark task attempt has encoded, and some due times."""
    context = TaskContext.get()
    if context is not None:
        reporter = Reporter(address, job, context.partitionId(), context.taskAttemptId())
        reporter.send(encoded=count, some_us=some_us)
        reporter.close()


class Reporter:
    """Tells the driver how many Celery tasks one Spark task attempt has sent."""

    def __init__(
        self, address: tuple[str, int] | None, job: str, partition: int, attempt: int
    ) -> None:
        self._identity = job, partition, attempt
        self._socket: socket.socket | None = None
        self._next = 0.0
        if address is not None:
            with suppress(OSError):
                family, kind, *_, at = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
                self._socket = socket.socket(family, kind)
                self._socket.setblocking(False)
                self._socket.connect(at)

    def report(self, batch: Bulk, *, is_last: bool = False) -> bool:
        """Send the counts of *batch* (a bulk sender) to the driver, at most once per 0.2 s.

        Returns True if the driver has cancelled the Spark job, so that the executor must stop.
        """
        if self._socket is None or (monotonic() < self._next and not is_last):
            return False
        self._next = monotonic() + _REPORT_SECONDS
        sent, in_doubt = batch.result.sent, batch.unconfirmed_count
        confirmed = sent - in_doubt - len(batch.result.refused)
        self.send(sent=sent, confirmed=confirmed, in_doubt=in_doubt, is_last=is_last)
        with suppress(OSError):
            return self._socket.recv(16) == _STOP
        return False

    def send(self, **counts: Any) -> None:
        """Send a :class:`CountsReport` to the driver."""
        if self._socket is not None:
            report: Any = asdict(CountsReport(*self._identity)) | counts
            with suppress(OSError):
                self._socket.send(json.dumps(report).encode())

    def end(self, batch: Bulk) -> None:
        """Send the final counts of sent tasks to the driver, then close the socket."""
        self.report(batch, is_last=True)
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
