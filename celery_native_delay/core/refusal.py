"""What is reported of a message that the broker did not take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedMessage:
    """A message that the broker did not take: all that is needed to send it again.

    *exchange* and *routing_key* are what it was published with, *delivery_id* is None if it had
    no wait ahead; *returned* is True if it led nowhere.
    """

    reason: str
    exchange: str
    routing_key: str
    headers: Mapping[str, Any]
    body: bytes | str
    delivery_id: str | None = None
    returned: bool = False

    @property
    def task_id(self) -> str | None:
        """The id of a Celery task, None for any other message."""
        return self.headers.get("id") if "task" in self.headers else None

    def __str__(self) -> str:
        name = f"{self.headers['task']}[{self.task_id}]" if "task" in self.headers else "a message"
        return f"{name} to exchange {self.exchange!r}, key {self.routing_key!r}: {self.reason}"
