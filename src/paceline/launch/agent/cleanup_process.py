"""A process that ends what a run leaves behind when nobody else is there to do it."""

import os
import select
import shutil
import signal
import time
from contextlib import suppress

from paceline.launch.agent.signals import STOP_SIGNALS

_MOST_FILES = 65536
_ENDING_SECONDS = 30.0


def start_cleanup_process(agent: int, *, scratch: str = "") -> None:
    """Fork what waits until `agent` or this process has ended, however it did, and then ends this process group.

    Ranks die with this process. What the job has started beside them, with `Popen`, `os.fork` or multiprocessing, is of
    the same group and would live on. `scratch`, a folder of the group, is removed too. Where the kernel has no handles
    of processes nothing is forked.
    """
    leader = os.getpid()
    if not hasattr(os, "pidfd_open") or os.getpgrp() != leader:
        return
    if os.fork() == 0:
        try:
            _wait_and_end(agent, leader)
            _remove(scratch, leader)
        finally:
            os._exit(0)


def _wait_and_end(agent: int, leader: int) -> None:
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, _MOST_FILES)
    watched = select.poll()
    with suppress(ProcessLookupError):
        for pid in (agent, leader):
            watched.register(os.pidfd_open(pid), select.POLLIN)
        watched.poll()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _remove(scratch: str, leader: int) -> None:
    """Once nobody of the group is there to write to it."""
    until = time.monotonic() + _ENDING_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(leader, 0)
            time.sleep(0.01)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
