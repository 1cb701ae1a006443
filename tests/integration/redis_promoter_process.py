"""A promoter as a process of its own: ``python -m tests.integration.redis_promoter_process URL``.

Says "ready", promotes from the first line it is told; killing it is how it ends.
"""

from __future__ import annotations

import sys

from celery_native_delay.transports.redis.promoter import Promoter
from tests.integration.redis_traffic import connector

if __name__ == "__main__":
    promoter = Promoter(connector(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    promoter.run()
