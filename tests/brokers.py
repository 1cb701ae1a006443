"""What is installed, for tests that start brokers of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from celery_native_delay.testing import BrokerMissing
from pytest_celery_native_delay import skip_or_fail

P = ParamSpec("P")
T = TypeVar("T")


def installed(require: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What *require* finds; where it raises BrokerMissing, skip the test, and fail it in CI."""
    try:
        return require(*args, **kwargs)
    except BrokerMissing as exc:
        skip_or_fail(exc)
