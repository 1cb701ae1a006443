"""Check that no process of a private broker is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_until


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


def assert_nothing_left_when_killed(
    broker: str, folder: str, *, module: str = "celery_native_delay.testing"
) -> None:
    """Kill a process that runs *broker*; its folder and all its child processes must be gone.

    *broker* is a call of a function of *module*; *folder* is an expression for the folder.
    """
    program = (
        "import sys\n"
        f"from {module} import *\n"
        f"with {broker} as broker:\n"
        f"    print({folder}, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = Path(process.stdout.readline().strip())
        assert found.is_dir()
        process.kill()
    wait_until(lambda: not found.exists())
    wait_until(lambda: processes_of(found.name) == [])
