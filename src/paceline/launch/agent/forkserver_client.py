"""The supervisor's connection to the fork server: it starts the server, requests attempts, and ends it."""

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.launch.agent.cleanup_process import wait_for_group
from paceline.launch.agent.shared_status import STATUS_FD, clear_status_buffer, make_status_buffer

INHERITED_HANDLES = "PACELINE_INHERITED"
FORKSERVER_COMMAND = "PACELINE_FORKSERVER_COMMAND"
MEMORY_FOLDER = "PACELINE_MEMORY_FOLDER"
ADOPTED = "adopted"
"""The answer to a spare that has reported itself as the server."""
_EXIT_SECONDS = 30.0
_SPARE_SECONDS = 5.0  # from the end of the server to the report of its spare
_POLL_SECONDS = 0.005


class ForkserverClient:
    """The connection to the fork server of one run, which serves all its attempts.

    The server is started with the first attempt, and again if both it and its spare have ended.

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
        self._spare_fd = -1  # the pidfd of the spare; -1 if there is none
        self._adopted_fd = -1  # the pidfd of a server that was a spare, which is no child of this process
        self._end_time: float | None = None  # when the server was first seen to have ended
        self._events: deque[list[str]] = deque()
        self._partial_line = b""
        self.status_fd = -1
        self.pid = 0
        """The process id of the server that was started last; 0 if none was started."""
        self.exit_status: int | None = 0
        """The exit status of the server that ended last; None if it had been a spare, which is no child of ours."""

    def start_attempt(self, request: Path) -> None:
        """Ask the server to run the attempt of `request`, a file in the folder of the attempt."""
        if self._process is not None and self._find_server():
            clear_status_buffer(self.status_fd)
            with suppress(BrokenPipeError):  # it has just ended, and is started again below
                self._send_line(str(request))
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
        log = os.open(forkserver_log(request), flags, 0o644)
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
        self.pid = self._process.pid
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def next_event(self, *, seconds: float) -> list[str]:
        """Return the next line of the server, split into words; an empty list if there is none within `seconds`.

        Raises:
            EOFError: neither the server nor its spare is left.
        """
        assert self._process is not None and self._process.stdout is not None
        read_fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(read_fd, selectors.EVENT_READ)
            while not self._events and selector.select(timeout=seconds):
                data = os.read(read_fd, 65536)
                if not data:
                    raise EOFError
                *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                for event in (line.decode().split() for line in lines):
                    if event[0] == "spare":
                        self._set_spare(int(event[2]))
                    else:
                        self._events.append(event)
        if not self._events:
            self._kill_overdue_spare()
            return []
        return self._events.popleft()

    def _set_spare(self, pid: int) -> None:
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self._spare_fd = -1
        with suppress(OSError):  # it has ended already
            self._spare_fd = os.pidfd_open(pid)

    def _kill_overdue_spare(self) -> None:
        """Kill a spare that does not become the server, for example because it is stopped. The events then end."""
        if not self._has_server_ended():
            self._end_time = None
            return
        self._end_time = self._end_time or time.monotonic()
        if time.monotonic() - self._end_time > _SPARE_SECONDS:
            self._kill_spare()

    def _kill_spare(self) -> None:
        if self._spare_fd >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(self._spare_fd, signal.SIGKILL)
            os.close(self._spare_fd)
            self._spare_fd = -1

    def adopt(self, pid: int, *, group_seconds: float) -> None:
        """Continue with a spare that has reported itself as the server, once the processes of the old one are gone.

        Return after `group_seconds` in any case.
        """
        self._end_server(group_seconds=group_seconds)
        self._end_time = None  # the spare has answered in time, however long the old processes took to end
        with suppress(EOFError):
            while self.next_event(seconds=0.0):  # events of the old server
                pass
        self.pid, self._adopted_fd, self._spare_fd = pid, self._spare_fd, -1
        with suppress(OSError):  # it has ended already
            self._send_line(ADOPTED)

    def kill(self, *, wait_seconds: float = 0.0, group_seconds: float = 0.0) -> None:
        """Kill the server, its spare, and all processes in the group of the server: its ranks, and what they started.

        A server that ends by itself within `wait_seconds` keeps its own exit status. Return when no process of the
        group is left, or after `group_seconds`.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + wait_seconds
        while not self._has_server_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._kill_spare()  # before the server, so that it does not replace it
        self._end_server(group_seconds=group_seconds)

    def close(self) -> None:
        """End the server after its last attempt, and free the shared buffer."""
        process = self._process
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):  # an empty line, because a fork of this program may hold the pipe open
                self._send_line("")
            with suppress(OSError):
                process.stdin.close()
            self.kill(wait_seconds=_EXIT_SECONDS)
            process.stdout.close()
        self._process = None
        self._partial_line = b""
        self._events.clear()
        if self.status_fd >= 0:
            os.close(self.status_fd)
            self.status_fd = -1

    def _find_server(self) -> bool:
        """Return whether there is a server. If it has ended since the last attempt, adopt its spare."""
        while self._has_server_ended():
            try:
                event = self.next_event(seconds=_SPARE_SECONDS)
            except EOFError:
                return False
            if not event:
                return False
            if event[0] == "server":
                self.adopt(int(event[2]), group_seconds=_EXIT_SECONDS)
        return True

    def _has_server_ended(self) -> bool:
        """Return whether the server has ended. A child keeps its status, so that its PID and group are not reused."""
        if self._adopted_fd >= 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._adopted_fd, selectors.EVENT_READ)
                return bool(selector.select(timeout=0))
        if self._process is None or self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end_server(self, *, group_seconds: float) -> None:
        """Kill the server and its group, and store its exit status. Without a server, do nothing."""
        if self._process is None or (self._adopted_fd < 0 and self._process.returncode is not None):
            return
        if self._adopted_fd < 0 or not self._has_server_ended():  # else its PID may be another process by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._adopted_fd >= 0:
            os.close(self._adopted_fd)
            self._adopted_fd, self.exit_status = -1, None
        else:
            self.exit_status = self._process.wait()
        wait_for_group(self.pid, seconds=group_seconds)

    def _send_line(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def forkserver_log(request: Path) -> Path:
    """Return the log of the fork server that serves a request: of several nodes, each one has its own."""
    return request.with_name(f"forkserver{request.stem.removeprefix('request')}.log")


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
