"""The place of a RabbitMQ node in a private cluster: data, without a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A node's place in a cluster, and what it shares with the other members."""

    name: str
    """Name of the node, such as "node1@localhost"."""
    ip: str
    """Address that it listens on."""
    hosts: Mapping[str, str]
    """Address of every host that a node's name may have after the @."""
    cookie: str
    """Secret by which members know each other."""
    epmd_port: int
    runs_epmd: bool
    """True for one member of each host: it runs the daemon that tells the others' ports."""
    enter: Sequence[str] = ()
    """Command that runs another one where the node has its network."""
