"""Write messages for kombu's filesystem transport so that consumers see only complete files.

kombu creates each file under the final name. A consumer that reads the file too early gets an empty
file and loses the message. So this package writes under another name, and then renames the file.
https://github.com/celery/kombu/blob/v5.5.0/kombu/transport/filesystem.py#L238
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError

#: Error numbers that mean that the queue's name is wrong, if the folder exists.
_BY_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG)


def is_folder(channel: Any) -> bool:
    """Return True if *channel* is a channel of kombu's filesystem transport."""
    return hasattr(channel, "data_folder_out")


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
