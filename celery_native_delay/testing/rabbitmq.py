"""Start a private RabbitMQ for tests, usually within 3 to 8 seconds.

    with private_rabbitmq() as rabbitmq:
        app = Celery(broker=rabbitmq.new_vhost())

The node has its own name, ports, data, log, home and Erlang cookie. The node listens on 127.0.0.1
only, and shares nothing with another RabbitMQ of the machine.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

from .processes import BrokerFailed, BrokerMissing, KeptServer, PrivateServer, claim_ports, port_of

_SERVERS = (
    Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),
    Path("/opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server"),
    Path("/usr/local/opt/rabbitmq/sbin/rabbitmq-server"),
)


@dataclass(frozen=True)
class RabbitMQInstallation:
    """An installed RabbitMQ."""

    server: Path
    """The path of the server script inside *root*. The script on the PATH would switch users."""
    version: str
    root: Path = Path("/")
    """The folder that is the server's root folder."""
    enter: tuple[str, ...] = ()
    """The words before each command, such as those of a chroot into *root*."""


def find_rabbitmq(version: str | None = None) -> RabbitMQInstallation | None:
    """Return the RabbitMQ that apt or Homebrew installed; None if it is not of *version*."""
    found = next(((server, its) for server in _SERVERS if (its := version_of(server))), None)
    if found is None or (version is not None and not f"{found[1]}.".startswith(f"{version}.")):
        return None
    return RabbitMQInstallation(*found)


def version_of(server: Path) -> str | None:
    """Read the version from RabbitMQ's plugin files; return None if RabbitMQ is not installed."""
    for plugin in server.resolve().parent.parent.glob("plugins/rabbit-*"):
        if match := re.fullmatch(r"rabbit-(\d+\.\d+\.\d+.*?)(\.ez)?", plugin.name):
            return match[1]
    return None


def require_rabbitmq(version: str | None = None) -> RabbitMQInstallation:
    """Return the installed RabbitMQ; raise BrokerMissing if there is none of *version*."""
    if installation := find_rabbitmq(version):
        return installation
    other = find_rabbitmq() if version else None
    raise BrokerMissing(
        f"RabbitMQ{f' {version}' if version else ''} is not installed: run "
        f"`scripts/setup_brokers.sh`, `apt install rabbitmq-server` or `brew install rabbitmq`"
        f"{f'; this machine has {other.version}' if other else ''}"
    )


_CONFIG = """\
# Milliseconds between the reports of connections, channels and classic queues.
collect_statistics_interval = 500
management.tcp.ip = {ip}
management.tcp.port = {management_port}
# Limits that no laptop reaches, so that they never block a test.
vm_memory_high_watermark.absolute = 2GB
disk_free_limit.absolute = 50MB
log.file.level = info
log.console = false
{extra}
"""

# How often quorum queues report their counts (ms) and the management API reads them (s); both are
# 5 s by default. They are arguments because the caller writes advanced.config.
_ERLANG_ARGUMENTS = (
    "-rabbit quorum_tick_interval 500"
    " -rabbitmq_management_agent sample_retention_policies"
    " [{global,[{60,1}]},{basic,[{60,1}]},{detailed,[{10,1}]}]"
)


def vhost_name(url: str) -> str:
    """Return the virtual host of an AMQP URL: "/" for "amqp://guest:guest@127.0.0.1:5672//".

    If *url* has several URLs separated by ";", return the virtual host of the first URL.
    """
    return unquote(urlsplit(url.partition(";")[0]).path[1:]) or "/"


@contextmanager
def private_rabbitmq(*, version: str | None = None, **options: Any) -> Iterator[PrivateRabbitMQ]:
    """Run a private RabbitMQ node until the ``with`` block ends.

    Args:
        version: the version that must be installed, such as "3.10"; None: any.
        **options: the options of :class:`PrivateRabbitMQ`.

    Raises:
        BrokerMissing: this version is not installed.
        BrokerFailed: the node does not start.
    """
    with closing(PrivateRabbitMQ(require_rabbitmq(version), **options)) as rabbitmq:
        rabbitmq.start()
        yield rabbitmq


