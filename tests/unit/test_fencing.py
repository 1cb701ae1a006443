"""A worker and messages of fenced runs, as far as nobody has to be asked about them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay import DelaySettings
from celery_native_delay.fence.run import HEADER
from celery_native_delay.worker.adoption import FencedTask
from celery_native_delay.worker.fencing import Fence, NoFence


def task(header: object) -> FencedTask:
    message = SimpleNamespace(headers={"id": "1", HEADER: header}, channel=None)
    return FencedTask(message, "shop.remind", "1", "jobs", _never, _never)


def _never(*_: Any) -> Any:
    pytest.fail("nobody is to be asked")


def test_a_worker_without_a_fence_runs_all_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fence = NoFence()
    tasks = [task("run/0/0-a"), task("run/0/1-b")]
    assert all(map(fence.admits, tasks))
    assert [each.message.headers for each in tasks] == [{"id": "1"}] * 2  # nor will a retry have it
    (record,) = caplog.records
    assert "native_delay_fence" in record.getMessage()


def test_a_header_that_cannot_be_read_is_named_and_its_task_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Perhaps of a later release: rather twice than never."""
    settings = DelaySettings(fence="redis://127.0.0.1:1")
    fence = Fence(SimpleNamespace(), settings, _never)
    with caplog.at_level(logging.WARNING):
        assert fence.admits(task("2;run=x"))
        assert fence.admits(task("2;run=y"))
    (record,) = caplog.records
    assert "expected run/partition/attempt, got '2;run=x'" in record.getMessage()
