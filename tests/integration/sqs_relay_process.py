"""A relay that is killed: ``python -m tests.integration.sqs_relay_process URL QUEUE VISIBILITY``.

Says "ready"; is killed by SIGKILL once it has sent its first messages on, before it deletes them.
"""

from __future__ import annotations

import os
import signal
import sys

from celery_native_delay import register_transports
from celery_native_delay.transports.sqs import hops, relay
from tests.integration.sqs_traffic import HOP_SECONDS, delaying


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    url, queue, visibility_seconds = sys.argv[1:]
    register_transports()
    hops.HOP_SECONDS = HOP_SECONDS
    relay.QueueRelay._delete = die  # type: ignore[method-assign]
    relay.VISIBILITY_SECONDS = int(visibility_seconds)
    doomed = relay.SqsRelay(lambda: delaying(url), [queue])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    doomed.run()
