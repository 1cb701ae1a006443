"""A private SQS for tests and demos: moto's server in a separate process.

    with private_sqs() as sqs:
        app = Celery(broker=sqs.url)

Moto keeps everything in memory and differs from SQS on AWS:

- AWS remembers a deduplication id for five minutes, even if the message is deleted.
- AWS refuses a queue with ``DelaySeconds`` over 900.
- AWS deletes messages that are older than the queue's retention, and throttles.
- AWS sometimes delivers a message of a standard queue twice.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from celery_native_delay.testing.processes import BrokerMissing, KeptServer, claim_ports, port_of

_BOOT_SECONDS = 60
"""The time limit of a start, which usually takes 0.5 s."""


def require_sqs() -> None:
    """Raise BrokerMissing if moto or boto3 is missing. The message says what to install."""
    for module in ("boto3", "flask_cors", "moto"):
        if find_spec(module) is None:
            raise BrokerMissing(f"{module} is not installed: pip install moto flask flask-cors")


@contextmanager
def private_sqs() -> Iterator[PrivateSqs]:
    """Run a private SQS server until the ``with`` block ends.

    Raises:
        BrokerMissing: moto or boto3 is not installed. The message says what to install.
        BrokerFailed: the server does not start.
    """
    require_sqs()
    sqs = PrivateSqs()
    with closing(sqs):
        sqs.start()
        yield sqs


class PrivateSqs:
    """A private SQS server (moto), made by private_sqs(); ends with the Python process."""

    port: int
    """The TCP port on 127.0.0.1, the same after kill() and start()."""
    folder: Path
    """The folder of the server's log; close() removes the folder."""

    def __init__(self) -> None:
        self._claims = claim_ports(1)
        self.port = port_of(self._claims[0])
        self.folder = Path(tempfile.mkdtemp(prefix="private-sqs-"))
        program = Path(__file__).with_name("moto_server.py")
        self._server = KeptServer(
            "moto's SQS", [sys.executable, str(program), str(self.port)], home=self.folder
        )

    @property
    def url(self) -> str:
        """The broker URL for Celery."""
        return f"sqs://private:private@127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """The ``endpoint_url`` for boto3."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None while the server is stopped."""
        return self._server.pid

    @cached_property
    def client(self) -> Any:
        """A boto3 client of the server; close() closes the client."""
        import boto3

        return boto3.Session("private", "private", region_name="us-east-1").client(
            "sqs", endpoint_url=self.endpoint
        )

    def start(self) -> None:
        """Start the server on the same port, without queues.

        Raises BrokerFailed if the server does not start within 60 s. The message has the end of the
        log.
        """
        self._server.start(self._serves, within_seconds=_BOOT_SECONDS)

    def stop(self) -> None:
        """Stop the server. All its messages are lost, unlike on AWS."""
        self._server.end(signal.SIGTERM, within_seconds=60)

    def kill(self) -> None:
        """Kill the server with SIGKILL. All its messages are lost."""
        self._server.end(signal.SIGKILL)

    def wipe(self) -> None:
        """Delete all queues."""
        urlopen(Request(f"{self.endpoint}/moto-api/reset", method="POST"), timeout=30).close()

    def close(self) -> None:
        """Kill the server and remove its folder. The same happens when the Python process ends."""
        self._server.close()
        if "client" in vars(self):
            self.client.close()
        for claim in self._claims:
            claim.close()

    def log_tail(self, lines: int = 30) -> str:
        """Return the last *lines* of the server's log."""
        return self._server.log_tail(lines)

    def _serves(self) -> bool:
        try:
            urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
        except OSError:
            return False
        return True
