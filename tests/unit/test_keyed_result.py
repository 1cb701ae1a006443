"""The result of a call with a key: Celery's result, which also tells what the call did."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.result import EagerResult

from celery_native_delay import KeyedResult
from celery_native_delay.app.keyed import EagerKeyedResult, keyed_result


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    yield app
    app.close()


COPIED = [copy.copy, lambda found: pickle.loads(pickle.dumps(found))]


@pytest.mark.parametrize("copied", COPIED)
@pytest.mark.parametrize("told", [{}, {"created": False}, {"replaced": "six"}])
def test_a_keyed_result_pickles_copies_and_compares_as_celerys(
    app: Celery, copied: Callable[[Any], Any], told: dict[str, Any]
) -> None:
    plain = app.AsyncResult("seven", parent=app.AsyncResult("root"))
    found = copied(keyed_result(copy.copy(plain), **told))
    assert isinstance(found, KeyedResult)
    assert found == plain == "seven"
    assert {found, plain} == {plain}
    assert found.as_tuple() == plain.as_tuple()
    assert (found.backend.app, found.app) == (app, app)
    assert (found.created, found.replaced) == (told.get("created", True), told.get("replaced"))
    assert found.state == plain.state == "PENDING"


@pytest.mark.parametrize("copied", COPIED)
def test_an_eager_keyed_result_pickles_copies_and_compares_as_celerys(
    copied: Callable[[Any], Any],
) -> None:
    plain = EagerResult("seven", 7, "SUCCESS", name="shop.add")
    found = copied(keyed_result(copy.copy(plain)))
    assert isinstance(found, EagerKeyedResult)
    assert found == plain
    assert (found.get(), found.state, found.created, found.replaced) == (7, "SUCCESS", True, None)


def test_a_keyed_result_keeps_the_attributes_of_celerys() -> None:
    with Celery("shop", broker="memory://", set_as_current=False) as other:
        plain = other.AsyncResult("seven")
        plain.ignored = True
        found = keyed_result(plain)
        assert found.app is other
        assert found.ignored
        assert found.get() is None
