"""Settings, marks and certificates for tests that start brokers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from celery_native_delay.testing import require_rabbitmq
from pytest_celery_native_delay import IN_CI, installed

RETRY_MS = 3000
"""After how many seconds mortal_rabbitmq retries a failed dead-lettering; the default is 180 s.

Dead-lettering fails if no queue takes the message, or while a level has no leader, at the start.
"""

LARGEST_MESSAGE = 1_000_000
"""The largest message in bytes that mortal_rabbitmq accepts; the default is 16 or 128 MB."""

MORTAL = {
    "config": f"max_message_size = {LARGEST_MESSAGE}",
    "advanced_config": (
        f"[{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {RETRY_MS}}}]}}]."
    ),
}
"""The configuration of mortal_rabbitmq."""

on_one_version = pytest.mark.parametrize(
    "rabbitmq_version", [pytest.param("3.10", marks=pytest.mark.rabbitmq310)], indirect=True
)
"""Run a test on one RabbitMQ version only: for code that behaves the same on all versions."""


CI = pytest.mark.ci
"""A mark for tests that CI runs and ``make test`` on a developer's machine does not."""


def in_ci(*values: object) -> Any:
    """Mark test parameters that CI runs and ``make test`` on a developer's machine does not."""
    return pytest.param(*values, marks=CI)


TEST_43 = IN_CI or os.environ.get("NATIVE_DELAY_TEST_43") == "1"


def installed_rabbitmq(name: Literal["3.10", "4.3"]) -> str:
    """The RabbitMQ version of a test's parameter; skips if it is not installed or not selected.

    "3.10" stands for the system's RabbitMQ, which is 3.10 on Debian 12.
    """
    if name == "4.3" and not TEST_43:
        pytest.skip("RabbitMQ 4.3 is tested on request: set NATIVE_DELAY_TEST_43=1")
    return installed(require_rabbitmq, None if name == "3.10" else name).version


def self_signed_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate and a key for 127.0.0.1 into *folder* as PEM; returns their paths."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    options += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", *options, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key
