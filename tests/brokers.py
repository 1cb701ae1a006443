"""What tests that start brokers of their own need besides."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
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


def self_signed_certificate(folder: Path) -> tuple[Path, Path]:
    """Certificate and key for 127.0.0.1, in PEM, as new files of *folder*."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", *options, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key
