"""A network inside this machine that tests can cut: one namespace per host, and a router."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

from celery_native_delay.testing.processes import BrokerFailed, BrokerMissing

_TOOLS = ("ip", "nsenter", "unshare")

# Of the addresses set aside for tests of networks: https://www.rfc-editor.org/rfc/rfc2544
_SUBNET = "198.18.{number}"
_HERE, _ROUTER = 254, 253
"""The last octets of this machine's address and of the router's; hosts count from 1."""

# A namespace is there as long as a process is in it, and a cable as long as both of its ends.
_HOLDER = "echo ready && read -r _"


class PrivateNetwork:
    """Hosts that reach each other through a router, and that this machine reaches.

    Packets between two hosts can be dropped silently. The network is removed when this process
    ends, however it ends, together with the processes that run in it.

    Raises BrokerMissing if this machine does not allow such networks.
    """

    hosts: dict[str, str]
    """The address of each host by host name."""
    interface: str
    """The name of this machine's network interface to the router."""

    def __init__(self, hosts: int) -> None:
        missing = [tool for tool in _TOOLS if not shutil.which(tool)]
        if missing or os.geteuid() != 0:
            raise BrokerMissing(
                "a network that can be cut needs Linux, root, iproute2 and util-linux; this is "
                + (f"without {', '.join(missing)}" if missing else "not root")
            )
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: set[tuple[str, str]] = set()
        try:
            router = self._hold("router")
            subnet = self._join(router)
            self.hosts = {f"host{number}": f"{subnet}.{number}" for number in range(1, hosts + 1)}
            for name, ip in self.hosts.items():
                host = self._hold(name)
                _ip(f"link add {name} netns {router} type veth peer name eth0 netns {host}")
                _connect(name, f"{subnet}.{_ROUTER}", ip, inside=router)
                _connect("eth0", ip, f"{subnet}.{_ROUTER}", inside=host)
                _ip(f"route add default via {subnet}.{_ROUTER}", inside=host)
                _ip("link set lo up", inside=host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PrivateNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, host: str) -> list[str]:
        """A command prefix that runs a command on this host."""
        return _enter(self._holders[host].pid)

    def cut(self, ip: str, other: str) -> None:
        """Drop all packets between these two addresses."""
        for source, target in ((ip, other), (other, ip)):
            if (source, target) not in self._cuts:
                self._rule("add", source, target)
                self._cuts.add((source, target))

    def mend(self) -> None:
        """Undo all calls of cut()."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())

    def close(self) -> None:
        """Remove the network; it stays for processes that still run in it."""
        for holder in self._holders.values():
            holder.communicate(b"end\n")  # a forked child may hold our end of its stdin open

    def _hold(self, name: str) -> int:
        """Create a network namespace; returns the id of the process that keeps it."""
        holder = self._holders[name] = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            said = holder.stderr.read().decode().strip()
            raise BrokerMissing(f"a network that can be cut needs namespaces: {said}")
        return holder.pid

    def _join(self, router: int) -> str:
        """Connect this machine and the router; returns the subnet of the network."""
        while True:
            number = secrets.randbelow(256)
            self.interface = f"native-delay{number}"
            try:
                _ip(f"link add {self.interface} type veth peer name machine netns {router}")
                break
            except BrokerFailed as exc:
                if "File exists" not in str(exc):
                    raise
        subnet = _SUBNET.format(number=number)
        _connect(self.interface, f"{subnet}.{_HERE}", f"{subnet}.{_ROUTER}")
        _connect("machine", f"{subnet}.{_ROUTER}", f"{subnet}.{_HERE}", inside=router)
        _ip(f"route add {subnet}.0/24 via {subnet}.{_ROUTER}")
        _run(*_enter(router), "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        return subnet

    def _rule(self, verb: str, source: str, target: str) -> None:
        router = self._holders["router"].pid
        _ip(f"rule {verb} from {source} to {target} blackhole", inside=router)


def _connect(interface: str, ip: str, other: str, *, inside: int | None = None) -> None:
    """Give one end of a veth pair its address, and tell it the address of the other end."""
    _ip(f"addr add {ip} peer {other}/32 dev {interface}", inside=inside)
    _ip(f"link set {interface} up", inside=inside)


def _ip(command: str, *, inside: int | None = None) -> None:
    """Run `ip` in the namespace of a process, or in the current one."""
    _run(*([] if inside is None else _enter(inside)), "ip", *command.split())


def _enter(process: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{process}/ns/net", "--"]


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BrokerFailed(f"{' '.join(command)}: {done.stderr.strip()}")
