"""Write messages for kombu's filesystem transport so that consumers see only complete files.

kombu creates each file under the final name. A consumer that reads the file too early gets an empty
file, loses the message, and ends. So this package writes under another name, and then renames the
file. Its consumers wait for the files that kombu itself writes.
https://github.com/celery/kombu/blob/v5.5.0/kombu/transport/filesystem.py#L238
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path
from time import monotonic, time
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError

#: Error numbers that mean that the queue's name is wrong, if the folder exists.
_BY_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG)

#: An incomplete file of this age is left by a producer that has died.
_WRITING_SECONDS = 10.0

#: More than the next file, because other consumers may take that one in the meantime.
_LOOKED_AT = 10


def is_folder(channel: Any) -> bool:
    """Return True if *channel* is a channel of kombu's filesystem transport."""
    return hasattr(channel, "data_folder_out")


def is_next_unfinished(channel: Any, queue: str) -> bool:
    """Return True if a producer without this package still writes the queue's next message."""
    with os.scandir(channel.data_folder_in) as found:
        files = {each.name: each.path for each in found if each.name.endswith(f".{queue}.msg")}
    return any(_is_unfinished(files[name]) for name in nsmallest(_LOOKED_AT, files))


def _is_unfinished(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            file.seek(max(found.st_size - 1, 0))
            return file.read() != b"}" and time() - found.st_mtime < _WRITING_SECONDS
    except OSError:
        return False  # another consumer has taken the message


def put_file(channel: Any, queue: str, envelope: str) -> None:
    """Write a message as a complete JSON file into the transport's folder."""
    folder = Path(channel.data_folder_out)
    name = f"{round(monotonic() * 1000)}_{uuid4()}"
    # Without the queue's name: kombu 5.5's consumers look for that name anywhere in a file's name.
    unfinished = folder / f"{name}.unfinished"
    try:
        unfinished.write_bytes(envelope.encode())
        unfinished.rename(folder / f"{name}.{queue}.msg")
    except OSError as exc:
        with suppress(OSError):
            unfinished.unlink()
        if exc.errno in _BY_NAME and folder.is_dir():
            raise ChannelError(f"Cannot add file for {queue!r} to directory") from exc
        raise
