"""The start of a worker of torchrun: it asks the script server to run the script in a process that has torch imported.

Python imports this module before it reads the script. This process then only waits, passes signals on, and ends as the
script ends, so that torchrun sees its own worker. If there is no server, the script runs in this process, as without
Paceline. Only the standard library is imported here, because this takes 20 ms instead of seconds.
"""

import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

ADDRESS = "PACELINE_SCRIPT_SERVER"
"""The variable with the name of the server's socket. torchrun's agent sets it and the next two."""
AGENT = "PACELINE_SCRIPT_AGENT"
"""The process id of torchrun's agent: only its own children are workers."""
MODULE_PATH = "PACELINE_SCRIPT_PYTHONPATH"
"""The value of PYTHONPATH without this folder."""
BACKEND = "PACELINE_TORCHRUN_BACKEND"
"""Set for the workers, so that the line that resumes a run names the backend."""
REQUEST_HEADER = struct.Struct("<I")  # the length of the request, which follows as JSON
STATUS = struct.Struct("<i")  # a process id, or an exit code; negative for a signal
FORWARDED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGCONT")
    if hasattr(signal, name)
)


def worker_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the script with its arguments, or `-m`, a module and its arguments, of a command that torchrun starts.

    torchrun starts `python -u [-m] NAME ...`. Any other command is not run by the server.
    """
    if len(command) < 3 or command[1] != "-u":
        return None
    name = command[3:4] if command[2] == "-m" else command[2:3]
    return list(command[2:]) if name and not name[0].startswith("-") else None


def _start() -> None:
    """Run the script in the server. Return if this process has to run it."""
    address, agent = os.environ.pop(ADDRESS), os.environ.pop(AGENT, "")
    _restore_module_path(os.environ.pop(MODULE_PATH, ""))
    os.environ[BACKEND] = "1"
    arguments = worker_arguments(sys.orig_argv)
    if agent == str(os.getppid()) and arguments is not None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(f"\0{address}")
            _run_in_server(connection, arguments)
    _import_next_sitecustomize()


def _restore_module_path(value: str) -> None:
    """Remove this folder from the module path of this process and of the programs that it starts."""
    folder = os.path.dirname(__file__)  # noqa: PTH120  pathlib takes long to import
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    if value:
        os.environ["PYTHONPATH"] = value
    else:
        os.environ.pop("PYTHONPATH", None)


def _import_next_sitecustomize() -> None:
    """Import the module that this one has hidden, if there is one."""
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        sys.modules["sitecustomize"] = own


def _run_in_server(connection: socket.socket, arguments: list[str]) -> None:
    """Have the server run the script, and end as the script ends. Return if the server did not start it."""
    request = {
        "arguments": arguments,
        "command": sys.orig_argv,
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "cores": sorted(os.sched_getaffinity(0)),
    }
    text = json.dumps(request).encode()
    socket.send_fds(connection, [REQUEST_HEADER.pack(len(text))], [0, 1, 2])
    connection.sendall(text)

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(OSError):  # the script has just ended
            connection.send(bytes([number]))

    for number in FORWARDED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    process_id = b""
    with suppress(ConnectionError):  # the server was killed before it read the request
        process_id = connection.recv(STATUS.size)
    if not process_id:
        for number in FORWARDED_SIGNALS:
            if signal.getsignal(number) is forward:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        return
    answer = b""
    with suppress(ConnectionError):
        answer = connection.recv(STATUS.size)
    status = STATUS.unpack(answer)[0] if answer else -signal.SIGKILL  # the server was killed, and the script with it
    if status >= 0:
        os._exit(status)
    _end_by_signal(-status)


def _end_by_signal(number: int) -> None:
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if ADDRESS in os.environ:
    _start()