class PrivateRabbitMQ(PrivateServer):
    """A private RabbitMQ node, made by private_rabbitmq(); the node ends with the Python process.

    Args:
        installation: the RabbitMQ to run.
        management: if False, run the node without the management API. Then the node starts sooner,
            and methods that need the API raise BrokerFailed.
        config: further lines of rabbitmq.conf.
        advanced_config: the text of advanced.config.
        erlang_arguments: further arguments of the Erlang runtime, which override the defaults.
    """

    version: str
    """The version that the running node reports, such as "3.10.8"."""
    port: int
    """The AMQP port on *ip*; the port stays the same after kill() and start()."""
    ip: str = "127.0.0.1"
    """The IP address on which the node listens."""
    name: str
    """The name of the node, such as "node1@localhost"."""

    _user = _password = "guest"

    def __init__(
        self,
        installation: RabbitMQInstallation,
        *,
        management: bool = True,
        config: str = "",
        advanced_config: str = "",
        erlang_arguments: str = "",
    ) -> None:
        self.installation = installation
        self.version = installation.version
        self.management = management
        self._erlang_arguments = f"{self._interface} {_ERLANG_ARGUMENTS} {erlang_arguments}"
        self._claims = claim_ports(4)
        self.port, self._management_port, self._distribution_port, self._epmd_port = map(
            port_of, self._claims
        )
        self._root = installation.root
        temporary = self._root / "tmp" if installation.enter else None
        self._home = Path(tempfile.mkdtemp(prefix="private-rabbitmq-", dir=temporary))
        (self._home / "rabbitmq.conf").write_text(
            _CONFIG.format(ip=self.ip, management_port=self._management_port, extra=config)
        )
        (self._home / "advanced.config").write_text(advanced_config or "[].\n")
        (self._home / "enabled_plugins").write_text(
            "[rabbitmq_management].\n" if management else "[].\n"
        )
        self.name = f"{self._home.name}@localhost"
        self._environment = self._server_environment()
        self._server = KeptServer(
            f"RabbitMQ {self.version}",
            self._inside(str(self.installation.server)),
            home=self._home,
            environment=self._environment,
            logs=["log/node.log"],
            companion=self._companion(),
        )

    @property
    def url(self) -> str:
        """The AMQP URL of the default virtual host."""
        return f"amqp://guest:guest@{self.ip}:{self.port}//"

    @property
    def management_url(self) -> str:
        """The URL of the management API, without a slash at its end."""
        return f"http://{self.ip}:{self._management_port}"

    @property
    def data_dir(self) -> Path:
        """The folder of the node's messages and metadata."""
        return self._home / "data"

    # ---- administration --------------------------------------------------------------------

    def new_vhost(self) -> str:
        """Create an empty virtual host for the user guest, and return its AMQP URL."""
        name = f"test-{secrets.token_hex(6)}"  # `random` repeats itself inside a hypothesis test
        self.api("PUT", f"/vhosts/{name}")
        self.api("PUT", f"/permissions/{name}/{self._user}", dict.fromkeys(_PERMISSIONS, ".*"))
        return self.url_of(name)

    def url_of(self, vhost: str, user: str = "guest", password: str = "guest") -> str:
        """Return the AMQP URL of *vhost*, with *user* and *password* in the URL."""
        user, password, vhost = (quote(part, safe="") for part in (user, password, vhost))
        return f"amqp://{user}:{password}@{self.ip}:{self.port}/{vhost}"

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all its queues and exchanges."""
        self.api("DELETE", f"/vhosts/{quote(name, safe='')}")

    def add_user(
        self,
        name: str,
        password: str,
        *,
        configure: str = ".*",
        write: str = ".*",
        read: str = ".*",
        vhost: str = "/",
        tags: str = "",
    ) -> str:
        """Create a user with permissions on *vhost*; return the user's AMQP URL.

        *configure*, *write* and *read* are regular expressions for the names of queues and
        exchanges, as in ``rabbitmqctl set_permissions``. *tags* are the user's tags, such as
        "monitoring".
        """
        user = quote(name, safe="")
        self.api("PUT", f"/users/{user}", {"password": password, "tags": tags})
        permissions = dict(zip(_PERMISSIONS, (configure, write, read), strict=True))
        self.api("PUT", f"/permissions/{quote(vhost, safe='')}/{user}", permissions)
        return self.url_of(vhost, name, password)

    def set_policy(
        self,
        vhost: str,
        name: str,
        pattern: str,
        definition: Mapping[str, object],
        apply_to: Literal["queues", "exchanges", "all"] = "queues",
    ) -> None:
        """Create or replace a policy; RabbitMQ changes existing queues a little later."""
        body = {"pattern": pattern, "definition": dict(definition), "apply-to": apply_to}
        self.api("PUT", f"/policies/{quote(vhost, safe='')}/{quote(name, safe='')}", body)

    def queues(self, vhost: str = "/") -> list[dict[str, Any]]:
        """Return all queues of a virtual host, as the management API shows them.

        Counts are 1 to 2 seconds old; a queue declared within the last second has no counts yet.
        """
        queues: list[dict[str, Any]] = self.api("GET", f"/queues/{quote(vhost, safe='')}")
        return queues

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the management API, such as GET "/overview"; return the decoded JSON answer.

        Raises:
            BrokerFailed: the node refused the request; the message has the node's answer.
        """
        if not self.management:
            raise BrokerFailed(f"{method} {path}: this node was started with management=False")
        credentials = f"{self._user}:{self._password}"
        request = urllib.request.Request(
            f"{self.management_url}/api{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": "Basic " + b64encode(credentials.encode()).decode(),
                "Content-Type": "application/json",
            },
        )
        try:
            with _LOCAL.open(request, timeout=60) as response:
                text = response.read()
        except urllib.error.HTTPError as exc:
            with exc:
                said = exc.read().decode(errors="replace")
            raise BrokerFailed(f"{method} {path}: {exc.code} {exc.reason}: {said}") from exc
        return json.loads(text) if text else None

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run rabbitmqctl for this node and return its output. One call takes about a second."""
        command = self.installation.server.with_name("rabbitmqctl")
        done = subprocess.run(
            self._inside(str(command), "--quiet", *arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BrokerFailed(f"rabbitmqctl {shlex.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _interface(self) -> str:
        return f"-kernel inet_dist_use_interface {in_erlang(self.ip)}"

    def _companion(self) -> list[str]:
        """The command of epmd, the daemon that knows the ports of Erlang nodes."""
        return self._inside("epmd", "-address", self.ip, "-port", str(self._epmd_port))

    def _server_environment(self) -> dict[str, str]:
        """All environment variables of the server, which inherits none from this process."""
        home = "/" / self._home.relative_to(self._root)
        return {
            "PATH": f"{self.installation.server.parent}:{_PATH}",
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "ERL_EPMD_ADDRESS": self.ip,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_IP_ADDRESS": self.ip,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_LOGS": str(home / "log" / "node.log"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(home / "conf.d" / "*.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_PLUGINS_EXPAND_DIR": str(home / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "RABBITMQ_PID_FILE": str(home / "node.pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": self._erlang_arguments,
            "RABBITMQ_CTL_ERL_ARGS": self._interface,
            # With this variable, the script replaces itself with the node instead of starting a
            # child. Then our child process is the node itself.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _inside(self, *command: str) -> list[str]:
        return [*self.installation.enter, *command]

    def _serves(self) -> bool:
        """Return True if AMQP and the management API answer; also store RabbitMQ's version."""
        try:
            with socket.create_connection((self.ip, self.port), timeout=5) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                if not connection.recv(1):
                    return False
            if self.management:
                self.version = self.api("GET", "/overview")["rabbitmq_version"]
        except (OSError, BrokerFailed):
            return False
        return True


def in_erlang(ip: str) -> str:
    """Return the IP address in Erlang's syntax, such as {127,0,0,1}."""
    return "{" + ip.replace(".", ",") + "}"


_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/opt/homebrew/bin:/usr/local/bin"

_PERMISSIONS = ("configure", "write", "read")

_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without a proxy, because the node is on this machine."""
