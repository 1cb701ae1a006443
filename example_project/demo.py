"""Send a mix of delayed tasks to a private broker, and watch the tasks run.

Run it with `make demo` or `python -m example_project.demo [BROKER]`; `demo_broker` describes the
brokers. This process is the producer, and another process is the worker.

The exit status is 0 if every task ran once and on time and the worker never held a task until its
ETA. The exit status is 1 if not, and 2 if there is no broker.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from celery import Signature, group
from kombu.exceptions import OperationalError
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from celery_native_delay import NoStore, in_transaction, install
from celery_native_delay.testing import BrokerFailed, BrokerMissing
from example_project.app import REMIND, TICK, app, can_count, stored_in
from example_project.demo_broker import REPOSITORY, DemoBroker, demo_broker
from example_project.folder_broker import settings_of
from example_project.tasks import (
    book_courier,
    charge,
    charge_once,
    collect,
    delay,
    remind,
    remind_once,
    send_email,
    stock_has_changed,
)

WORKER_NAME = "demo@localhost"

#: Allowed extra lateness in milliseconds, for a busy laptop. A machine that does much else needs
#: more.
BUSY_MS = int(os.environ.get("DEMO_BUSY_MS", "250"))
BOOT_LIMIT_SECONDS = 90
RUN_LIMIT_SECONDS = 25
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICKS = ("tick 1", "tick 2", "tick 3")
GRACE_SECONDS = 1  # after the last run, to see unexpected runs


class WorkerFailed(Exception):
    """The worker did not start."""


@dataclass
class Run:
    """One expected run of a task: a first attempt, a retry, or a link of a chain."""

    title: str
    task_id: str
    asked_seconds: float | None
    """The requested delay in seconds; None until the task's back-off has chosen the delay."""
    late_limit_ms: int
    retries: int = 0
    after: "Run | None" = None
    """The run whose task sends this task; None if the demo process sends the task."""
    sent: float | None = None
    """The Unix time of sending; None until the previous run has started."""
    turn_seconds: float | None = None
    """Seconds between two starts under a rate limit; the tasks may start in any order."""
    in_store: bool = False
    """True if the task waits in the store, if the broker has one beside it."""
    starts: list[float] = field(default_factory=list)
    """The Unix times of the starts: exactly one start if all is well."""

    @property
    def waited_seconds(self) -> float | None:
        return self.starts[0] - self.sent if self.starts and self.sent is not None else None

    @property
    def late_ms(self) -> float | None:
        if self.waited_seconds is None or self.asked_seconds is None:
            return None
        return (self.waited_seconds - self.asked_seconds) * 1000

    @property
    def state(self) -> str:
        if self.late_ms is None:
            return "waiting"
        if len(self.starts) > 1:
            return "twice"
        if self.late_ms < 0:
            return "early"
        return "on time" if self.late_ms <= self.late_limit_ms else "late"


