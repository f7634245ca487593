"""The fork server: one fresh, single-threaded process that has torch imported. It forks a starter for each attempt.

The starter of an attempt forks the workers, and waits for them. If it is killed, the fork server only forks another
one. The server also forks a *spare*, which waits. If the server is killed, the spare becomes the server. So neither
these nor any other restart of an attempt imports torch again.

`ForkserverClient` starts `python -m paceline.launch.agent.forkserver REQUEST.json SUPERVISOR_PID` in a new session. The
server imports no user code. It has the attempt of this request run, and then one attempt for each further path of a
request that it reads from its standard input. An empty line, or the end of the input, ends the server and its spare.

All write to the server's standard output, which the supervisor reads: `starter 0 PID` when an attempt starts,
`born RANK PID` when a worker starts, and `gone RANK STATUS` when it exits. `RespawningWorkers` lists the other words
for an exit. `ended 0 STATUS` means that no process of the attempt is left; the status is that of the starter.
`spare 0 PID` reports a new spare, and `server 0 PID` a spare that has become the server. Such a server ignores requests
until it reads the line `adopted`, because they were meant for the server before.
"""

import gc
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import MachineError
from paceline.filesystem.run_lock import RunLock
from paceline.launch.agent.cleanup_process import kill_group_members, start_cleanup_process
from paceline.launch.agent.forkserver_client import ADOPTED, INHERITED_HANDLES, MEMORY_FOLDER, forkserver_log
from paceline.launch.agent.parameter_server_processes import RespawningWorkers
from paceline.launch.agent.shared_status import STATUS_FD
from paceline.launch.agent.signals import die_with_parent, stop_flag
from paceline.launch.agent.socket_paths import forget_temporary_folder, short_temporary_folder
from paceline.launch.inherited_environment import ATTEMPT_FOLDER, LISTEN_FD, START_NUMBER, mark_rank_variables_as_own
from paceline.launch.rendezvous import listen_on_port
from paceline.plugins import resolve

_THIS_PROCESS, _NO_SPARE = 0, -1  # instead of the PID of a spare


def main(argv: list[str]) -> int:
    """Run one attempt after the other: fork its starter, and report when no process of the attempt is left."""
    path, supervisor_pid = argv[0], int(argv[1])
    die_with_parent(supervisor_pid)  # before torch is imported, which takes long on a busy machine
    stop_flag.install(listens_in_forks=True)  # a stop signal during a fork is not lost and kills no process
    scratch = _create_scratch_folder()
    memory_folder = os.environ.pop(MEMORY_FOLDER, "")
    start_cleanup_process(supervisor_pid, scratch=scratch, memory_folder=memory_folder)
    run_locks = [RunLock(int(handle)) for handle in filter(None, os.environ.pop(INHERITED_HANDLES, "").split(","))]
    for lock in run_locks:
        os.set_inheritable(lock.handle, False)  # forked workers inherit the lock; programs that they start do not
    status_fd = int(os.environ.pop(STATUS_FD))
    os.set_inheritable(status_fd, False)
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    worker_main = preload_worker(request["entry"])
    spare = _NO_SPARE
    while True:
        starter = _fork_starter(request, worker_main=worker_main, status_fd=status_fd, run_locks=run_locks)
        _report(f"starter 0 {starter}")
        if not _is_child_running(spare):
            spare = _fork_spare(supervisor_pid)
        if spare != _THIS_PROCESS:
            status = os.waitstatus_to_exitcode(os.waitpid(starter, 0)[1])
            kill_group_members()
            _report(f"ended 0 {status}")
        else:
            forget_temporary_folder()
            scratch = _create_scratch_folder()
            start_cleanup_process(supervisor_pid, scratch=scratch, memory_folder=memory_folder)
            _wait_for_adoption()
        path = sys.stdin.readline().strip()
        if not path:
            break
        request = json.loads(Path(path).read_text(encoding="utf-8"))
        stop_flag.signal = None  # a signal to the ended attempt is no request to stop the next one
        _redirect_errors(forkserver_log(Path(path)))
    if _is_child_running(spare):
        os.kill(spare, signal.SIGKILL)
        os.waitpid(spare, 0)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _fork_spare(supervisor_pid: int) -> int:
    """Fork the process that becomes the server if this one is killed, and return its PID.

    In the new process, this function returns `_THIS_PROCESS` once the server has ended. If the supervisor has ended
    too, the new process exits. Return `_NO_SPARE` if no process can be forked, or without pidfds: a run needs no spare.
    """
    handles: list[int] = []
    try:
        handles += [os.pidfd_open(os.getpid()), os.pidfd_open(supervisor_pid)]
        pid = os.fork()
    except (AttributeError, OSError):  # another system, an old kernel, or too many processes
        pid = _NO_SPARE
    if pid == _THIS_PROCESS:
        os.setsid()  # the group of the server is killed when it ends
        _wait_for_end(*handles)
    for handle in handles:
        os.close(handle)
    if pid > 0:
        _report(f"spare 0 {pid}")
    return pid


def _wait_for_end(server_fd: int, supervisor_fd: int) -> None:
    """Wait until the server has ended. Exit if the supervisor has ended."""
    poller = select.poll()
    poller.register(server_fd, select.POLLIN)
    poller.register(supervisor_fd, select.POLLIN)
    poller.poll()
    if supervisor_fd in dict(poller.poll(0)):
        os._exit(0)


