"""Start ``celery delay exporter`` in a process and read its samples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.worker import REPOSITORY, Fleet
from tests.waiting import PATIENCE_SECONDS, wait_until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Exporter:
    """A running exporter process."""

    url: str

    def samples(self) -> Samples:
        """All samples of this package that it serves now, by name and labels."""
        with urlopen(self.url, timeout=PATIENCE_SECONDS) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if family.name.startswith("celery_delay")
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one sample of this package; None if it is not served."""
        return self.samples().get((f"celery_delay_{name}", frozenset(labels.items())))

    def wait_for(
        self, name: str, expected: float | Callable[[float | None], bool] | None, **labels: str
    ) -> None:
        """Wait until a sample has the value *expected*; None waits until it is not served."""

        def as_expected() -> bool:
            value = self.value(name, **labels)
            return expected(value) if callable(expected) else value == expected

        try:
            wait_until(as_expected)
        except BaseException as exc:
            exc.add_note(f"{name} {labels} is {self.value(name, **labels)}")
            raise


@contextmanager
def exporter_of(fleet: Fleet, **conf: Any) -> Iterator[Exporter]:
    """An exporter on the broker of *fleet*; SIGTERM ends it at the end of the block."""
    command = [sys.executable, "-m", "celery", "-A", "tests.acceptance.apps.installed"]
    command += ["delay", "exporter", "--port=0", "--interval=0.3", "--loglevel=INFO", "--json"]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=fleet.environment(**conf),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = "".join(iter(process.stdout.readline, "}\n")) + "}"
        yield Exporter(json.loads(told)["url"])
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)
        process.stdout.close()
