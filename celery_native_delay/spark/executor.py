"""Functions for mapInArrow() on executors: check the Celery app, and send rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from ..errors import NativeDelayError
from .encode import SENT_COLUMNS
from .sending import Receipt, SendJob, send_rows

Batches = Iterator[Any]

#: The schema of a DataFrame whose rows are pickled answers of executors.
ANSWERS = "answer binary"

#: The columns of an encoded row that a ledger has, apart from *id_cols*.
LEDGER_COLUMNS = ("task_id", "due_us", "queue")

#: The largest number of answers in one Arrow batch.
_MOST_ANSWERS = 10_000


def asker(question: Callable[[], Any]) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that yields the answer of *question*, or its error."""

    def ask(batches: Batches) -> Batches:
        for _ in batches:
            try:
                yield _batch([question()])
            except NativeDelayError as exc:
                yield _batch([exc])

    return ask


def sender(job: SendJob, kept: Sequence[str] = ()) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that sends rows, and yields failures and counts.

    After them come the columns *kept* of the accepted rows, without answers.
    """

    def send(batches: Batches) -> Batches:
        context = TaskContext.get()
        receipt = Receipt(context.partitionId(), context.taskAttemptId())
        accepted: list[Any] = []

        def rows() -> Iterator[tuple[Any, ...]]:
            for batch in batches:
                if kept:
                    accepted.append(_accepted(batch, kept))
                columns = [batch.column(name).to_pylist() for name in SENT_COLUMNS]
                yield from zip(*columns, strict=True)

        answers = chain(send_rows(rows(), job, receipt), [receipt])
        while batch := list(islice(answers, _MOST_ANSWERS)):
            types = accepted[0].schema.types[:-1] if accepted else [pa.null()] * len(kept)
            nulls = [pa.nulls(len(batch), kind) for kind in types]
            yield _batch(batch, nulls, kept)
        yield from accepted

    return send


def _accepted(batch: Any, kept: Sequence[str]) -> Any:
    """Return the columns *kept* of the rows of *batch* that are not rejected, with null answers."""
    batch = batch.filter(pc.is_null(batch.column("error")))
    columns = {name: batch.column(name) for name in kept}
    columns["answer"] = pa.nulls(batch.num_rows, pa.binary())
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def answers_of(frame: Any) -> list[Any]:
    """Run a DataFrame's Spark job, and unpickle the objects in the column ``answer``."""
    return [pickle.loads(row.answer) for row in frame.collect()]


def _batch(answers: list[Any], nulls: Sequence[Any] = (), kept: Sequence[str] = ()) -> Any:
    pickled = pa.array([pickle.dumps(answer) for answer in answers], pa.binary())
    return pa.RecordBatch.from_arrays([*nulls, pickled], names=[*kept, "answer"])
