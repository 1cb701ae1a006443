"""What tests that start brokers of their own need besides."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

from celery_native_delay.testing import require_rabbitmq
from pytest_celery_native_delay import IN_CI, installed

RETRY_MS = 3000
"""How soon mortal_rabbitmq tries again what it could not dead-letter; after 180 s by default.

That is what it cannot deliver, and what comes to a level before that has a leader, at its start.
"""

LARGEST_MESSAGE = 1_000_000
"""Bytes that mortal_rabbitmq takes; 16 or 128 MB by default."""

MORTAL = {
    "config": f"max_message_size = {LARGEST_MESSAGE}",
    "advanced_config": (
        f"[{{rabbit, [{{dead_letter_worker_publisher_confirm_timeout, {RETRY_MS}}}]}}]."
    ),
}
"""How mortal_rabbitmq is configured."""

on_one_version = pytest.mark.parametrize(
    "rabbitmq_version", [pytest.param("3.10", marks=pytest.mark.rabbitmq310)], indirect=True
)
"""For a test of our own side alone: what the versions may differ in is tested elsewhere."""


CI = pytest.mark.ci
"""For what ``make test`` at home does not run."""


def in_ci(*values: object) -> Any:
    """A parameter, or several, of which CI runs the tests, and ``make test`` at home does not."""
    return pytest.param(*values, marks=CI)


TEST_43 = IN_CI or os.environ.get("NATIVE_DELAY_TEST_43") == "1"


def installed_rabbitmq(name: Literal["3.10", "4.3"]) -> str:
    """The version behind a test's parameter; where it is not there or not asked for, skip.

    "3.10" stands for the system's RabbitMQ, whichever it is: 3.10 on Debian 12.
    """
    if name == "4.3" and not TEST_43:
        pytest.skip("RabbitMQ 4.3 is tested on request: set NATIVE_DELAY_TEST_43=1")
    return installed(require_rabbitmq, None if name == "3.10" else name).version


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
