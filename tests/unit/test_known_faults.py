"""Which releases of RabbitMQ have faults that delayed messages meet."""

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
def test_dead_lettering_that_asks_the_wrong_replica_is_wrong(
    version: tuple[int, ...], fixed: str
) -> None:
    found = [each for each in known_faults(version, replicated=None) if each.level == WRONG]
    (finding,) = found
    assert "#16203" in finding.problem
    assert finding.remedy == f"upgrade to {fixed} or newer, where you may choose the release"


def test_where_there_is_one_replica_it_cannot_be_the_wrong_one() -> None:
    assert numbers((4, 3, 0), WRONG, replicated=False) == []


@pytest.mark.parametrize("version", [(4, 0, 9), (4, 1, 3), (4, 2, 7), (4, 3, 6), (4, 4, 0)])
def test_others_have_none(version: tuple[int, ...]) -> None:
    assert known_faults(version, replicated=None) == []


def test_an_old_one_is_advised_what_its_operator_may_set() -> None:
    (finding,) = known_faults((3, 10, 8), replicated=None)
    assert finding.level == ADVICE
    assert finding.remedy.startswith("where you may write advanced.config")
