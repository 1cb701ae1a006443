"""``make chaos``: send delayed tasks under a seeded schedule of faults, and judge each task."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from random import randrange
from typing import NoReturn

import click

from celery_native_delay.testing import BrokerFailed, BrokerMissing
from tests.chaos import report
from tests.chaos.places import BROKERS, place
from tests.chaos.run import Outcome, Plan, UnknownFault, run

RESULTS = Path(__file__).resolve().parent / "results"


@click.command()
@click.option(
    "--broker",
    "brokers",
    multiple=True,
    type=click.Choice(BROKERS),
    help="Run on this broker; may be given several times. By default on all installed brokers, "
    "one after another.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.2),
    default=10,
    show_default=True,
    help="How long tasks are sent and faults happen, for each broker.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of load and faults; random by default.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=40,
    show_default=True,
    help="Tasks per second.",
)
@click.option(
    "--fault", "faults", multiple=True, help="Only this kind of fault; may be given several times."
)
def main(
    brokers: tuple[str, ...], minutes: float, seed: int | None, rate: float, faults: tuple[str, ...]
) -> None:
    """Send delayed tasks, break the broker, and report the result of each task.

    tests/chaos/results gets a JSON file for each broker, and chaos.md and chaos.png about all.

    Exits with 1 if a task was lost, early or misrouted, if a cancelled task ran, or if a schedule
    entry was skipped, early or doubled without a fault.
    """
    signal.signal(signal.SIGTERM, _stop)
    seed = randrange(10_000) if seed is None else seed
    outcomes: list[Outcome] = []
    for broker in brokers or BROKERS:
        click.echo(f"{broker}, {minutes:g} min, --seed {seed}", err=True)
        plan = Plan(seed, minutes, rate, faults)
        try:
            outcomes.append(_run(broker, plan))
        except BrokerMissing as exc:
            if brokers:
                raise click.ClickException(str(exc)) from exc
            click.echo(f"left out: {exc}", err=True)
            continue
        except (BrokerFailed, UnknownFault) as exc:
            raise click.ClickException(f"{broker}: {exc}") from exc
        # Write now: an error in the next run must not lose the result of ten minutes.
        report.update(RESULTS, broker, outcomes[-1])
    if not outcomes:
        raise click.ClickException("no broker is installed: run `make brokers`")
    click.echo(report.as_markdown([report.result_of(outcome) for outcome in outcomes]))
    if findings := "\n".join(filter(None, map(report.findings_as_text, outcomes))):
        click.echo(findings)
        sys.exit(1)


def _run(broker: str, plan: Plan) -> Outcome:
    def tell(line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)

    prefix = "native-delay-chaos-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as folder,
        tempfile.TemporaryDirectory(prefix=prefix) as crew,
        place(broker, Path(folder)) as found,
    ):
        outcome = run(found, plan, Path(crew), tell=tell)
    tell("")
    return outcome


def _stop(number: int, _frame: object) -> NoReturn:
    """End all started processes, then this one."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
