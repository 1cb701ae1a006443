"""Run moto's SQS server on 127.0.0.1: ``python moto_server.py PORT``.

The script corrects two faults of moto. Moto may give one message to two concurrent receivers. Moto
makes delayed messages visible only once a second.
"""

from __future__ import annotations

import logging
import sys
from threading import Lock
from time import monotonic, sleep
from typing import Any

_LOOK_SECONDS = 0.02


def _receive_one_at_a_time() -> None:
    from moto.sqs.models import SQSBackend

    receive, lock = SQSBackend.receive_message, Lock()

    def receive_message(
        self: Any, queue_name: str, count: int, wait_seconds_timeout: int, *args: Any, **kwargs: Any
    ) -> Any:
        deadline = monotonic() + int(wait_seconds_timeout or 0)
        while True:
            with lock:
                found = receive(self, queue_name, count, 0, *args, **kwargs)
            if found or monotonic() >= deadline:
                return found
            sleep(_LOOK_SECONDS)

    SQSBackend.receive_message = receive_message  # type: ignore[method-assign]


if __name__ == "__main__":
    from moto.server import main

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _receive_one_at_a_time()
    main(["--host", "127.0.0.1", "--port", sys.argv[1]])
