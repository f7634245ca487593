"""The script server: a process with torch imported that forks the workers of torchrun.

Each worker process that torchrun starts connects (`startup/sitecustomize.py`), and sends its command, its environment
and its standard streams. The server forks a process that runs the script with them. It passes on the signals that the
worker process receives, and reports how the script ended. If the worker process is killed, its script is killed too.
"""

import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from paceline.launch.agent.forkserver import preload_worker
from paceline.launch.agent.process_exit import end_python
from paceline.launch.agent.signals import die_with_parent
from paceline.launch.torchrun.startup.sitecustomize import REQUEST_HEADER, STATUS
from paceline.plugins import resolve

_RECEIVE_SECONDS = 10.0
_NUM_STREAMS = 3
_MAX_SIGNAL_BYTES = 64
_LINGER_SECONDS = 2.0  # for which the kernel shows the exit code of a script to the other ranks


@dataclass(frozen=True, kw_only=True)
class _Script:
    """A running script: its process, and the connection to torchrun's worker process that waits for it."""

    pid: int
    connection: socket.socket


class ScriptServer:
    """The loop of the server. It has a single thread, so that it can fork at any time."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._scripts: dict[int, _Script] = {}
        self._ended: dict[int, float] = {}  # when to reap a script that has ended, by its process id
        self._wake_reader, self._wake_writer = socket.socketpair()

    def serve(self) -> NoReturn:
        """Serve workers until this process is killed, when torchrun's agent ends."""
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(timeout=_LINGER_SECONDS if self._ended else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    with suppress(BlockingIOError):
                        self._wake_reader.recv(4096)
                    self._report_ended()
                elif key.data in self._scripts:  # else it has ended a moment ago
                    self._forward_signals(self._scripts[key.data])
            self._reap()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            request, streams = _receive_request(connection)
        except (OSError, ValueError, struct.error):
            connection.close()
            return
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._close_in_child(connection)
                _become_worker(request, streams, server=server)
            finally:
                os._exit(1)
        for stream in streams:
            os.close(stream)
        self._scripts[pid] = _Script(pid=pid, connection=connection)
        self._selector.register(connection, selectors.EVENT_READ, data=pid)
        with suppress(OSError):  # the worker process was killed: `_forward_signals` sees the end of its connection
            connection.send(STATUS.pack(pid))

    def _close_in_child(self, connection: socket.socket) -> None:
        """Close in a new worker everything that belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        connections = [script.connection for script in self._scripts.values()]
        for opened in (self._listener, self._wake_reader, self._wake_writer, connection, *connections):
            opened.close()

    def _forward_signals(self, script: _Script) -> None:
        """Send the script the signals that its worker process has received, or SIGKILL if that process has ended."""
        try:
            numbers = script.connection.recv(_MAX_SIGNAL_BYTES)
        except OSError:
            numbers = b""
        if not numbers:
            self._selector.unregister(script.connection)
        for number in numbers or (signal.SIGKILL,):
            _signal_group(script.pid, number)

    def _report_ended(self) -> None:
        """Report the scripts that have ended, and kill what a failed one has left running, such as data workers."""
        for pid, script in list(self._scripts.items()):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is None:
                continue
            code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            if code:
                _signal_group(pid, signal.SIGKILL)
            with suppress(KeyError, ValueError):
                self._selector.unregister(script.connection)
            with suppress(OSError):
                script.connection.send(STATUS.pack(code))
            script.connection.close()
            del self._scripts[pid]
            self._ended[pid] = time.monotonic() + _LINGER_SECONDS

    def _reap(self) -> None:
        """Let go of the scripts that ended a while ago."""
        for pid, due in list(self._ended.items()):
            if time.monotonic() >= due:
                os.waitpid(pid, 0)
                del self._ended[pid]


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a worker and to the processes that it has started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has just been forked, and leads no group yet
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError:
        return


def _receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request of a worker process and its standard streams.

    Raises:
        OSError, ValueError, struct.error: the request is incomplete, or comes from another user.
    """
    connection.settimeout(_RECEIVE_SECONDS)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise PermissionError("the request comes from another user")
    header, streams, _, _ = socket.recv_fds(connection, REQUEST_HEADER.size, _NUM_STREAMS)
    length = REQUEST_HEADER.unpack(header)[0]
    text = b""
    while len(text) < length:
        part = connection.recv(length - len(text))
        if not part:
            raise ConnectionError("the request is incomplete")
        text += part
    connection.settimeout(None)
    return json.loads(text), list(streams)


def _become_worker(request: Mapping[str, Any], streams: Sequence[int], *, server: int) -> NoReturn:
    """Run the script of a request in this forked process, and exit as Python would."""
    os.setsid()
    die_with_parent(server)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    random.seed()  # as in a new process, each worker draws its own numbers
    resolve("numpy.random:seed")()
    sys.orig_argv = request["command"]
    end_python(run_script(request["arguments"]), limit_seconds=None)


def run_script(arguments: Sequence[str]) -> int:
    """Run a script, or a module after `-m`, as `__main__`, and return the exit code that Python would have."""
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if is_module else arguments)
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(Path(arguments[0]))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = _script_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _run_file(script: Path) -> None:
    """Run a script, or a folder or archive with a `__main__.py`. Unlike `runpy`, leave `sys.argv[0]` as it is."""
    if script.suffix != ".py":
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.path.insert(0, str(script.resolve().parent))
    code = compile(script.read_bytes(), script.absolute(), "exec")
    module = ModuleType("__main__")
    module.__file__ = str(script.absolute())
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that lead to the script; empty if there is no other frame."""
    hidden = {__file__, runpy.run_path.__code__.co_filename}
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden:
        trace = trace.tb_next
    return trace


def main(arguments: Sequence[str]) -> NoReturn:
    """Import torch, and serve the workers of a torchrun agent.

    `arguments` are the agent's process id, the socket, and a function of Paceline whose module is imported too, or "".
    """
    agent, descriptor, entry = arguments
    die_with_parent(int(agent))
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    preload_worker(entry)
    ScriptServer(listener).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
