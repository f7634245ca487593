"""The supervisor's connection to the fork server: it starts the server, requests attempts, and ends it."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.launch.agent.shared_status import STATUS_FD, clear_status_buffer, make_status_buffer

INHERITED_HANDLES = "PACELINE_INHERITED"
FORKSERVER_COMMAND = "PACELINE_FORKSERVER_COMMAND"
MEMORY_FOLDER = "PACELINE_MEMORY_FOLDER"
FORKSERVER_LOG = "forkserver.log"
_EXIT_SECONDS = 30.0
_POLL_SECONDS = 0.005


class ForkserverClient:
    """The connection to the fork server of one run, which serves all its attempts.

    The server is started with the first attempt, and again if it has ended.

    `status_fd` is the buffer that the supervisor shares with the ranks of the current attempt.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        working_folder: str = "",
        inherited_handles: Sequence[int] = (),
        command: Sequence[str] = (),
    ) -> None:
        self._environ = environ
        self._working_folder = working_folder
        self._inherited_handles = tuple(inherited_handles)
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.status_fd = -1
        self.exit_status = 0
        """The exit status of the server that ended last."""

    @property
    def pid(self) -> int:
        """The process id of the server that was started last; 0 if none was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def output_fd(self) -> int:
        """The descriptor from which the events of the server are read."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def start_attempt(self, request: Path) -> None:
        """Ask the server to run the attempt of `request`, a file in the folder of the attempt."""
        if self._process is not None and self._process.poll() is None:
            clear_status_buffer(self.status_fd)
            with suppress(BrokenPipeError):  # it has just ended, and is started again below
                self._send_request(self._process, request)
                return
        self.close()
        self.status_fd = make_status_buffer()
        clear_status_buffer(self.status_fd)
        handles = (*self._inherited_handles, self.status_fd)
        variables = {
            INHERITED_HANDLES: ",".join(map(str, self._inherited_handles)),
            STATUS_FD: str(self.status_fd),
        }
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(request.parent / FORKSERVER_LOG, flags, 0o644)
        try:
            self._process = subprocess.Popen(
                [*(self._command or _forkserver_command()), str(request), str(os.getpid())],
                env={**self._environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd=self._working_folder or None,
                pass_fds=handles,
            )
        finally:
            os.close(log)

    def _send_request(self, process: "subprocess.Popen[bytes]", request: Path) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{request}\n".encode())
        process.stdin.flush()

    def kill(self, *, wait_seconds: float = 0.0, group_seconds: float = 0.0) -> None:
        """Kill all processes in the group of the server: its ranks, and what they started.

        A server that ends by itself within `wait_seconds` keeps its own exit status. Return when no process of the
        group is left, or after `group_seconds`.
        """
        if self._process is None or self._process.returncode is not None:
            return
        _wait_without_reaping(self._process.pid, seconds=wait_seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.exit_status = self._process.wait()
        _wait_for_group(self._process.pid, seconds=group_seconds)

    def close(self) -> None:
        """End the server after its last attempt, and free the shared buffer."""
        process = self._process
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):  # an empty line, because a fork of this program may hold the pipe open
                process.stdin.write(b"\n")
                process.stdin.flush()
            with suppress(OSError):
                process.stdin.close()
            self.kill(wait_seconds=_EXIT_SECONDS)
            process.stdout.close()
        self._process = None
        if self.status_fd >= 0:
            os.close(self.status_fd)
            self.status_fd = -1


def _wait_without_reaping(pid: int, *, seconds: float) -> None:
    """Wait until a child has ended, but leave its status, so that its process id and group id are not reused."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _wait_for_group(group: int, *, seconds: float) -> None:
    """Wait until no process of a group is left."""
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(_POLL_SECONDS)


def _forkserver_command() -> list[str]:
    """Return the command that starts the fork server, without its arguments.

    `PACELINE_FORKSERVER_COMMAND` overrides it, for example to use a process that has imported torch already.
    """
    return shlex.split(os.environ.get(FORKSERVER_COMMAND, "")) or [
        sys.executable,
        *module_path_options(),
        "-m",
        "paceline.launch.agent.forkserver",
    ]


def module_path_options() -> list[str]:
    """Return the option `-P`, with which files in the working folder can't shadow modules of Paceline.

    Return no option if Paceline itself is imported from the working folder.
    """
    is_here = Path(__file__).resolve().parents[3] == Path.cwd()
    return [] if is_here else ["-P"]
