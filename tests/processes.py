"""Run programs, and check that no process of a private broker is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.documents import ROOT
from tests.waiting import PATIENCE_SECONDS, wait_until


def output_of(*command: object, cwd: Path | str = ROOT, **options: Any) -> str:
    """Run a program, which must succeed; what it wrote to its standard output."""
    options = {"timeout": PATIENCE_SECONDS} | options
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    command = tuple(map(str, command))
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@contextmanager
def running(*command: object, log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program beside the test; it and its children are killed at the end."""
    with log.open("ab") as output:
        options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
        words = list(map(str, command))
        process = subprocess.Popen(words, stdout=output, stderr=output, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
