"""All that a broker needs before the first message waits, as text for other tools to declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..settings import DelaySettings


@dataclass(frozen=True)
class ExportAs:
    """The format of a file that other tools are to declare from, and what it is for.

    *vhost* None is that of the connection; *cluster* is the broker's name in Kubernetes. Without
    *own_queues* the app's own are taken to be there.
    """

    form: str
    vhost: str | None = None
    cluster: str = "rabbitmq"
    own_queues: bool = True


@dataclass(frozen=True)
class Exported:
    """The text of such a file, and how many declarations of each kind are in it.

    *left_out* are queues and exchanges that come and go with a process, which declares them itself.
    """

    text: str
    counts: Mapping[str, int]
    left_out: tuple[str, ...]


@runtime_checkable
class Exports(Protocol):
    """A transport to a broker that has to have queues and bindings before a message can wait."""

    def export(self, settings: DelaySettings, queues: Sequence[Any], how: ExportAs) -> Exported:
        """All that *settings* and the app's *queues* need there, for other tools; not connected."""
