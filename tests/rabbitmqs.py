"""RabbitMQ 4.3 in a folder of its own, beside the system's RabbitMQ; entered by chroot, as root.

``scripts/setup_brokers.sh --with-4.3`` makes the folder, from Debian testing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from celery_native_delay import testing
from celery_native_delay.testing import BrokerMissing, PrivateRabbitMQ, RabbitMQInstallation
from celery_native_delay.testing.rabbitmq import version_of

ROOT_VARIABLE = "NATIVE_DELAY_RABBITMQ_43_ROOT"
"""An environment variable that names the folder."""

_DEFAULT_ROOT = "~/.cache/celery_native_delay/rabbitmq-4.3"

_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

# The node has its own mount namespace. The mounts end with the node.
_ENTER_ROOT = (
    'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
)


def find_rabbitmq(version: str | None = None) -> RabbitMQInstallation | None:
    """The system's RabbitMQ, or the one in the folder; None if neither is of *version*."""
    if (found := testing.find_rabbitmq(version)) is not None:
        return found
    root = _root()
    in_root = version_of(root / _SERVER.relative_to("/")) if os.geteuid() == 0 else None
    if version is None or in_root is None or not f"{in_root}.".startswith(f"{version}."):
        return None
    enter = ("unshare", "--mount", "sh", "-c", _ENTER_ROOT, str(root))
    return RabbitMQInstallation(_SERVER, in_root, root, enter)


def require_rabbitmq(version: str | None = None) -> RabbitMQInstallation:
    """The RabbitMQ of *version*; raises BrokerMissing if it is not installed."""
    found = find_rabbitmq(version)
    if found is None and version == "4.3":
        raise BrokerMissing(
            f"RabbitMQ 4.3 is not in {_root()}, or only root may enter it (chroot): as root, run "
            f"`scripts/setup_brokers.sh --with-4.3`, or name the folder that has it in "
            f"{ROOT_VARIABLE}"
        )
    return found or testing.require_rabbitmq(version)


@contextmanager
def private_rabbitmq(*, version: str | None = None, **options: Any) -> Iterator[PrivateRabbitMQ]:
    """Run a private node of *version* until the block ends."""
    with closing(PrivateRabbitMQ(require_rabbitmq(version), **options)) as rabbitmq:
        rabbitmq.start()
        yield rabbitmq


def _root() -> Path:
    return Path(os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT).expanduser()
