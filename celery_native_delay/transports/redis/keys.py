"""Names of Redis keys and sorted set members, and the entries of waiting messages. No I/O."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ...records.redis import IndexKeys
from ..virtual.wrapping import id_of

#: A new format of the values needs a new version, because old messages wait under the old names.
#: Version 1 had scores in milliseconds, and was never released.
VERSION = 2

#: How many bytes the digest in a message's name has. Collisions are practically impossible. A name
#: with a UUID has at most 52 characters, one of the sizes that Redis allocates.
_DIGEST_BYTES = 9


class RedisBrokerKeys(IndexKeys):
    """The names of all Redis keys of one namespace."""

    def __init__(self, prefix: str, namespace: str) -> None:
        super().__init__(f"{prefix}{namespace}.v{VERSION}")
        #: kombu's ``global_keyprefix``. A hash tag (``{queue}:``) puts all keys into one cluster
        #: slot.
        self.prefix = prefix
        #: The heartbeat of processes that move due messages.
        self.promoting = f"{self.space}.promoting"

    def batches(self, outbox: str) -> str:
        """Return the key of the batch numbers stored by the bulk publisher with the id *outbox*."""
        return f"{self.space}.taken.{outbox}"


def member_of(message: Mapping[str, Any], destination: str) -> str:
    """Return the sorted set member of *message*; :func:`member` explains the format."""
    return member(id_of(message), str(message["properties"]["delivery_tag"]), destination)


def member(name: str, delivery_tag: str, destination: str) -> str:
    """Return the sorted set member of a waiting message: ``<name>:<digest>``.

    *name* is the task id; without a task id, the correlation id or delivery tag. The digest is a
    hash of the delivery tag and the destination.
    """
    # Retries, and copies for several queues, have different digests.
    digest = blake2b(f"{delivery_tag}\n{destination}".encode(), digest_size=_DIGEST_BYTES).digest()
    return f"{name}:{urlsafe_b64encode(digest).decode()}"


@dataclass(frozen=True)
class Destination:
    """The Redis list or the pub/sub channels that receive a due message."""

    keys: tuple[str, ...]
    #: A TTL for all keys, as in kombu for queues with ``x-expires``. The first key is the list.
    ttl_ms: int = 0
    broadcast: bool = False


def entry_of(destination: Destination, envelope: str) -> str:
    """Encode a destination and kombu's JSON message as one Redis hash value."""
    return front_of(destination).decode() + envelope


def front_of(destination: Destination) -> bytes:
    """Encode *destination*, the Redis keys to which a due message is delivered.

    For two keys: ``push <ttl ms> <length of key 1> <length of key 2>\\n<key 1><key 2>``. For a
    fanout exchange, the first word is ``publish``. A TTL of 0 means that the keys do not expire.
    """
    # A key may contain any byte, so its length is given. The Lua scripts do not parse kombu's JSON,
    # because cjson changes empty lists and long numbers.
    keys = [key.encode() for key in destination.keys]
    kind = "publish" if destination.broadcast else "push"
    head = " ".join([kind, str(destination.ttl_ms), *(str(len(key)) for key in keys)])
    return b"".join([head.encode(), b"\n", *keys])


def opened_entry(entry: bytes) -> tuple[Destination, bytes]:
    """Decode a Redis hash value into the destination and kombu's message."""
    head, _, rest = entry.partition(b"\n")
    kind, ttl_ms, *lengths = head.decode().split(" ")
    keys = []
    for length in map(int, lengths):
        keys.append(rest[:length].decode())
        rest = rest[length:]
    return Destination(tuple(keys), int(ttl_ms), kind == "publish"), rest
