"""The command ``python -m benchmarks``: run scenarios on private brokers, and write the results."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import NoReturn, Protocol

from matplotlib.figure import Figure

from benchmarks import (
    bulk,
    holds,
    keys,
    lateness,
    publish,
    rates,
    redis_store,
    report,
    scale,
    schedules,
    spark,
    steady,
    store,
    throughput,
    transactions,
    worker_cost,
)
from benchmarks.measuring import BROKER_OPTIONS, Bench, Result, load_average, log, machine
from celery_native_delay.testing import BrokerFailed, BrokerMissing, PrivateRabbitMQ
from tests.rabbitmqs import find_rabbitmq, private_rabbitmq


class Scenario(Protocol):
    """A benchmark that measures and draws a chart: a module, or an object with its functions."""

    def run(self, bench: Bench) -> Result: ...

    def draw(self, result: Result) -> Figure: ...


SCENARIOS: dict[str, Scenario] = {
    "publish": publish,
    "bulk": bulk,
    "lateness": lateness,
    "throughput": throughput,
    "worker-cost": worker_cost,
    "steady": steady,
    "redis-store": redis_store,
    "store": store,
    "transactions": transactions,
    "rates": rates,
    "keys": keys,
    "schedules": schedules,
    "holds": holds,
    "spark": spark,
    "scale": scale.MILLION,
    "scale-10m": scale.TEN_MILLION,
}

ONLY_BY_NAME = frozenset(("holds", "scale-10m"))
"""Scenarios that take an hour or the whole memory of a machine. They run only if named."""

REFERENCE = "4.3"
"""The RabbitMQ version of the published results; `make bench` installs this version."""

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Run the command. The exit status is 0 if all scenarios ended, even if targets were missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=SCENARIOS,
        help="run this scenario; may be given several times",
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        default=1.0,
        help="how much of everything to do, e.g. 0.1; below 1 for a first look only",
    )
    parser.add_argument(
        "--rabbitmq",
        metavar="VERSION",
        help=f'e.g. "3.10"; {REFERENCE} by default, or the system\'s where that is not installed',
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results; by default benchmarks/ for a whole run with no option, "
        "else benchmarks/results/, which git ignores",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="write to benchmarks/, where the scenarios that are not run stay as they are",
    )
    options = parser.parse_args()
    usual = [name for name in SCENARIOS if name not in ONLY_BY_NAME]
    names = [name for name in SCENARIOS if name in (options.only or usual)]
    is_whole = names == usual and options.scale == 1 and not options.rabbitmq
    if options.update and (options.scale < 1 or options.rabbitmq):
        parser.error(f"--update is for whole measurements on RabbitMQ {REFERENCE}")
    folder = options.out or (FOLDER if is_whole or options.update else FOLDER / "results")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    results: dict[str, Result] = report.read(folder) if options.update else {}
    about: dict[str, str] = {"command": _command(options)}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="native-delay-bench-") as files,
            _broker(options.rabbitmq) as broker,
        ):
            about |= machine(broker)
            if options.scale < 1:
                about["scale"] = f"{options.scale:g}: a first look, not a measurement"
            bench = Bench(broker, options.scale, Path(files))
            for name in names:
                results[name] = _run(name, bench)
                results = {one: results[one] for one in SCENARIOS if one in results}
                log(f"{name}: {results[name].seconds:.0f} s")
                # Write the results now: an error in the next scenario must not lose this scenario's
                # result.
                report.write(folder, about, results)
                SCENARIOS[name].draw(results[name]).savefig(folder / f"{name}.png")
    except (BrokerMissing, BrokerFailed) as exc:
        log(str(exc))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report.as_markdown(about, results))
    return 0


def _broker(version: str | None) -> AbstractContextManager[PrivateRabbitMQ]:
    """Start the RabbitMQ that all scenarios share.

    Raises:
        BrokerMissing: RabbitMQ, or its version *version*, is not installed.
    """
    if version is None and find_rabbitmq(REFERENCE):
        version = REFERENCE
    if version is None:
        log(f"RabbitMQ {REFERENCE} is not installed: measuring on the system's")
    return private_rabbitmq(version=version, **BROKER_OPTIONS)


def _run(name: str, bench: Bench) -> Result:
    load, started = load_average(), monotonic()
    result: Result = SCENARIOS[name].run(bench)
    result.date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    result.load_before, result.seconds = load, monotonic() - started
    return result


def _scale(text: str) -> float:
    scale = float(text)
    if not 0 < scale <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text}")
    return scale


def _command(options: argparse.Namespace) -> str:
    words = ["python -m benchmarks"]
    if not options.update:
        words += [f"--only {name}" for name in options.only or ()]
    if options.scale != 1:
        words.append(f"--scale {options.scale:g}")
    if options.rabbitmq:
        words.append(f"--rabbitmq {options.rabbitmq}")
    return " ".join(words)


def _stop(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
