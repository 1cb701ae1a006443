"""The command ``python -m benchmarks``: run scenarios on private brokers, and write the results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from benchmarks import report, scale
from benchmarks.measuring import BROKER_OPTIONS, Bench, Result, log, machine
from celery_native_delay.testing import BrokerFailed, BrokerMissing
from tests.rabbitmqs import find_rabbitmq, private_rabbitmq

NAMES = (
    *("publish", "bulk", "lateness", "throughput", "worker-cost", "steady", "redis-store"),
    *("store", "transactions", "rates", "keys", "schedules", "holds", "spark"),
)

#: What has the functions run(bench) and draw(result): a module, or an object.
SCENARIOS: dict[str, Any] = {
    **{name: import_module(f"benchmarks.{name.replace('-', '_')}") for name in NAMES},
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
    if options.update and options.scale < 1:
        parser.error("--update is for whole measurements")
    is_kept = options.update or (names == usual and options.scale == 1)
    folder = options.out or (FOLDER if is_kept else FOLDER / "results")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    results: dict[str, Result] = report.read(folder) if options.update else {}
    words = ["python -m benchmarks"]
    if not options.update:
        words += [f"--only {name}" for name in options.only or ()]
    about = {"command": " ".join(words)}
    if options.scale < 1:
        about["scale"] = f"{options.scale:g}: a first look, not a measurement"
    version = REFERENCE if find_rabbitmq(REFERENCE) else None
    if not version:
        log(f"RabbitMQ {REFERENCE} is not installed: measuring on the system's")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="native-delay-bench-") as files,
            private_rabbitmq(version=version, **BROKER_OPTIONS) as broker,
        ):
            about |= machine(broker)
            bench = Bench(broker, options.scale, Path(files))
            for name in names:
                results[name] = _run(name, bench)
                results = {one: results[one] for one in SCENARIOS if one in results}
                log(f"{name}: {results[name].seconds:.0f} s")
                # Write now: an error in the next scenario must not lose this one's result.
                report.write(folder, about, results)
                SCENARIOS[name].draw(results[name]).savefig(folder / f"{name}.png")
    except (BrokerMissing, BrokerFailed) as exc:
        log(str(exc))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report.as_markdown(about, results))
    return 0


def _run(name: str, bench: Bench) -> Result:
    load, started = os.getloadavg()[0], monotonic()
    result: Result = SCENARIOS[name].run(bench)
    result.date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    result.load_before, result.seconds = load, monotonic() - started
    return result


def _scale(text: str) -> float:
    scale = float(text)
    if not 0 < scale <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, got {text}")
    return scale


def _stop(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
