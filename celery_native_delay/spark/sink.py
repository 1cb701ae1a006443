"""The sinks ``df.write.format("celery")`` and ``df.writeStream.format("celery")``, for Spark 4.

Options, columns and the app are checked before a row is sent. A sink cannot return a result. If you
need a result, use ``FanOut``.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

from ..app.runs import open_run
from ..durations import seconds_of
from ..errors import FanOutFailed, InvalidFanOut
from ..now import moment
from ..records.runs import BATCH_KIND, RUN_KIND, RunRecord
from .app import Call, describe, on_app
from .encode import Encoder
from .options import FanOutOptions
from .sending import Receipt, SendJob, close_try, send_rows, warn_of_late_sending
from .slots import Slot, check_type, no_such_column, slots

logger = logging.getLogger(__name__)

#: Options of a stream that Spark itself reads.
_OF_STREAMS = frozenset(("checkpointlocation", "queryname", "outputmode"))


@dataclass
class Sent(WriterCommitMessage):
    """The report of one partition, which Spark passes to :meth:`Writer.commit`."""

    receipt: Receipt


def parsed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed options of the sink: arguments of FanOutOptions, and ``on_reject``.

    Raises:
        InvalidFanOut: an option is unknown or missing, or has a wrong value.
    """
    values: dict[str, Any] = {"on_reject": "fail"}
    for name, text in texts.items():
        name = name.lower()
        if name in ("rate", "max_rate", "connections"):
            raise InvalidFanOut(
                f"format('celery') sends each partition by itself, and cannot keep {name}: use "
                f"FanOut(df, {name}=…), in a stream within foreachBatch"
            )
        if name not in _PARSERS:
            raise InvalidFanOut(
                f"unknown option {name!r} of format('celery'); known: {', '.join(_PARSERS)}"
            )
        option, parse = _PARSERS[name]
        try:
            values[option] = parse(text)
        except ValueError as exc:
            raise InvalidFanOut(f"option {name} of format('celery'): {exc}") from exc
    for name in ("app", "task"):
        if name not in values:
            raise InvalidFanOut(f"expected option {name} of format('celery'), got none")
    return values