def send_mix(broker: DemoBroker) -> list[Run]:
    """Send all tasks of the demo, and return the expected runs."""
    runs: list[Run] = []
    late_limit_ms = broker.resolution_ms + BUSY_MS

    def send(title: str, task: Signature, *, asked_seconds: float, **options: Any) -> Run:
        sent = time.time()
        result = task.apply_async(**options)
        run = Run(title, result.id, asked_seconds, late_limit_ms, sent=sent)
        runs.append(replace(run, in_store=task.task == REMIND))
        return runs[-1]

    def expect(
        title: str, asked_seconds: float | None, *, after: Run, task_id: str, retries: int = 0
    ) -> Run:
        runs.append(Run(title, task_id, asked_seconds, late_limit_ms, retries, after))
        return runs[-1]

    email = send_email.s("ann@example.com", "Your order")
    for seconds in (0.3, 1, 1.5, 3, 5):
        title = f"send_email countdown={seconds}"
        send(title, email, asked_seconds=seconds, countdown=seconds)

    eta = datetime.now(UTC) + timedelta(seconds=2.5)
    for title, due in (("aware", eta), ("naive", eta.replace(tzinfo=None))):
        left = eta.timestamp() - time.time()
        send(f"remind {title} eta", remind.s(2), asked_seconds=left, eta=due)

    task = charge.s(3, declined_attempts=2, retry_seconds=1)
    run = send("charge countdown=1", task, asked_seconds=1, countdown=1)
    for retry in (1, 2):
        run = expect(f"charge retry {retry}", 1, after=run, task_id=run.task_id, retries=retry)

    task = send_email.s("ann@example.com", "Thank you", busy_attempts=2)
    run = send("send_email", task, asked_seconds=0)
    for retry in (1, 2):
        title = f"send_email retry {retry}"
        run = expect(title, None, after=run, task_id=run.task_id, retries=retry)

    with suppress(NoStore):
        for _ in range(3):
            sent = time.time()
            result = stock_has_changed("tea", quiet_seconds=1)
        runs.append(Run("debounce, 3 calls", result.id, 1, late_limit_ms, sent=sent, in_store=True))
        sent = time.time()
        result = [remind_once(8, pause_seconds=60) for _ in range(3)][-1]
        runs.append(Run("throttle, 3 calls", result.id, 0, late_limit_ms, sent=sent, in_store=True))
        sent = time.time()
        result = [charge_once(9, wait_seconds=1) for _ in range(3)][-1]
        runs.append(Run("unique, 3 calls", result.id, 1, late_limit_ms, sent=sent, in_store=True))

    if can_count(broker.url, broker.store):
        sent = time.time()
        for number in range(3):  # two a second, whichever worker has them
            result = book_courier.delay(number, courier="swift")
            title = f"book_courier {number + 1} of 3"
            run = Run(title, result.id, number / 2, late_limit_ms, sent=sent, in_store=True)
            run.turn_seconds = 0.5
            runs.append(run)

        # The worker sends this task by itself, a second before the task is due.
        ticks = (Run(f"{each}, every 1 s", each, 1, late_limit_ms) for each in TICKS)
        runs.extend(replace(tick, in_store=True) for tick in ticks)

    sent = time.time()
    escalated = collect(4, wait_seconds=1.5)
    charged, reminded = escalated.parent, escalated.parent.parent
    runs.append(Run("chain remind", reminded.id, 0, late_limit_ms, sent=sent))
    run = expect("chain charge", 1.5, after=runs[-1], task_id=charged.id)
    expect("chain escalate", 1.5, after=run, task_id=escalated.id)

    sent = time.time()
    skewed = group(remind.s(order_id) for order_id in (5, 6, 7)).skew(step=0.5).apply_async()
    for result, seconds in zip(skewed.results, (1, 1.5, 2), strict=True):
        title = "group.skew remind"
        runs.append(Run(title, result.id, seconds, late_limit_ms, sent=sent, in_store=True))
    return runs


ORDERS = 2


def roll_orders_back(store: str) -> None:
    """Write orders and send their mails in one transaction each, which is rolled back."""
    from sqlalchemy import create_engine, text  # not in the set of the demo on SQS
    from sqlalchemy.orm import Session

    engine = create_engine(store)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (customer text)"))
    for _ in range(ORDERS):
        with Session(engine) as session, in_transaction(app, session):
            session.execute(text("INSERT INTO orders VALUES ('bob@example.com')"))
            send_email.delay("bob@example.com", "Your order")
            session.rollback()
    engine.dispose()


