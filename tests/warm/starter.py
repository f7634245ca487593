"""Stands in for a fork server: `python -S -E starter.py SOCKET REQUEST.json PARENT`.

It hands what it was started with (words, environment, folder, files) to the process that waits at the abstract
`SOCKET` with its kernels, lives as long as the fork server that is forked there, and ends as that ends. Where nobody waits, or what waits was
started in an environment that numbers depend on, it becomes a fork server itself.
"""

import array
import ctypes
import json
import os
import signal
import socket
import sys

PARENT_DIES = 1  # prctl's PR_SET_PDEATHSIG
MOST_FILES = 64
KERNELS = "MKL_CBWR"  # chosen before torch is there: one waits with each choice


def main(path: str, *words: str) -> None:
    """Never returns."""
    ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() != int(words[1]):
        os._exit(128 + signal.SIGKILL)
    files = [number for number in range(MOST_FILES) if is_open(number)]
    told = {"words": words, "environ": dict(os.environ), "folder": os.path.realpath("."), "files": files}
    with socket.socket(socket.AF_UNIX) as mother:
        if not is_taken(mother, path + os.environ.get(KERNELS, ""), json.dumps(told).encode(), files):
            os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline.launch.agent.forkserver", *words])
        for number in files:
            os.close(number)  # who reads them waits for the last one's end
        said = mother.makefile().readline()
    status = int(said or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_taken(mother: socket.socket, path: str, told: bytes, files: list[int]) -> bool:
    """Whether a fork server is forked for this."""
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    try:
        mother.connect(f"\0{path}")
        mother.sendmsg([len(told).to_bytes(8, "little")], beside)
        mother.sendall(told)
        return mother.recv(1) == b"y"
    except OSError:
        return False


def is_open(number: int) -> bool:
    """As this was started."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
