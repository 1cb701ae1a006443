"""Installations of RabbitMQ on this machine: the system's, and 4.3 in a folder of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import BrokerMissing

ROOT_VARIABLE = "NATIVE_DELAY_RABBITMQ_43_ROOT"
"""Environment variable: the folder that holds Debian testing with RabbitMQ 4.3."""

_DEFAULT_ROOT = "~/.cache/celery_native_delay/rabbitmq-4.3"


@dataclass(frozen=True)
class RabbitMQInstallation:
    """A RabbitMQ on this machine: its server script, its version and the root it lives in."""

    server: Path
    """The script as seen from *root*; not the wrapper on the PATH, which switches users."""
    version: str
    root: Path | None = None
    """Folder to chroot into; None for the system itself."""


def find_rabbitmq(version: str | None = None) -> RabbitMQInstallation | None:
    """The installed RabbitMQ whose version starts with *version*; for None, the system's."""
    for installation in _installations():
        if version is None and installation.root is None:
            return installation
        if version is not None and f"{installation.version}.".startswith(f"{version}."):
            return installation
    return None


def _installations() -> Iterator[RabbitMQInstallation]:
    servers = [
        Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),
        Path("/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server"),
        Path("/usr/local/opt/rabbitmq/sbin/rabbitmq-server"),
    ]
    for server in servers:
        if version := _version_of(server):
            yield RabbitMQInstallation(server, version)
            break
    root = _rabbitmq_43_root()
    may_enter = os.geteuid() == 0
    if may_enter and (version := _version_of(root / servers[0].relative_to("/"))):
        yield RabbitMQInstallation(servers[0], version, root)


def _version_of(server: Path) -> str | None:
    """Version of the release *server* belongs to, read from its folder of plugins."""
    for plugin in server.resolve().parent.parent.glob("plugins/rabbit-*"):
        if match := re.fullmatch(r"rabbit-(\d+\.\d+\.\d+.*?)(\.ez)?", plugin.name):
            return match[1]
    return None


def _rabbitmq_43_root() -> Path:
    return Path(os.environ.get(ROOT_VARIABLE) or _DEFAULT_ROOT).expanduser()


def require_rabbitmq(version: str | None = None) -> RabbitMQInstallation:
    """The installation that find_rabbitmq() finds; BrokerMissing says what to install."""
    if installation := find_rabbitmq(version):
        return installation
    if version == "4.3":
        raise BrokerMissing(
            f"RabbitMQ 4.3 is not in {_rabbitmq_43_root()}, or only root may enter it (chroot): as "
            f"root, run `scripts/setup_brokers.sh --with-4.3`, or name the folder that has it in "
            f"{ROOT_VARIABLE}"
        )
    other = find_rabbitmq() if version else None
    raise BrokerMissing(
        f"RabbitMQ{f' {version}' if version else ''} is not installed: run "
        f"`scripts/setup_brokers.sh`, `apt install rabbitmq-server` or `brew install rabbitmq`"
        f"{f'; this machine has {other.version}' if other else ''}"
    )
