"""kombu's filesystem transport, as far as it reads what is still being written.

It makes a message's file under its final name and fills it then; a consumer that looks in between
takes an empty file, fails on it and has lost the message.
https://github.com/celery/kombu/blob/v5.5.0/kombu/transport/filesystem.py#L238
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

#: In the folder of the messages: a name that no queue's files have.
_UNFINISHED = ".unfinished"


def is_folder(channel: Any) -> bool:
    """Whether *channel* puts messages into files."""
    return hasattr(channel, "data_folder_out")


def put_whole(channel: Any, put: Callable[..., Any], *args: Any) -> None:
    """Call *put* of kombu's *channel*, and have its files appear when they are complete.

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """
    final = Path(channel.data_folder_out)
    unfinished = final / _UNFINISHED / uuid4().hex
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.mkdir()
    channel.data_folder_out = str(unfinished)
    try:
        put(*args)
        for file in unfinished.iterdir():
            file.rename(final / file.name)
    finally:
        channel.data_folder_out = str(final)
        for file in unfinished.iterdir():
            file.unlink()
        unfinished.rmdir()
