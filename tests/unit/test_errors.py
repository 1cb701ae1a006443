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
def test_every_error_belongs_to_the_tree_and_can_be_imported(kind: type) -> None:
    assert issubclass(kind, errors.NativeDelayError)
    assert getattr(celery_native_delay, kind.__name__) is kind


@pytest.mark.parametrize("kind", [errors.SettingsError, errors.InvalidDueTime, errors.DelayTooLong])
def test_a_wrong_value_is_a_value_error(kind: type) -> None:
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_pickling(kind: type) -> None:
    error = pickle.loads(pickle.dumps(kind("value, limit, way out")))
    assert type(error) is kind
    assert str(error) == "value, limit, way out"
