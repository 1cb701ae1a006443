"""Run a broker for development until Ctrl-C: ``python -m celery_native_delay.testing [FOLDER]``."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress

from .processes import BrokerFailed, BrokerMissing
from .redis import embedded_broker


def main() -> None:
    """Run the embedded broker (a Valkey from a Python wheel), and print the broker's URL."""
    parser = argparse.ArgumentParser(
        prog="python -m celery_native_delay.testing",
        description="Run a broker for development, the Valkey of the extra `embedded`, and print "
        "its URL; until Ctrl-C.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        help="folder that keeps its messages for the next time; without one they are lost",
    )
    chosen = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's `&` lets Python ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), embedded_broker(chosen.folder) as broker:
        with suppress(KeyboardInterrupt):  # so that the broker is stopped normally
            print(broker.url, flush=True)  # noqa: T201  a command prints
            signal.pause()


if __name__ == "__main__":
    try:
        main()
    except (BrokerFailed, BrokerMissing) as exc:
        sys.exit(str(exc))
