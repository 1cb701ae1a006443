"""Change a sign, a bound, an order or an ack of the core, and tell whether a test notices.

`python -m scripts.mutations` changes a copy of this repository; with numbers it makes only these
mutations. Exits with 1 if a mutation is missed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SQLITE = "conformance/test_stores.py -k sqlite"
RULES = "unit/test_keyed_rules.py"


class Mutation(NamedTuple):
    """A change of one place, and the tests that must fail: arguments of pytest, below tests/."""

    file: str
    before: str
    after: str
    tests: str


MUTATIONS = [
    # Due times.
    Mutation(
        "due_time.py",
        "-(-microseconds // 1000)",
        "microseconds // 1000",
        "unit/test_virtual_wrapping.py",
    ),
    Mutation(
        "due_time.py",
        "return max(0, -((now_us - due_us) //",
        "return max(0, ((due_us - now_us) //",
        "unit/test_due_time.py",
    ),
    Mutation(
        "due_time.py",
        "if due_us - now_us > longest",
        "if due_us - now_us >= longest",
        "unit/test_due_time.py",
    ),
    Mutation(
        "transports/sqs/hops.py",
        "-(-milliseconds // 1000)",
        "milliseconds // 1000",
        "unit/test_sqs.py",
    ),
    # The delay queues of RabbitMQ, and what is confirmed.
    Mutation(
        "transports/rabbitmq/topology.py",
        "units -= hop.delay_ms",
        "units += hop.delay_ms",
        "unit/test_topology.py",
    ),
    Mutation(
        "transports/rabbitmq/topology.py",
        "wait_ms = milliseconds_up(remaining_us) + TTL",
        "wait_ms = milliseconds_up(remaining_us) - TTL",
        "unit/test_topology.py",
    ),
    Mutation(
        "transports/rabbitmq/topology.py",
        "zeros += lower.width",
        "zeros -= lower.width",
        "unit/test_topology.py",
    ),
    Mutation(
        "transports/rabbitmq/delays.py",
        "self._settle(self._channel, confirm_timeout_seconds)",
        "pass",
        "integration/test_publishing.py -k confirm_that_never_comes",
    ),
    # Keys and locks.
    Mutation(
        "keyed/rules.py",
        "min(due_us, since_us + longest_us)",
        "min(due_us, now_us + longest_us)",
        RULES,
    ),
    Mutation(
        "keyed/rules.py",
        "known.run.token != token and _runs",
        "known.run.token == token and _runs",
        RULES,
    ),
    Mutation(
        "keyed/rules.py", "if len(runs) < most:", "if len(runs) <= most:", "unit/test_concurrent.py"
    ),
    Mutation(
        "keyed/rules.py",
        "seen.now_us < known.window_us:",
        "seen.now_us > known.window_us:",
        RULES,
    ),
    # Rates and schedules.
    Mutation(
        "rates/line.py",
        "at = waits_us.index(max(waits_us))",
        "at = waits_us.index(min(waits_us))",
        "unit/test_rate_line.py",
    ),
    Mutation("rates/line.py", "self.front - 1\n", "self.front\n", "unit/test_rate_line.py"),
    Mutation("schedules/state.py", "> wait_us\n", "< wait_us\n", "unit/test_schedule_state.py"),
    Mutation(
        "schedules/state.py",
        "next_us is not None and next_us <= now_us:",
        "next_us is not None and next_us < now_us:",
        "unit/test_schedule_state.py",
    ),
    # The store: what is taken, in which order, and what is deleted.
    Mutation(
        "store/dispatcher.py",
        "for row, reason in outcomes if reason is None]",
        "for row, reason in outcomes]",
        SQLITE,
    ),
    Mutation(
        "store/sql.py",
        "delete(TASKS).where(_THESE, _STILL_TAKEN)",
        "delete(TASKS).where(_THESE)",
        SQLITE,
    ),
    Mutation(
        "store/sql.py", ".order_by(_ROW.next_us, _ROW.id)  #", ".order_by(_ROW.id)  #", SQLITE
    ),
    Mutation(
        "store/sql.py", "CANCELLED_AND_TAKEN: CANCELLED,", "CANCELLED_AND_TAKEN: WAITING,", SQLITE
    ),
    Mutation(
        "store/interface.py", "row.refusals + 1 >= REFUSALS", "row.refusals + 1 > REFUSALS", SQLITE
    ),
    # Redis: a due message is removed once, and stays if its destination refuses it.
    Mutation(
        "transports/redis/store.py",
        "redis.call('HDEL', messages, unpack(done))",
        "",
        "integration/test_redis_store.py -k redis",
    ),
    Mutation(
        "transports/redis/store.py",
        "redis.call('ZADD', parking, now, member) end",
        "end",
        "integration/test_redis_store.py -k redis",
    ),
    # Workers: the order of the gates, and the ack of what was put back.
    Mutation(
        "worker/gates.py",
        "        scheduling,\n        cancelled,",
        "        cancelled,\n        scheduling,",
        "unit/test_gates.py",
    ),
    Mutation(
        "worker/strategies.py",
        "done = partial(self._ack_soon, arrival)",
        "done = partial(print)",
        "unit/test_strategies.py",
    ),
]


def fails(copy: Path, tests: str) -> bool:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-qx",
            "-p",
            "no:cacheprovider",
            *f"tests/{tests}".split(),
        ],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.returncode == 1


def main(numbers: list[int]) -> int:
    chosen = [MUTATIONS[number - 1] for number in numbers] or MUTATIONS
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".hypothesis"))
        for tests in sorted({each.tests for each in chosen}):
            if fails(copy, tests):
                raise SystemExit(f"expected tests that pass without a mutation, got {tests}")
        for each in chosen:
            file = copy / "celery_native_delay" / each.file
            text = file.read_text()
            if text.count(each.before) != 1:
                raise SystemExit(f"expected {each.before!r} once in {each.file}: correct MUTATIONS")
            file.write_text(text.replace(each.before, each.after))
            caught = fails(copy, each.tests)
            file.write_text(text)
            missed += not caught
            number = MUTATIONS.index(each) + 1
            print(
                f"{number:2} {'caught' if caught else 'MISSED'}",
                each.file,
                repr(each.after),
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main([*map(int, sys.argv[1:])]))