def _wait_for_adoption() -> None:
    """Report that this spare is the server now, and wait for the answer. Exit if the supervisor needs no server."""
    _report(f"server 0 {os.getpid()}")
    while (line := sys.stdin.readline().strip()) != ADOPTED:
        if not line:
            os._exit(0)


def _is_child_running(spare: int) -> bool:
    if spare in (_THIS_PROCESS, _NO_SPARE):
        return False
    with suppress(ChildProcessError):
        return os.waitpid(spare, os.WNOHANG) == (0, 0)
    return False


def _fork_starter(
    request: dict[str, Any], *, worker_main: Callable[..., NoReturn], status_fd: int, run_locks: Sequence[RunLock]
) -> int:
    """Fork the process that starts the workers of one attempt and waits for them; it dies with this server."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(server)
        _run_attempt(request, worker_main=worker_main, status_fd=status_fd, run_locks=run_locks)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_attempt(
    request: dict[str, Any], *, worker_main: Callable[..., NoReturn], status_fd: int, run_locks: Sequence[RunLock]
) -> None:
    """Fork the workers of one attempt, and return when all of them have exited."""
    folder, first_rank = Path(request["folder"]), request["first_rank"]
    listener = None if first_rank else _open_listener(request)
    port, listen_fd = (listener.getsockname()[1], listener.fileno()) if listener else (request["port"], None)
    parent = os.getpid()

    def start(rank: int, *, listen_fd: int | None, start_number: int = 1) -> int:
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            if start_number > 1:
                os.environ[START_NUMBER] = str(start_number)
            _set_up_rank(rank, request, folder, port=port, listen_fd=listen_fd, run_locks=run_locks)
            worker_main(request, folder=folder, status_fd=status_fd)
        return pid

    ranks, number = range(first_rank, first_rank + request["local_ranks"]), request.get("start_number", 1)
    pids = {start(rank, listen_fd=listen_fd, start_number=number): rank for rank in ranks}
    if listener:
        listener.close()
    if request.get("servers"):

        def restart(rank: int, start_number: int) -> int:
            return start(rank, listen_fd=None, start_number=start_number)

        RespawningWorkers(pids, servers=request["servers"], restart=restart, report=_report).wait()
    while pids:
        pid, status = os.wait()
        rank_or_none = pids.pop(pid, None)
        if rank_or_none is not None:
            _report(f"gone {rank_or_none} {os.waitstatus_to_exitcode(status)}")


def _open_listener(request: Mapping[str, Any]) -> socket.socket | None:
    """Return the socket on which rank 0 listens; None for a single rank if the machine has no loopback interface.

    Raises:
        MachineError: several ranks could not reach each other.
    """
    try:
        return listen_on_port(request["address"], request["port"])
    except MachineError:
        if request["ranks"] > 1:
            raise
        return None


def _create_scratch_folder() -> str:
    """Create the folder in which `multiprocessing` puts the sockets of all ranks and their data workers.

    Otherwise each data worker would create a folder, and a killed data worker would leave its folder behind. Return an
    empty string if no folder can be created.
    """
    with suppress(OSError):  # code that needs the folder reports that there is none
        return short_temporary_folder()
    return ""


def preload_worker(entry: str = "") -> Callable[..., NoReturn]:
    """Import what every worker would otherwise import after the fork. Return the function that runs a worker."""
    gc.disable()  # imports create no garbage
    with _stdout_to_stderr():
        # imports torch
        worker_main: Callable[..., NoReturn] = resolve("paceline.launch.agent.worker_process:worker_main")
        # imports torch._dynamo, which the first optimizer needs
        resolve("paceline.torch_internals.private_api:recompile_on_hook_changes")()
        if entry.startswith("paceline."):
            with suppress(Exception, SystemExit):  # if a user's file shadows a module, the rank reports it
                resolve(entry)
    gc.freeze()  # a worker's garbage collector then skips these million objects
    gc.enable()
    return worker_main


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error during imports, because the supervisor reads standard output.

    An imported module may print, for example a user's file that shadows a module of a library.
    """
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


def _set_up_rank(
    rank: int, request: dict[str, Any], folder: Path, *, port: int, listen_fd: int | None, run_locks: Sequence[RunLock]
) -> None:
    """Turn the forked process into the given rank: log file, environment variables and locks.

    The supervisor sends signals to a rank once it knows the PID. The child itself reports its PID, because Python drops
    signals that reach a child before `os.fork` returns in it.
    """
    _report(f"born {rank} {os.getpid()}")
    for lock in run_locks:
        lock.close_in_forks()
    _redirect_output(folder / f"rank-{rank}.log")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")  # logs are read as UTF-8
    if rank != 0 and listen_fd is not None:
        os.close(listen_fd)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank - request["first_rank"]),
        WORLD_SIZE=str(request["ranks"]),
        LOCAL_WORLD_SIZE=str(request["local_ranks"]),
        MASTER_ADDR=request["address"],
        MASTER_PORT=str(port),
        **request["variables"],
        **{LISTEN_FD: str(listen_fd) if rank == 0 and listen_fd is not None else "", ATTEMPT_FOLDER: str(folder)},
    )
    mark_rank_variables_as_own(os.environ)
    threads = int(request["threads"])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def _redirect_output(log: Path) -> None:
    """Redirect everything that a worker and its children print to the rank's own log."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    os.close(null)


def _redirect_errors(log: Path) -> None:
    """Redirect the standard error of this server to the log in the folder of the next attempt."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(handle, 2)
    os.close(handle)


def _report(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # Python's own shutdown takes a second with torch loaded
