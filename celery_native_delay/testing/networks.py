"""A network of this machine's own that can be cut: one namespace per host, a router between."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType

from .errors import BrokerFailed, BrokerMissing

_TOOLS = ("ip", "nsenter", "unshare")

# Set aside for tests of networks (RFC 2544): no other network is reached by these addresses.
_SUBNET = "198.18.{number}"

_HOLDER = "echo ready && read -r _"
"""A namespace lasts as long as a process in it, and the cables into it as long as it does."""


class PrivateNetwork:
    """So many hosts that reach each other, and are reached from here, through a router.

    Between hosts it can be cut, both ways and silently, as a broken switch would. It is gone with
    this process, however that ends.

    Raises BrokerMissing where namespaces cannot be made.
    """

    hosts: dict[str, str]
    """Name and address of every host."""

    def __init__(self, hosts: int) -> None:
        if (missing := [tool for tool in _TOOLS if not shutil.which(tool)]) or os.geteuid() != 0:
            why = f"{', '.join(missing)} missing" if missing else "not root"
            raise BrokerMissing(
                f"a network that can be cut needs root on Linux with iproute2 and util-linux: {why}"
            )
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: list[tuple[str, str]] = []
        try:
            router = self._hold("router")
            subnet = self._cable_to_here(router)
            self.hosts = {f"host{number}": f"{subnet}.{number}" for number in range(1, hosts + 1)}
            self._in(router, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
            for name, ip in self.hosts.items():
                host = self._hold(name)
                self._ip(f"link add {name} netns {router} type veth peer name eth0 netns {host}")
                self._ip(f"addr add {subnet}.253 peer {ip}/32 dev {name}", router)
                self._ip(f"link set {name} up", router)
                self._ip("link set lo up", host)
                self._ip(f"addr add {ip} peer {subnet}.253/32 dev eth0", host)
                self._ip("link set eth0 up", host)
                self._ip(f"route add default via {subnet}.253", host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PrivateNetwork:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def enter(self, host: str) -> tuple[str, ...]:
        """The command that runs another one on *host*."""
        return _enter(self._holders[host].pid)

    def cut(self, one: str, other: str) -> None:
        """Drop what these two addresses send each other."""
        for source, target in ((one, other), (other, one)):
            if (source, target) not in self._cuts:
                self._rule("add", source, target)
                self._cuts.append((source, target))

    def mend(self) -> None:
        """Undo every cut()."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())

    def close(self) -> None:
        """Remove the network; processes that still run in it keep their part alive."""
        for holder in self._holders.values():
            holder.communicate()

    def _hold(self, name: str) -> int:
        """Make a namespace; return the id of the process that holds it."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        if not holder.stdout.readline():
            said = holder.communicate()[1].decode().strip()
            raise BrokerMissing(f"a network that can be cut needs namespaces: {said}")
        return holder.pid

    def _cable_to_here(self, router: int) -> str:
        """Join the router to this process' network; return the subnet that it took."""
        while True:
            number = secrets.randbelow(256)
            subnet = _SUBNET.format(number=number)
            name = f"native-delay{number}"
            with suppress(FileExistsError):
                self._ip(f"link add {name} type veth peer name clients netns {router}")
                break
        self._ip(f"addr add {subnet}.254 peer {subnet}.253/32 dev {name}")
        self._ip(f"link set {name} up")
        self._ip("link set lo up", router)
        self._ip(f"addr add {subnet}.253 peer {subnet}.254/32 dev clients", router)
        self._ip("link set clients up", router)
        self._ip(f"route add {subnet}.0/24 via {subnet}.253 dev {name}")
        return subnet

    def _rule(self, verb: str, source: str, target: str) -> None:
        router = self._holders["router"].pid
        self._ip(f"rule {verb} from {source} to {target} blackhole", router)

    def _ip(self, command: str, inside: int | None = None) -> None:
        self._in(inside, "ip", *command.split())

    def _in(self, inside: int | None, *command: str) -> None:
        enter = () if inside is None else _enter(inside)
        done = subprocess.run([*enter, *command], capture_output=True, text=True)
        if "File exists" in done.stderr:
            raise FileExistsError(done.stderr)
        if done.returncode:
            raise BrokerFailed(f"{' '.join(command)}: {done.stderr.strip()}")


def _enter(process: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{process}/ns/net", "--")
