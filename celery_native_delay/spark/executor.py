"""Functions for mapInArrow() on executors: check the Celery app, and send rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from ..errors import InvalidFanOut
from .app import Call, describe
from .receipts import Receipt
from .sending import SendJob, send_rows

Batches = Iterator[Any]

#: The schema of a DataFrame whose rows are pickled answers of executors.
ANSWERS = "answer binary"

#: The largest number of answers in one Arrow batch.
_MOST_ANSWERS = 10_000


def checker(call: Call) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that checks the app, and yields its settings or an error."""

    def check(batches: Batches) -> Batches:
        for _ in batches:
            try:
                yield _batch([describe(call)])
            except InvalidFanOut as exc:
                yield _batch([exc])

    return check


def sender(job: SendJob) -> Callable[[Batches], Batches]:
    """Return a mapInArrow() function that sends rows, and yields failures and counts."""

    def send(batches: Batches) -> Batches:
        context = TaskContext.get()
        receipt = Receipt(context.partitionId(), context.attemptNumber())
        rows = (
            row
            for batch in batches
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        answers = chain(send_rows(rows, job, receipt), [receipt])
        while batch := list(islice(answers, _MOST_ANSWERS)):
            yield _batch(batch)

    return send


def answers_of(frame: Any) -> list[Any]:
    """Run a DataFrame's Spark job, and unpickle the objects in the column ``answer``."""
    return [pickle.loads(row.answer) for row in frame.collect()]


def _batch(answers: list[Any]) -> Any:
    pickled = pa.array([pickle.dumps(answer) for answer in answers], pa.binary())
    return pa.RecordBatch.from_arrays([pickled], names=["answer"])
