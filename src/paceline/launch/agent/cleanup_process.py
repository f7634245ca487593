"""A cleanup process that kills the processes that a run leaves behind when its supervisor or fork server has ended."""

import os
import select
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.launch.agent.signals import STOP_SIGNALS

_MAX_FILES = 65536  # file descriptors to close
_GROUP_END_SECONDS = 30.0  # how long to wait for the killed processes to end
_POLL_SECONDS = 0.005


def start_cleanup_process(supervisor_pid: int, *, scratch: str = "", memory_folder: str = "") -> None:
    """Fork a process that waits until the supervisor or this process has ended, and then kills this process group.

    Ranks die with this process. Other processes that the job started with `Popen`, `os.fork` or multiprocessing are in
    the same process group and would keep running. The new process also removes `scratch`, the folder of the group's
    sockets. If the supervisor has ended, it also removes `memory_folder`, the folder of the checkpoints in memory,
    which the supervisor would have removed. If the kernel does not support pidfds, no process is forked.
    """
    leader_pid = os.getpid()
    if not hasattr(os, "pidfd_open") or os.getpgrp() != leader_pid:
        return
    if os.fork() == 0:
        try:
            has_supervisor_ended = _wait_and_kill_group(supervisor_pid, leader_pid)
            _remove_folders([scratch, memory_folder if has_supervisor_ended else ""], leader_pid)
        finally:
            os._exit(0)


def kill_group_members() -> None:
    """Kill every other process of this process group, and return when none is left.

    These are processes that the job of an ended attempt started and that outlived its ranks, such as data workers. The
    next attempt must not share files or sockets with them. If they are not gone after 30 s, because the kernel does not
    let one of them end, the next attempt starts anyway. Nothing is killed if this process does not lead its group, or
    without /proc (macOS).
    """
    if os.getpgrp() != os.getpid():
        return
    deadline = time.monotonic() + _GROUP_END_SECONDS
    while pids := [pid for pid in _living_group_members(os.getpgrp()) if pid != os.getpid()]:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def wait_for_group(group: int, *, seconds: float) -> None:
    """Wait until all processes of a group have ended, at most `seconds`.

    A process that has ended may stay in its group if nobody takes its exit status, for example if PID 1 of a container
    is not an init. It does not count.
    """
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            if Path("/proc/self").exists() and not _living_group_members(group):
                return
            time.sleep(_POLL_SECONDS)


def _living_group_members(group: int) -> list[int]:
    """Return the PIDs of the processes in a group that have not ended; an empty list without /proc."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in ("Z", "X"):
                pids.append(int(entry.parent.name))
    return pids


def _wait_and_kill_group(supervisor_pid: int, leader_pid: int) -> bool:
    """Wait until one of both processes has ended, and kill the group. Return whether the supervisor has ended."""
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, _MAX_FILES)
    poller = select.poll()
    supervisor_fd = -1
    with suppress(ProcessLookupError):
        supervisor_fd = os.pidfd_open(supervisor_pid)
        poller.register(supervisor_fd, select.POLLIN)
        poller.register(os.pidfd_open(leader_pid), select.POLLIN)
        poller.poll()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)
    return supervisor_fd < 0 or any(handle == supervisor_fd for handle, _ in poller.poll(0))


def _remove_folders(folders: Sequence[str], leader_pid: int) -> None:
    """Remove the folders once no process of the group is left to write to them. Empty names are left out."""
    wait_for_group(leader_pid, seconds=_GROUP_END_SECONDS)
    for folder in filter(None, folders):
        shutil.rmtree(folder, ignore_errors=True)
