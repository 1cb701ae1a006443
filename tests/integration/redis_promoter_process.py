"""A promoter as a process of its own: ``python -m tests.integration.redis_promoter_process URL``.

Prints a line when it has begun; killing it is how it ends.
"""

from __future__ import annotations

import sys

from celery_native_delay.transports.redis.promoter import Promoter
from tests.integration.redis_traffic import connector

if __name__ == "__main__":
    sys.stdout.write("promoting\n")
    sys.stdout.flush()
    Promoter(connector(sys.argv[1])).run()
