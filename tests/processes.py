"""Which processes run, for tests that promise to leave none."""

from __future__ import annotations

from pathlib import Path


def processes_of(folder: str) -> list[str]:
    """Command lines of the running processes that were started for *folder*."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if folder.encode() in environment + command:
            found.append(command.replace(b"\0", b" ").decode())
    return found
