"""The two functions that Spark runs on executors, and the tables that they return."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from ..errors import InvalidFanOut
from .app import Call, describe
from .receipts import FAILURE, RECEIPT, Receipt
from .sending import SendJob, send_rows

Batches = Iterator[Any]

#: Schema of all that executors answer: mapInArrow() allows no second one.
REPORT = "kind string, value string"

#: Rows of a report that are handed over at a time.
_REPORT_ROWS = 10_000


def checker(call: Call) -> Callable[[Batches], Batches]:
    """A function for mapInArrow() that describes the app, or says why it will not do."""

    def check(batches: Batches) -> Batches:
        for _ in batches:
            try:
                answer = ("facts", describe(call).to_json())
            except InvalidFanOut as exc:
                answer = ("invalid", str(exc))
            yield _report([answer])

    return check


def sender(job: SendJob) -> Callable[[Batches], Batches]:
    """A function for mapInArrow() that sends its rows, and returns failures and a receipt."""

    def send(batches: Batches) -> Batches:
        context = TaskContext.get()
        receipt = Receipt(context.partitionId(), context.attemptNumber())
        rows = (
            row
            for batch in batches
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        report: list[tuple[str, str]] = []
        for failure in send_rows(rows, job, receipt):
            report.append((FAILURE, json.dumps(asdict(failure))))
            if len(report) >= _REPORT_ROWS:
                yield _report(report)
                report = []
        yield _report([*report, (RECEIPT, receipt.to_json())])

    return send


def _report(rows: list[tuple[str, str]]) -> Any:
    kinds, values = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(kinds, pa.string()), pa.array(values, pa.string())], names=["kind", "value"]
    )