class Writer(DataSourceArrowWriter):
    """Writes the rows of one Spark job as delayed Celery tasks."""

    #: True if tasks have the name of their run in a header, by which they can be cancelled.
    _is_run = True
    _mode = "mode"

    def __init__(self, schema: Any, texts: Mapping[str, str], *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidFanOut(
                f'expected {self._mode}("append"): what has been sent cannot be overwritten'
            )
        options = parsed(texts)
        self._fails_on_reject = options.pop("on_reject") == "fail"
        self._has_run_id = "run_id" in options
        self._options = fan_out = FanOutOptions(**options)
        self._job_id = uuid4().hex
        facts = describe(Call.of(fan_out))
        read = list(slots(fan_out))
        self._positions = [_position(slot, schema.names) for slot in read]
        types = {}
        for slot, position in zip(read, self._positions, strict=True):
            types[slot.name] = schema.fields[position].dataType
            check_type(slot, types[slot.name], has_zone=fan_out.eta_zone is not None)
        self._types, self._longest_seconds = types, facts.longest_seconds
        self._queues = facts.queues if fan_out.check_queue else None

    def write(self, iterator: Iterator[Any]) -> Sent:
        """Send the rows of one partition as delayed tasks.

        Raises:
            FanOutFailed: the broker has not confirmed some tasks. Spark sends the partition again.
            InvalidFanOut: a row is rejected, and the option *on_reject* is "fail".
        """
        run_id = self._options.run_id
        run = self._open(run_id, self._job_id, RUN_KIND) if self._has_run_id else None
        return self._send(iterator, run_id, self._job_id, run)

    def commit(self, messages: list[Any], *_batch: int) -> None:
        """Log the number of sent tasks, and store the numbers of the run."""
        receipts = [message.receipt for message in messages]
        _log_rejects(receipts)
        if self._is_run and self._has_run_id:
            close_try(self._options.app, self._options.run_id, receipts)

    def abort(self, messages: list[Any], *_batch: int) -> None:
        """Log that the Spark job failed. Workers run the tasks that were sent."""
        sent = sum(message.receipt.sent for message in messages if message is not None)
        logger.error(
            "native delay: the job failed after it had sent at least %d tasks, which will run; "
            "with the same run_id and id_cols it sends the same task ids again",
            sent,
        )

    # --- private -------------------------------------------------------------------------

    def _open(self, run_id: str, job_id: str, kind: str) -> RunRecord | None:
        """Note that this partition is sent, so that its repetition rejects the same rows."""
        options = self._options
        return on_app(options.app, open_run, run_id, options.task, options.now_us, job_id, kind)

    def _send(
        self, batches: Iterable[Any], run_id: str, job_id: str, run: RunRecord | None
    ) -> Sent:
        fan_out = self._options
        if run is not None:
            fan_out = replace(fan_out, now=moment(run.began_us))
        encoder = Encoder(
            fan_out, self._types, longest_seconds=self._longest_seconds, queues=self._queues
        )
        context = TaskContext.get()
        assert context is not None
        receipt = Receipt(context.partitionId(), context.taskAttemptId())
        first, count = None, 0
        job = SendJob.of(fan_out, run, job_id)
        if not self._is_run:
            job = replace(job, run=None)
        for failure in send_rows(self._encoded(encoder, batches, run_id), job, receipt):
            first, count = first or failure, count + 1
        if first is not None:
            raise FanOutFailed(
                f"{count} of {receipt.rows} tasks are not confirmed; the first: "
                f"{first.task_id} {first.outcome}: {first.reason}"
            )
        return Sent(receipt)

    def _encoded(
        self, encoder: Encoder, batches: Iterable[Any], run_id: str
    ) -> Iterator[tuple[Any, ...]]:
        for batch in batches:
            columns = [batch.column(position) for position in self._positions]
            for number, row in enumerate(encoder.rows(columns, run_id)):
                if self._fails_on_reject and row[-1] is not None:
                    raise InvalidFanOut(
                        f"{row[-1]}: {_shown(batch, number)}; leave such rows out, or say "
                        f"on_reject='skip'"
                    )
                yield row


class StreamWriter(Writer, DataSourceStreamWriter):
    """Writes each micro batch as delayed tasks; a repeated batch has the same task ids."""

    _is_run = False
    _mode = "outputMode"

    def __init__(self, schema: Any, texts: Mapping[str, str], *, overwrite: bool) -> None:
        own = {name: text for name, text in texts.items() if name.lower() not in _OF_STREAMS}
        super().__init__(schema, own, overwrite=overwrite)

    def write(self, iterator: Iterator[Any]) -> Sent:
        """Send the rows of one partition of a micro batch as delayed tasks."""
        context = TaskContext.get()
        assert context is not None
        query, batch = map(context.getLocalProperty, _QUERY_AND_BATCH)
        run_id = f"{self._options.run_id if self._has_run_id else query}-{batch}"
        job_id = f"{self._job_id}-{batch}"
        return self._send(iterator, run_id, job_id, self._open(run_id, job_id, BATCH_KIND))


#: The local properties with a stream's query id and batch number, which foreach() reads, too.
_QUERY_AND_BATCH = ("sql.streaming.queryId", "streaming.sql.batchId")


def _position(slot: Slot, columns: Sequence[str]) -> int:
    """Return the position of the column that an option names, ignoring case.

    Raises:
        InvalidFanOut: there is no such column, or several columns have this name.
    """
    name = slot.column
    if "." in name and name in columns:  # as in FanOut
        raise no_such_column(slot, columns)
    if name[:1] == name[-1:] == "`":
        name = name[1:-1].replace("``", "`")
    alike = [place for place, one in enumerate(columns) if one.lower() == name.lower()]
    found = [place for place in alike if columns[place] == name] or alike
    if len(found) != 1:
        raise no_such_column(slot, columns)
    return found[0]


def _shown(batch: Any, number: int) -> str:
    try:
        return f"{batch.slice(number, 1).to_pylist()[0]!r:.300}"
    except UnicodeDecodeError:
        return f"row {number} of its batch"


def _log_rejects(receipts: list[Receipt]) -> None:
    rejected: Counter[str] = sum((receipt.rejected for receipt in receipts), Counter())
    confirmed = sum(receipt.confirmed for receipt in receipts)
    late = sum(receipt.sent_after_due for receipt in receipts)
    warn_of_late_sending(late, sum(receipt.sent for receipt in receipts))
    logger.info("native delay: %d tasks sent and confirmed", confirmed)
    for reason, count in rejected.most_common():
        logger.warning("native delay: %d rows rejected: %s", count, reason)


def _names(text: str) -> list[str]:
    """Parse column names from a JSON list, or from names separated by commas."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [name.strip() for name in text.split(",") if name.strip()]


def _named(text: str) -> Any:
    """Parse column names, or a JSON object such as ``{"argument": "column"}``."""
    return json.loads(text) if text.lstrip().startswith("{") else _names(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def _on_reject(text: str) -> str:
    if text not in ("fail", "skip"):
        raise ValueError(f'expected "fail" or "skip", got {text!r}')
    return text


#: For each option: its name in :class:`FanOutOptions`, and the function that parses its text.
_PARSERS: dict[str, tuple[str, Any]] = {
    **{name: (name, str) for name in ("app", "task", "eta_zone", "run_id", "past")},
    **{f"{name}_col": (name, str) for name in ("countdown", "eta", "queue", "priority", "expires")},
    **{"kwargs_cols": ("kwargs", _named), "args_cols": ("args", _names)},
    **{"id_cols": ("id_cols", _names), "on_reject": ("on_reject", _on_reject)},
    **{"smear": ("smear", seconds_of), "max_body_bytes": ("max_body_bytes", int)},
    **{name: (name, _flag) for name in ("check_task", "check_queue", "once")},
}
