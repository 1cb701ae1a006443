"""A small Celery app in a folder, and its command line as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "shop", "delay", *arguments],
            cwd=self.folder,
            input=answer,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

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
