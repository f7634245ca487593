"""The command of one node, as a process that a Ray worker has started.

The command is the one that a user types on each of several machines. It is a process of its own, because Ray runs the
worker's function in a thread, and a signal reaches only the main thread of a process.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from paceline.errors import ExitCode
from paceline.launch.agent.forkserver_client import module_path_options
from paceline.launch.agent.signals import die_with_parent
from paceline.plugins import resolve

_MODULE = "paceline.launch.ray.node_process"


class StopReason(StrEnum):
    """The reason for which a node was asked to save and stop."""

    NONE = ""
    SHUTDOWN = "Ray ends this worker"
    DRAIN = "Ray drains a machine of this training"
    REQUEST = "a stop was requested"


class NodeProcess:
    """The process of a node. It ends if this process ends, however that happens."""

    def __init__(self, words: Sequence[str], *, folder: str) -> None:
        """Start `paceline` with these words in a folder.

        Raises:
            OSError: the folder does not exist here.
        """
        self.stop_reason = StopReason.NONE
        self._lock = threading.Lock()
        command = [sys.executable, *module_path_options(), "-m", _MODULE, str(os.getpid()), *words]
        # The group is its own: an interrupt that is typed where Ray was started by hand would reach it twice.
        self._process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process, at most for some seconds. Return its exit code; None if it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask_to_stop(self, reason: StopReason) -> bool:
        """Ask the node to finish its step, save and stop. Return whether this is the first time, and it still runs."""
        with self._lock:
            if self.stop_reason or self._process.poll() is not None:
                return False
            self.stop_reason = reason
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            return True


def refusal_to_end(code: int, reason: StopReason) -> str:
    """Return why Ray must start all nodes again after one has ended with `code`; "" if the training is over.

    The training is over if it is done, was refused or has failed, because all nodes then end with the same code, and
    their own restarts (`survive.restarts`) have not helped.
    """
    if reason is StopReason.DRAIN and code in (ExitCode.STOPPED, -signal.SIGUSR1):
        return "stopped, because Ray drains a machine of this training"
    if reason:
        return ""
    if code == ExitCode.STOPPED:
        return "another node is lost, or a signal has stopped this one"
    if code < 0:
        return f"its agent was killed by {signal.Signals(-code).name}"
    return ""


def main() -> None:
    """Run the command in the arguments. The first one is the id of the parent process, with which this one ends."""
    die_with_parent(int(sys.argv.pop(1)))
    resolve("paceline.cli:entry")()


if __name__ == "__main__":
    main()
