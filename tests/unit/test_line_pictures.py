"""The picture of a line is drawn by the arithmetic of lines: what it shows keeps the promise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from celery_native_delay import Rate
from tests.documents import ROOT


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import line_pictures

    yield line_pictures
    del sys.modules["line_pictures"]


def test_every_task_starts_in_its_turn_and_none_while_the_line_is_held(drawing: Any) -> None:
    rate = Rate("4/s", burst=3)
    tasks, held_from, held_until = drawing.spread(rate)
    starts = [at for _, at in tasks]
    assert starts == sorted(starts)
    assert not any(held_from < at < held_until for at in starts)
    for first in starts:
        assert sum(first <= at < first + 1 for at in starts) <= rate.most
    svg = drawing.line_svg(rate)
    assert svg.count('class="starts"') == len(tasks)
    assert svg.count('class="held"') == 1
