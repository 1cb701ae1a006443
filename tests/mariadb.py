"""A private MariaDB on a unix socket; it ends with this process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

from celery_native_delay.testing import BrokerMissing
from celery_native_delay.testing.processes import KeptServer
from tests.processes import output_of
from tests.waiting import PATIENCE_SECONDS


def find_mariadb() -> Path:
    """The program of the server.

    Raises:
        BrokerMissing: MariaDB is not installed.
    """
    found = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None or not shutil.which("mariadb-install-db"):
        raise BrokerMissing("MariaDB is not installed: run scripts/setup_brokers.sh --all")
    return Path(found)


class PrivateMariaDB:
    """A MariaDB server with Debian's settings, created by private_mariadb()."""

    def __init__(self, program: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="private-mariadb-"))
        self._socket = self._folder / "socket"
        self._numbers = count(1)
        data, user = self._folder / "data", pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:  # it refuses to run as root
            user = "mysql"
            shutil.chown(self._folder, user)
        options = [f"--datadir={data}", f"--user={user}"]
        install = ["mariadb-install-db", "--no-defaults", *options, "--skip-test-db"]
        output_of(*install, "--auth-root-authentication-method=normal", cwd="/")
        serve = [str(program), "--no-defaults", *options, f"--socket={self._socket}"]
        # As in Debian's 50-server.cnf.
        serve += ["--character-set-server=utf8mb4", "--collation-server=utf8mb4_general_ci"]
        serve += ["--skip-networking", "--innodb-flush-log-at-trx-commit=0"]
        # A time zone whose clock repeats an hour in autumn.
        environment = {**os.environ, "TZ": "Europe/Berlin"}
        self._server = KeptServer("MariaDB", serve, home=self._folder, environment=environment)
        self._server.start(self._serves, within_seconds=PATIENCE_SECONDS)

    def new_database(self) -> str:
        """Create an empty database; returns its URL for SQLAlchemy."""
        name = f"space{next(self._numbers)}"
        self._admin("create", name).check_returncode()
        return f"mysql+pymysql://root@localhost/{name}?unix_socket={self._socket}"

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self._server.end(signal.SIGKILL)
        self._server.close()

    def _serves(self) -> bool:
        return self._admin("ping").returncode == 0

    def _admin(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = ["mariadb-admin", "--no-defaults", "--user=root", f"--socket={self._socket}"]
        return subprocess.run([*command, *arguments], cwd="/", capture_output=True)


@contextmanager
def private_mariadb() -> Iterator[PrivateMariaDB]:
    """Run a private MariaDB until the block ends."""
    with closing(PrivateMariaDB(find_mariadb())) as server:
        yield server
