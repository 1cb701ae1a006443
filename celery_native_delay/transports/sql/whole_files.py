"""Messages of kombu's filesystem transport, as files that appear when they are complete.

kombu makes a file under its final name and fills it then; a consumer that looks in between takes an
empty file, fails on it and has lost the message. So ours have their name when they are whole.
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

#: What the name of the queue is to blame for, where the folder is there.
_BY_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG)


def is_folder(channel: Any) -> bool:
    """True if *channel* puts messages into files."""
    return hasattr(channel, "data_folder_out")


def put_file(channel: Any, queue: str, envelope: str) -> None:
    """Put a message, as JSON, where kombu's *channel* would, under a name as it would have.

    ChannelError: no file can have this name. OSError: the folder is not there, full, or not ours.
    """
    folder = Path(channel.data_folder_out)
    name = f"{round(monotonic() * 1000)}_{uuid4()}"
    # No consumer's: those of kombu 5.5 look for the name of their queue anywhere.
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
