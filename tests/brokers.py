"""What tests that start brokers of their own need besides."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from celery_native_delay.testing import require_rabbitmq
from pytest_celery_native_delay import IN_CI, installed

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
