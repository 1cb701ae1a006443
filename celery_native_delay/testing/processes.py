"""Run a server that ends with this Python process, even if the process is killed."""

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
    """Raised if the broker is not installed; the message says what to install."""


class BrokerFailed(Exception):
    """Raised if the broker did not start or refused a request; the message says why."""


_LOWEST = 20_000
_COUNT = 12_768
"""The number of ports for servers, from port 20000.

Linux gives ports from 32768 to clients, macOS from 49152. A client that reconnects to a dead server
must not get the server's port."""


def claim_ports(count: int) -> list[socket.socket]:
    """Reserve free TCP ports for servers; return one UDP socket per port.

    The UDP socket has the same port number, so that other callers of this function skip the port.
    Close the socket to free the port.
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
    port: int = claim.getsockname()[1]
    return port


# A shell that runs the companion. When this process ends and stdin closes, the shell kills the
# server and the companion, and removes the folder. Each line on stdin is the process group of the
# running server, empty for none. "end" does the same, because a forked child may hold stdin open.
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
    """A server process that can be restarted, and that ends with this Python process.

    Args:
        name: the server's name in error messages, such as "RabbitMQ 3.10.8".
        command: the command that runs the server in the foreground.
        home: the server's working folder. The server's output goes to `console.log` in this folder.
        environment: all environment variables of the server; None: the variables of this process.
        logs: names of further log files in *home*.
        temporary: if True, close() deletes *home*.
        companion: another command that runs as long as this object exists, such as epmd.
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
        """The server's process id, also the id of its process group; None if the server is down."""
        return self._server.pid if self._server and self._server.poll() is None else None

    def start(self, serves: Callable[[], bool], *, within_seconds: float) -> None:
        """Start the server, and call *serves* repeatedly until it returns True.

        The only exception: if the server process already exists, this method only sends SIGCONT, to
        continue a paused server, and does not call *serves*.

        Raises:
            BrokerFailed: the server ended, or was not ready after *within_seconds*. The message has
                the end of the log.
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
            raise BrokerFailed(f"{self.name} {reason}; the end of its log:\n{log}")

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the server and its child processes, if the server runs."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, which)

    def end(self, how: signal.Signals, *, within_seconds: float = 30) -> None:
        """Stop the server with a signal; send SIGKILL if the server outlives *within_seconds*."""
        if self._server is None:
            return
        self.send(how)
        self.send(signal.SIGCONT)  # a stopped process handles no other signal
        try:
            self._server.wait(within_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server = None
        with suppress(OSError):
            self._tell_keeper("")

    def close(self) -> None:
        """Kill the server and its helper (*companion*); delete *home* if *temporary* is True."""
        self.end(signal.SIGKILL)
        with suppress(OSError):
            self._tell_keeper("end")
        self._keeper.wait(30)
        if self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's output and log files."""
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


class PrivateServer:
    """A private broker, which ends with this Python process. A restart keeps its data and ports."""

    _server: KeptServer
    _claims: list[socket.socket]

    @property
    def pid(self) -> int | None:
        """The server's process id, also the id of its process group; None if the server is down."""
        return self._server.pid

    def start(self, *, within_seconds: float = 90) -> None:
        """Start the server, always with the same ports and data, and wait until it is ready.

        A start takes milliseconds (Redis) or 3 to 8 s (RabbitMQ), on a busy machine several times
        as long.

        Raises:
            BrokerFailed: the server ended, or was not ready after *within_seconds*. The message has
                the end of the log.
        """
        self._server.start(self._serves, within_seconds=within_seconds)

    def stop(self) -> None:
        """Stop the server normally; its data and ports stay the same."""
        self._server.end(signal.SIGTERM, within_seconds=60)

    def kill(self) -> None:
        """Kill the server with SIGKILL; its data and ports stay the same."""
        self._server.end(signal.SIGKILL)

    def pause(self) -> None:
        """Pause the server with SIGSTOP: its sockets stay open, and it does not answer."""
        self._server.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused server with SIGCONT."""
        self._server.send(signal.SIGCONT)

    def close(self) -> None:
        """End the server and free its ports; also done when the Python process ends."""
        self._server.close()
        for claim in self._claims:
            claim.close()

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the server's output and log."""
        return self._server.log_tail(lines)

    def _serves(self) -> bool:
        raise NotImplementedError