def note_starts(runs: list[Run], record: Path) -> list[str]:
    """Copy the starts that the worker recorded into *runs*; return unexpected starts as texts."""
    expected = {(run.task_id, run.retries): run for run in runs}
    unexpected: list[str] = []
    ticks: list[dict[str, Any]] = []
    for run in runs:
        run.starts.clear()
    for start in map(json.loads, record.read_text().splitlines()):
        attempt = start["id"], start["retries"]
        if start["task"] == TICK["task"]:
            ticks.append(start)
        elif attempt not in expected:
            unexpected.append(f"{start['task']}, attempt {start['retries'] + 1}")
        else:
            run = expected[attempt]
            run.starts.append(start["started"])
            if run.after:
                run.sent = run.after.starts[0]
                if run.asked_seconds is None:  # Celery's back-off: whole seconds, no ETA for 0
                    run.asked_seconds = round(start["due"] - run.sent) if start["due"] else 0
    for run, tick in zip((run for run in runs if run.task_id in TICKS), ticks, strict=False):
        run.sent, run.starts = tick["due"] - 1, [tick["started"]]
    in_line = [run for run in runs if run.turn_seconds and run.starts]
    for turn, run in enumerate(sorted(in_line, key=lambda run: run.starts[0])):
        run.asked_seconds = turn * run.turn_seconds
    return unexpected


def held_by_worker() -> int | None:
    """Return the number of tasks that the worker holds; None if the worker does not answer."""
    replies = app.control.inspect(destination=[WORKER_NAME], timeout=1).scheduled()
    return len(replies[WORKER_NAME]) if replies else None


def way_of(run: Run, broker: DemoBroker) -> str:
    return (
        "" if run.asked_seconds is None else broker.way_of(run.asked_seconds, in_store=run.in_store)
    )


def table_of(runs: list[Run], held: list[int], broker: DemoBroker) -> Table:
    table = Table(
        title=f"tasks held by the worker: {held[-1]} now, {max(held)} at most" if held else "",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("task")
    for number in ("asked\nfor (s)", "ran\nafter (s)", "late by\n(ms)"):
        table.add_column(number, justify="right")
    table.add_column(broker.waits_in)
    table.add_column("state")
    colours = {"waiting": "dim", "on time": "green"}
    for run in runs:
        table.add_row(
            run.title,
            "back-off" if run.asked_seconds is None else f"{run.asked_seconds:.1f}",
            "" if run.waited_seconds is None else f"{run.waited_seconds:.3f}",
            "" if run.late_ms is None else f"{run.late_ms:.0f}",
            way_of(run, broker),
            run.state,
            style=colours.get(run.state, "red"),
        )
    return table


def watch(
    runs: list[Run],
    record: Path,
    worker: subprocess.Popen[bytes],
    broker: DemoBroker,
    console: Console,
) -> tuple[list[int], list[str]]:
    """Show the runs until all have started; return the held tasks and the unexpected starts."""
    held: list[int] = []
    unexpected: list[str] = []
    deadline = time.time() + RUN_LIMIT_SECONDS
    next_line = 0.0
    with Live(table_of(runs, held, broker), console=console, auto_refresh=False) as live:
        while time.time() < deadline and worker.poll() is None:
            count = held_by_worker() if broker.answers else None
            if count is not None:
                held.append(count)
            unexpected = note_starts(runs, record)
            live.update(table_of(runs, held, broker), refresh=True)
            started = [run for run in runs if run.starts]
            if not console.is_terminal and time.time() > next_line:
                told = "" if count is None else f", the worker holds {count}"
                console.print(f"{len(started)} of {len(runs)} ran{told}")
                next_line = time.time() + 2
            if len(started) == len(runs):
                deadline = min(deadline, max(r.starts[-1] for r in runs) + GRACE_SECONDS)
            time.sleep(0.2)
    return held, unexpected


def problems(
    runs: list[Run], held: list[int], unexpected: list[str], broker: DemoBroker
) -> Iterator[str]:
    """Yield one sentence for each problem, such as a task that ran late, twice or not at all."""
    for run in runs:
        if not run.starts:
            yield f"{run.title}: has not run"
        elif len(run.starts) > 1:
            yield f"{run.title}: ran {len(run.starts)} times"
        elif run.state != "on time":
            yield f"{run.title}: {run.late_ms:.1f} ms late, expected 0 to {run.late_limit_ms} ms"
    for attempt in unexpected:
        yield f"{attempt}: ran, and was not expected"
    if broker.answers and not held:
        yield "the worker has not told what it holds"
    elif any(held):
        yield f"the worker held up to {max(held)} tasks until their ETA, expected 0"


def summary(runs: list[Run], held: list[int]) -> str:
    states = [run.state for run in runs]
    return (
        f"{len({run.task_id for run in runs})} tasks in {len(runs)} runs: "
        f"{states.count('on time')} on time, {states.count('early')} early, "
        f"{states.count('twice')} twice; "
        f"latest {max((run.late_ms or 0) for run in runs):.0f} ms late"
        + (f"; the worker held {max(held)}" if held else "")
    )


@contextmanager
def running_worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a prefork worker with two processes, and wait until it is ready."""
    command = [sys.executable, "-m", "celery", "-A", "example_project.app", "worker"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [*command, "--concurrency=2", f"--hostname={WORKER_NAME}", "--loglevel=INFO"],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
        )
    try:
        deadline = time.time() + BOOT_LIMIT_SECONDS
        while " ready." not in log.read_text():
            if worker.poll() is not None or time.time() > deadline:
                raise WorkerFailed(f"the worker did not start; its log:\n{log.read_text()}")
            time.sleep(0.1)
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def stop(signal_number: int, _: object) -> NoReturn:
    """Handle a signal: leave every `with` block, which ends all processes, and exit.

    The exit status is the usual status for this signal.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signal_number)


