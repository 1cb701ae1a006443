"""One tree of errors, whose root is ``NativeDelayError``."""

from __future__ import annotations

import pickle

import pytest

import celery_native_delay
from celery_native_delay import errors

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and kind.__module__ == errors.__name__
    and kind is not errors.ExtraMissing  # an ImportError of a package of an extra
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_belongs_to_the_tree_can_be_imported_and_pickled(kind: type) -> None:
    assert issubclass(kind, errors.NativeDelayError)
    assert getattr(celery_native_delay, kind.__name__) is kind
    error = pickle.loads(pickle.dumps(kind("value, limit, way out")))
    assert (type(error), str(error)) == (kind, "value, limit, way out")


def test_a_wrong_value_is_a_value_error() -> None:
    for kind in (errors.SettingsError, errors.InvalidDueTime, errors.DelayTooLong):
        assert issubclass(kind, ValueError)
