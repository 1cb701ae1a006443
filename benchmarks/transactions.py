"""Measure tasks that are sent in a transaction: their cost, and the publish after the commit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from matplotlib.figure import Figure
from sqlalchemy import Connection, create_engine, insert

from benchmarks.apps import TASK, sending
from benchmarks.charts import quartile_bars
from benchmarks.measuring import Bench, Block, Calls, Result, Target, alternate, block_of
from celery_native_delay import in_transaction
from celery_native_delay.store.sql_table import TASKS
from celery_native_delay.transports.storing import StoringChannel
from tests.postgresql import private_postgresql

ROUNDS = 40
BLOCK = 50
"""The number of consecutive sends or inserts of one variant, in one transaction."""
COMMITTED = 1_000
"""The number of immediate tasks of one transaction, all published after its commit."""
FAR_SECONDS = 3_600

INSERT = "INSERT of such a row"
CELERY = "Celery's own part of apply_async"
BOTH = "Celery's own part, and an INSERT"
DELAYED = "apply_async, delayed"
IMMEDIATE = "apply_async, immediate"


def run(bench: Bench) -> Result:
    count, rounds = bench.count(COMMITTED, at_least=50), bench.count(ROUNDS, at_least=3)
    with ExitStack() as stack:
        postgresql = stack.enter_context(private_postgresql())
        url, vhost = postgresql.new_database(), stack.enter_context(bench.vhost())
        app = stack.enter_context(sending("ours", vhost, confirm=True, store=url))
        engine = create_engine(url)
        stack.callback(engine.dispose)
        sent = costs(app, engine, rounds)
        committed = commits(bench, app, engine, count)
    own = sent[DELAYED].median / sent[BOTH].median
    result = Result(
        "Tasks in a transaction",
        f"PostgreSQL over a Unix socket, fsync off. One transaction of a SQLAlchemy connection has "
        f"{BLOCK} sends or inserts; {rounds} rounds. Celery's own part: "
        f"the same apply_async, whose message is dropped. Commit: "
        f"{count:,} immediate tasks of a transaction, from commit() "
        f"until RabbitMQ has confirmed all of them and their rows are deleted.",
        [
            {"what": what, "count": len(calls.seconds), **calls.columns_us}
            for what, calls in (sent | {"commit and publish": committed}).items()
        ],
        [
            Target("apply_async, delayed : Celery's own part and an INSERT", own, "≤", 1.3),
            Target(
                f"{count:,} tasks published after the commit",
                committed.median * 1e3,
                "≤",
                300,
                "ms",
            ),
        ],
    )
    result.series = {way: calls.quartiles_us for way, calls in sent.items()}
    return result


def costs(app: Any, engine: Any, rounds: int) -> dict[str, Calls]:
    """Measure each send and each insert."""
    send = app.tasks[TASK].apply_async
    row = a_row(app, engine)

    def inserts(connection: Connection, number: int) -> None:
        connection.execute(insert(TASKS), row | {"digest": f"{number:032}"})

    def own_part(connection: Connection, number: int) -> None:
        store_one = StoringChannel.store_one
        StoringChannel.store_one = lambda self, entry: None  # type: ignore[method-assign]
        try:
            send((number,), countdown=FAR_SECONDS)
        finally:
            StoringChannel.store_one = store_one  # type: ignore[method-assign]

    def both(connection: Connection, number: int) -> None:
        own_part(connection, number)
        inserts(connection, number)

    ways: dict[str, Callable[[Connection, int], object]] = {
        INSERT: inserts,
        CELERY: own_part,
        BOTH: both,
        DELAYED: lambda connection, number: send((number,), countdown=FAR_SECONDS),
        IMMEDIATE: lambda connection, number: send((number,)),
    }
    blocks = {way: partial(rolled_back, app, engine, call) for way, call in ways.items()}
    found = alternate("transactions, send", rounds, blocks)
    return {way: Calls(each) for way, each in found.items()}


def rolled_back(app: Any, engine: Any, call: Callable[[Connection, int], object]) -> Block:
    """Measure calls in one transaction, which is rolled back."""
    with engine.connect() as connection, in_transaction(app, connection):
        block = block_of(partial(call, connection), BLOCK)
        connection.rollback()
    return block


def a_row(app: Any, engine: Any) -> dict[str, Any]:
    """Return the columns of a row that a send writes."""
    with engine.connect() as connection, in_transaction(app, connection):
        app.tasks[TASK].apply_async((1,), countdown=FAR_SECONDS)
        row = dict(connection.execute(TASKS.select()).mappings().one())
        connection.rollback()
    del row["id"]
    return row


def commits(bench: Bench, app: Any, engine: Any, count: int) -> Calls:
    """Measure the commits of *count* tasks, each with the publish of its tasks."""

    def commit() -> Block:
        with engine.connect() as connection:
            with in_transaction(app, connection):
                for index in range(count):
                    app.tasks[TASK].apply_async((index,))
                started = perf_counter()
                connection.commit()
            took = perf_counter() - started
            assert not connection.execute(TASKS.select()).all()
        return Block([took], cpu_seconds=0)

    rounds = bench.count(10, at_least=2)
    return Calls(alternate("transactions, commit", rounds, {"commit": commit})["commit"])


def draw(result: Result) -> Figure:
    return quartile_bars("Tasks in a transaction", "microseconds for one", result.series)