def demonstrate(asked: str | None, folder: Path, console: Console) -> bool:
    """Run the whole demo, and return True if there was no problem."""
    record, log = folder / "record.jsonl", folder / "worker.log"
    record.touch()
    console.print("starting the broker …")
    with demo_broker(asked) as broker:
        # CELERY_BROKER_URL outranks every other setting of the broker, here and in the worker.
        os.environ |= {"CELERY_BROKER_URL": broker.url, "EXAMPLE_RECORD": str(record)}
        if broker.store is not None:
            os.environ["DELAY_STORE"] = broker.store
            install(app, **stored_in(broker.store))
        app.conf.update(settings_of(broker.url))
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1)
        with suppress(NoStore):
            delay.count()  # imports the store's driver, for which the first task would have to wait
        console.print(f"starting a worker with two processes on {broker.name} …")
        with running_worker(log) as worker:
            is_stored = (broker.store or "").startswith("sqlite")
            if is_stored:
                roll_orders_back(str(broker.store))
            runs = send_mix(broker)
            held, unexpected = watch(runs, record, worker, broker, console)
    wrong = list(problems(runs, held, unexpected, broker))
    console.print()
    if wrong:
        console.print("the worker's log:", log.read_text(), soft_wrap=True)
    for problem in wrong:
        console.print(problem, style="red", soft_wrap=True)
    console.print(summary(runs, held), soft_wrap=True)
    if is_stored:  # a mail of theirs would be an unexpected run
        mails = sum(send_email.name in attempt for attempt in unexpected)
        console.print(f"{ORDERS} orders rolled back, {mails} mails")
    return not wrong


def main(demonstrate: Callable[[str | None, Path, Console], bool] = demonstrate) -> int:
    """Run *demonstrate* on the broker that the command line names, and return the exit status."""
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    console = Console(highlight=False, markup=False)
    try:
        with tempfile.TemporaryDirectory(prefix="native-delay-demo-") as folder:
            asked = sys.argv[1] if len(sys.argv) > 1 else None
            return 0 if demonstrate(asked, Path(folder), console) else 1
    except BrokerMissing as exc:
        console.print(str(exc), soft_wrap=True)
        return 2
    except OperationalError as exc:
        said = str(exc).rstrip(".")
        console.print(f"the broker cannot be used: {said}; is it running, and is the URL right?")
        return 2
    except (BrokerFailed, WorkerFailed) as exc:
        console.print(str(exc), style="red", soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
