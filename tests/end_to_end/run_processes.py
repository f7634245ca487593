"""Find the processes of one run by an environment variable that they all inherit."""

import os
import time
from pathlib import Path


def marked_processes(mark: str) -> list[int]:
    """Every living process that inherited this mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    mark.encode() in (entry / "environ").read_bytes()
                    and "State:\tZ" not in (entry / "status").read_text()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until_gone(mark: str, *, seconds: float = 10) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def children(parent: int) -> list[int]:
    """Its living children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")")[1].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def starter_of(forkserver: int) -> int:
    """The process that a fork server has forked to start the ranks."""
    return next(pid for pid in children(forkserver) if children(pid))


def spare_of(forkserver: int) -> int:
    """The process that a fork server has forked to replace it, which leads a group of its own."""
    return next(pid for pid in children(forkserver) if os.getsid(pid) == pid)
