"""Run Debian's Prometheus: its rule checker, and a server for one test."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest

from celery_native_delay.testing.processes import claim_ports, port_of
from pytest_celery_native_delay import IN_CI
from tests.waiting import PATIENCE_SECONDS, wait_until


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. If it is missing, skip; in CI fail."""
    path = shutil.which(name)
    if path is None:
        missing = f"{name} is missing: install the package prometheus"
        if IN_CI:
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    return path


@dataclass
class Prometheus:
    """A running Prometheus server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current value of *expression*, one dict for each series."""
        found: list[dict[str, Any]] = self._get(f"query?query={quote(expression)}")["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The rules that the server evaluates, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def is_ready(self) -> bool:
        """True if the server answers."""
        try:
            with urlopen(f"{self.url}/-/ready", timeout=PATIENCE_SECONDS):
                return True
        except (URLError, OSError):
            return False

    def _get(self, path: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}", timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus_of(exporter_url: str, rules: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus server that scrapes the exporter every second and evaluates *rules*."""
    (claim,) = claim_ports(1)
    address = f"127.0.0.1:{port_of(claim)}"
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "celery",
                "static_configs": [{"targets": [urlsplit(exporter_url).netloc]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # YAML has all of JSON
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}")
        wait_until(server.is_ready)
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)
        claim.close()
