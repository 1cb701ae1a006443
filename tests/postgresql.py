"""A private PostgreSQL on a unix socket; it ends with this process."""

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

from sqlalchemy import create_engine, text

from celery_native_delay.testing import BrokerMissing
from celery_native_delay.testing.processes import KeptServer
from tests.processes import output_of
from tests.waiting import PATIENCE_SECONDS


def find_postgresql() -> Path:
    """The folder with PostgreSQL's programs.

    Raises:
        BrokerMissing: PostgreSQL is not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda bin: int(bin.parent.name))
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve().parent)
    for folder in reversed(found):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise BrokerMissing("PostgreSQL is not installed: run scripts/setup_brokers.sh")


class PrivatePostgreSQL:
    """A PostgreSQL server, created by private_postgresql()."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="private-postgresql-"))
        self._numbers = count(1)
        as_user: list[str] = []
        if os.geteuid() == 0:  # it refuses to run as root
            as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            shutil.chown(self._folder, "postgres", pwd.getpwnam("postgres").pw_gid)
        data = self._folder / "data"
        initdb = [*as_user, programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust"]
        output_of(*initdb, "-E", "UTF8", "--locale=C", "--no-sync", cwd="/")
        serve = [*as_user, str(programs / "postgres"), "-D", str(data), "-k", str(self._folder)]
        serve += ["-c", "listen_addresses=", "-c", "fsync=off"]
        self._server = KeptServer("PostgreSQL", serve, home=self._folder)

    def url(self, database: str) -> str:
        """The URL of one of its databases, for SQLAlchemy."""
        return f"postgresql+psycopg://postgres@/{database}?host={self._folder}"

    @property
    def socket(self) -> Path:
        """The Unix socket that the server listens on."""
        return self._folder / ".s.PGSQL.5432"

    def new_database(self) -> str:
        """Create an empty database; returns its URL."""
        name = f"space{next(self._numbers)}"
        command = (self._programs / "createdb", "-h", self._folder, "-U", "postgres", name)
        output_of(*command, cwd="/")
        return self.url(name)

    def start(self) -> None:
        """Start the server on its existing data, and wait until it answers."""
        self._server.start(self._serves, within_seconds=PATIENCE_SECONDS)

    def stop(self) -> None:
        """Stop the server cleanly; it closes all connections."""
        self._server.end(signal.SIGINT)

    def kill(self) -> None:
        """Stop the server as a crash does: it writes nothing more, and the next start recovers."""
        self._server.end(signal.SIGQUIT)

    @property
    def version(self) -> str:
        """The server's name and version."""
        said = output_of(self._programs / "postgres", "--version")
        return f"PostgreSQL {said.split()[2]}"

    def processes(self) -> list[int]:
        """The process ids of the server and of its backends."""
        pid = self._server.pid
        if pid is None:
            return []
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [pid, *map(int, children.split())]

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        self._server.close()

    def _serves(self) -> bool:
        ready = [str(self._programs / "pg_isready"), "-q", "-h", str(self._folder)]
        return subprocess.run(ready, cwd="/").returncode == 0


def end_backends(url: str) -> None:
    """Close all connections to a server, as a load balancer does with idle ones."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
    with engine.connect() as connection:
        asked = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
        connection.execute(text(asked))
    engine.dispose()


@contextmanager
def private_postgresql() -> Iterator[PrivatePostgreSQL]:
    """Run a private PostgreSQL until the block ends."""
    with closing(PrivatePostgreSQL(find_postgresql())) as server:
        server.start()
        yield server
