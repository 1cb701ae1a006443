"""Known faults of RabbitMQ releases that affect delayed messages."""

from __future__ import annotations

import pytest

from celery_native_delay.finding import ADVICE, WRONG
from celery_native_delay.transports.rabbitmq.inspection import known_faults


def numbers(version: tuple[int, ...], level: str, *, replicated: bool | None = True) -> list[str]:
    found = known_faults(version, replicated=replicated)
    return [each.problem for each in found if each.level == level]


@pytest.mark.parametrize(
    ("version", "fixed"), [((4, 2, 0), "4.2.7"), ((4, 2, 6), "4.2.7"), ((4, 3, 0), "4.3.1")]
)
def test_releases_that_dead_letter_from_the_wrong_replica_are_found(
    version: tuple[int, ...], fixed: str
) -> None:
    found = [each for each in known_faults(version, replicated=None) if each.level == WRONG]
    (finding,) = found
    assert "#16203" in finding.problem
    assert finding.remedy == f"upgrade to {fixed} or newer, where you may choose the release"


def test_with_one_replica_there_is_no_wrong_one() -> None:
    assert numbers((4, 3, 0), WRONG, replicated=False) == []


@pytest.mark.parametrize("version", [(4, 0, 9), (4, 1, 3), (4, 2, 7), (4, 3, 6), (4, 4, 0)])
def test_other_releases_have_no_known_fault(version: tuple[int, ...]) -> None:
    assert known_faults(version, replicated=None) == []


def test_the_advice_for_an_old_release_names_an_operators_setting() -> None:
    (finding,) = known_faults((3, 10, 8), replicated=None)
    assert finding.level == ADVICE
    assert finding.remedy.startswith("where you may write advanced.config")
