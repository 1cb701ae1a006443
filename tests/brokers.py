"""Settings, marks and certificates for tests that start brokers."""

from __future__ import annotations

import os
import subprocess
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from pytest_celery_native_delay import IN_CI, installed
from tests.given_rabbitmq import given_rabbitmq
from tests.rabbitmqs import find_rabbitmq, require_rabbitmq

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


def _system_rabbitmq() -> str:
    found = given_rabbitmq() or find_rabbitmq()
    return ".".join(found.version.split(".")[:2]) if found else "system"


SYSTEM_RABBITMQ = _system_rabbitmq()
"""The version of the system's RabbitMQ, such as "3.10" on Debian 12; "system" if it has none.

With ``NATIVE_DELAY_TEST_RABBITMQ_URL``, the version of that RabbitMQ.
"""

ON_SYSTEM = pytest.param(
    SYSTEM_RABBITMQ, marks=pytest.mark.rabbitmq, id=f"rabbitmq-{SYSTEM_RABBITMQ}"
)
"""The test parameter for the system's RabbitMQ."""

ON_RABBITMQS = [ON_SYSTEM]
"""The test parameters for the RabbitMQ versions on which all tests of RabbitMQ run."""

if SYSTEM_RABBITMQ != "4.3" and given_rabbitmq() is None:
    ON_RABBITMQS.append(pytest.param("4.3", marks=pytest.mark.rabbitmq43, id="rabbitmq-4.3"))

on_one_version = pytest.mark.parametrize("rabbitmq_version", [ON_SYSTEM], indirect=True)
"""Run a test on one RabbitMQ version only: for code that behaves the same on all versions."""


def in_turn(names: str, *rows: tuple[object, ...]) -> pytest.MarkDecorator:
    """Run a test with each row of parameters on one RabbitMQ version: the versions take turns."""
    params = [
        pytest.param(
            *version.values, *row, marks=version.marks, id="-".join([version.id, *map(str, row)])
        )
        for version, row in zip(cycle(ON_RABBITMQS), rows, strict=False)
    ]
    together = ("rabbitmq_version", *names.split(", "))
    return pytest.mark.parametrize(together, params, indirect=["rabbitmq_version"])


CI = pytest.mark.ci
"""A mark for tests that CI runs and ``make test`` on a developer's machine does not."""


def in_ci(*values: object) -> Any:
    """Mark test parameters that CI runs and ``make test`` on a developer's machine does not."""
    return pytest.param(*values, marks=CI)


TEST_43 = IN_CI or os.environ.get("NATIVE_DELAY_TEST_43") == "1"


def installed_rabbitmq(name: str = SYSTEM_RABBITMQ) -> str:
    """The RabbitMQ version of a test's parameter; skips if it is not installed or not selected."""
    if (given := given_rabbitmq()) is not None:
        return given.version
    if name == SYSTEM_RABBITMQ:
        return installed(require_rabbitmq).version
    if not TEST_43:
        pytest.skip("RabbitMQ 4.3 is tested on request: set NATIVE_DELAY_TEST_43=1")
    return installed(require_rabbitmq, name).version


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
