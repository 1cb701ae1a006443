"""A minute of ``make chaos``: no task is lost, early or misrouted, and no cancelled task runs.

No schedule entry runs early, and no entry has two chains of due times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_native_delay.testing import require_redis
from pytest_celery_native_delay import installed
from tests.brokers import installed_rabbitmq
from tests.chaos.entries import FORBIDDEN, Verdict
from tests.chaos.places import place
from tests.chaos.report import findings_as_text, update
from tests.chaos.run import Plan, run

#: In less than a minute, a killed node may be the only fault on a slow machine.
SEED, MINUTES, RATE = 14, 1, 20

# Without kills of workers and masters: kombu may then lose the message just taken from Redis.
REDIS_FAULTS = ("replica-killed", "master-paused", "producer-killed")

CLUSTER_FAULTS = ("node-killed", "connections-dropped", "worker-killed", "producer-killed")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("broker", "faults"),
    [
        pytest.param("redis", REDIS_FAULTS, marks=pytest.mark.redis),
        # The others take longer than this test may.
        pytest.param(
            "rabbitmq-4.3", CLUSTER_FAULTS, marks=[pytest.mark.rabbitmq43, pytest.mark.tools]
        ),
    ],
)
def test_all_promises_hold_while_the_broker_fails(
    broker: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    installed(require_redis, "redis")
    if broker == "rabbitmq-4.3":
        installed_rabbitmq("4.3")
    folders = [tmp_path / name for name in ("broker", "crew", "report")]
    for folder in folders:
        folder.mkdir()
    with place(broker, folders[0]) as found:
        outcome = run(found, Plan(SEED, MINUTES, RATE, faults), folders[1])
    assert not outcome.judgement.forbidden, findings_as_text(outcome)
    assert outcome.judgement.ran > 100
    assert outcome.entries.ran > 100
    # On a busy machine, a worker may hold a message longer than Redis's visibility timeout.
    never = {*FORBIDDEN} - {Verdict.DOUBLED_IN_CALM}
    assert not [each for each in outcome.entries.findings if each.verdict in never]
    assert len(outcome.struck) >= 2
    update(folders[2], broker, outcome)
    told = (folders[2] / "chaos.md").read_text()
    assert all(f"`{fault.kind}`" in told for fault in outcome.struck)
    assert (folders[2] / "chaos.png").stat().st_size > 10_000
