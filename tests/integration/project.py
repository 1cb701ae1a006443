"""A small Celery app in a folder, and its command line as a process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.waiting import PATIENCE_SECONDS

#: The source of an installed app.
APP = """
from celery import Celery
from celery_native_delay import install

app = Celery("shop", broker={url!r}, set_as_current=False)
app.conf.task_default_queue = "orders"
install(app, **{settings!r})
"""

#: Forks the commands from a process that has imported Celery, which takes a second.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["celery.__main__", "celery.bin.celery", "celery_native_delay.cli"])


def _celery(files: str, folder: str, arguments: tuple[str, ...], environ: dict[str, str]) -> None:
    """Be ``python -m celery …`` in *folder*, with the standard streams in *files*."""
    from celery.__main__ import main

    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(Path(files, name), os.O_RDWR), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = ["celery", *arguments]
    sys.exit(main())


@dataclass(frozen=True)
class Project:
    """A folder with a small Celery app, and its command line."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What write() starts from."""

    def write(self, source: str, url: str, **settings: Any) -> Project:
        """Make *source* the app, with its ``{url!r}`` and ``{settings!r}`` filled in."""
        values = {"url": url, "settings": {**self.settings, **settings}}
        (self.folder / "shop.py").write_text(source.format(**values))
        return self

    def delay(self, *arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        """Run ``celery -A shop delay …``; fails if it prints a traceback."""
        command = ("-A", "shop", "delay", *arguments)
        with TemporaryDirectory() as files:
            for name, text in (("in", answer), ("out", ""), ("err", "")):
                Path(files, name).write_text(text)
            given = (files, str(self.folder), command, dict(os.environ))
            process = _FORKING.Process(target=_celery, args=given)
            process.start()
            process.join(PATIENCE_SECONDS)
            if process.exitcode is None:
                process.kill()
                raise subprocess.TimeoutExpired(command, PATIENCE_SECONDS)
            said = [Path(files, name).read_text() for name in ("out", "err")]
        done = subprocess.CompletedProcess(command, process.exitcode, *said)
        process.close()
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    @contextmanager
    def promoting(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        """Run ``celery -A shop delay promote …``, until SIGTERM at the end of the block."""
        command = [sys.executable, "-m", "celery", "-A", "shop", "delay", "promote", *options]
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        with process as promoter:
            assert promoter.stdout is not None
            assert promoter.stdout.readline().startswith("promote runs: ")
            try:
                yield promoter
            finally:
                promoter.send_signal(signal.SIGTERM)

    def told(self, *arguments: str, status: int = 0) -> Any:
        """The output with ``--json``, parsed; fails if it prints anything else."""
        done = self.delay(*arguments, "--json")
        assert (done.returncode, done.stderr) == (status, "")
        return json.loads(done.stdout)

    def lines(self, *arguments: str) -> list[str]:
        """The printed lines, with single spaces between columns; fails on an error."""
        done = self.delay(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return [" ".join(line.split()) for line in done.stdout.splitlines()]
