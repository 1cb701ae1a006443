"""Messages of kombu's filesystem transport, as files that appear and are taken when complete.

kombu makes a file under its final name and fills it then; a consumer that looks in between takes an
empty file, fails on it and has lost the message. So ours have their name when they are whole, and
those of a producer without this package are left alone until they are.
https://github.com/celery/kombu/blob/v5.5.0/kombu/transport/filesystem.py#L238
"""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.utils.json import loads

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


def take_file(channel: Any, queue: str) -> Any:
    """Take the oldest whole message of a queue out of kombu's *channel*; None without one."""
    for path in sorted(Path(channel.data_folder_in).iterdir()):
        if path.name.partition(".")[2] != f"{queue}.msg":
            continue
        try:
            message = loads(path.read_bytes().decode())
            if channel.store_processed:
                shutil.move(path, channel.processed_folder)
            else:
                path.unlink()
        except (OSError, ValueError):  # another consumer has it; it is being written
            continue
        return message
    return None
