"""A server process that cannot outlive this one, however this one ends."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep


class BrokerMissing(Exception):
    """The broker that was asked for is not installed; the message says what to install."""


class BrokerFailed(Exception):
    """The broker did not start or refused a request; the message holds its own words."""


_LOWEST = 20_000
_COUNT = 12_768
"""Up to 32767: Linux takes client ports from 32768 on, macOS from 49152.

A client that reconnects to a dead server could otherwise be given the very port it connects to.
"""


def claim_ports(count: int) -> list[socket.socket]:
    """Claim *count* free TCP ports; ``port_of`` tells their numbers, closing gives them back.

    A claim is the bound UDP port of the same number. It ends with this process, leaves the TCP
    port to the server, and all that claim ports, in this process or another, see it.
    """
    claims: list[socket.socket] = []
    while len(claims) < count:
        address = ("127.0.0.1", _LOWEST + secrets.randbelow(_COUNT))
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(address)
            claim.bind(address)
            claims.append(claim)
            continue
        claim.close()
    return claims


def port_of(claim: socket.socket) -> int:
    """The number of a claimed port."""
    port: int = claim.getsockname()[1]
    return port


# Holds what must not outlive this process: it runs a companion of the server, if there is one,
# and when our end of its stdin closes, however this process ended, it kills the server, the
# companion and the folder. Lines on stdin are the process group of the running server, empty for
# none; "end" ends it by request, because a forked child may hold our end open.
_KEEPER = """
folder=$1; shift
companion=
if [ $# -gt 0 ]; then "$@" & companion=$!; fi
while read -r line && [ "$line" != end ]; do server=$line; done
if [ -n "$server" ]; then
    kill -KILL "-$server"
    tries=100
    while kill -0 "-$server" && [ $((tries -= 1)) -gt 0 ]; do sleep 0.1; done
fi
if [ -n "$companion" ]; then kill -KILL "$companion"; fi
if [ -n "$folder" ]; then rm -rf -- "$folder"; fi
"""


class KeptServer:
    """A server that can be started again and again, in one folder, by one command line.

    Args:
        name: what error messages call it, such as "RabbitMQ 3.10.8".
        command: how to start it in the foreground.
        home: its current folder; what it prints goes into `console.log` there.
        environment: all its variables; None: those of this process.
        logs: files of *home* that it logs to, beside what it prints.
        temporary: whether *home* is removed when this process ends.
        companion: a command that runs as long as this object, such as epmd.
        pass_fds: file descriptors that the server inherits.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        home: Path,
        environment: Mapping[str, str] | None = None,
        logs: Sequence[str] = (),
        temporary: bool = True,
        companion: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command = list(command)
        self._home = home
        self._environment = environment
        self._logs = ["console.log", *logs]
        self._pass_fds = pass_fds
        self._server: subprocess.Popen[bytes] | None = None
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", str(home) if temporary else "", *companion],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also its process group; None when it is down."""
        return self._server.pid if self._server and self._server.poll() is None else None

    def start(self, serves: Callable[[], bool], *, within_seconds: float) -> None:
        """Start the server and wait until *serves* says that it does; one that runs goes on.

        Raises BrokerFailed with the end of its log when it ends or takes longer than that.
        """
        if self.pid is not None:
            self.send(signal.SIGCONT)
            return
        with (self._home / "console.log").open("ab") as console:
            self._server = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        self._tell_keeper(str(self._server.pid))
        deadline = monotonic() + within_seconds
        pause_seconds = 0.005
        while not serves():
            if (code := self._server.poll()) is not None:
                reason = f"ended with code {code} while starting"
            elif monotonic() > deadline:
                reason = f"did not start within {within_seconds} s"
            else:
                sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, 0.05)
                continue
            log = self.log_tail(100)
            self.end(signal.SIGKILL)
            raise BrokerFailed(f"{self.name} {reason}; its last words:\n{log}")

    def send(self, which: signal.Signals) -> None:
        """Send *which* to the server and its children, if it runs."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, which)

    def end(self, how: signal.Signals, *, within_seconds: float = 30) -> None:
        """Send *how* to the server and wait for its end; SIGKILL it after *within_seconds*."""
        if self._server is None:
            return
        self.send(how)
        self.send(signal.SIGCONT)  # a frozen server does not hear before it goes on
        try:
            self._server.wait(within_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server = None
        with suppress(OSError):
            self._tell_keeper("")

    def close(self) -> None:
        """SIGKILL the server and its companion, and remove what is temporary."""
        self.end(signal.SIGKILL)
        with suppress(OSError):
            self._tell_keeper("end")
        self._keeper.wait(30)
        if self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()

    def log_tail(self, lines: int = 30) -> str:
        """The last *lines* of what the server wrote to its console and to its logs."""
        text = ""
        for name in self._logs:
            with suppress(FileNotFoundError):
                text += (self._home / name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _tell_keeper(self, line: str) -> None:
        keeper_stdin = self._keeper.stdin
        assert keeper_stdin is not None
        keeper_stdin.write(f"{line}\n".encode())
        keeper_stdin.flush()
