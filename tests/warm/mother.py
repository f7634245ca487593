"""`python -m tests.warm.mother SOCKET PARENT`: torch imported once, a fork server forked for each starter that connects."""

import array
import fcntl
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from paceline.launch.agent import forkserver
from paceline.launch.agent.signals import die_with_parent

ENTRIES = (
    "paceline.trainer.entrypoints:train",
    "paceline.verification.verify_worker:verify",
    "paceline.measured_planning.plan_worker:plan",
)
NUMBERS = ("ATEN_", "CUDA", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "ONEDNN_", "PYTHON", "TORCH_")
USED = (
    "sklearn.datasets",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert", "t5", "vit", "mixtral")),
)
"""What jobs of the tests import: seconds in each rank, where it is not here already."""
_MOST_FILES, _HIGH = 64, 512


def numbers_of(environ: Any) -> dict[str, str]:
    """What torch or Python read when they begin: of another one, nothing can be had here."""
    return {name: value for name, value in environ.items() if name.startswith(NUMBERS)}


class Mother:
    """Of the fork servers that it forked, and the starters that stand in for them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        before = dict(os.environ)
        for entry in ENTRIES:
            forkserver.preload_worker(entry)
        for module in USED:
            with suppress(ImportError):
                importlib.import_module(module)
        self._added = {name: value for name, value in os.environ.items() if name not in before}  # by what was imported
        self._own = self._numbers(before)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._born)

    def _numbers(self, environ: dict[str, str]) -> dict[str, str]:
        """A test's process may have imported what sets variables here, as sklearn does, and hand them on, or not."""
        return numbers_of({**self._added, **environ})

    def live(self) -> NoReturn:
        """Until its parent dies."""
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # else one before it has ended what this is of
                    key.data()

    def _born(self) -> None:
        starter, _ = self._listener.accept()
        files: list[int] = []
        is_taken = False
        with suppress(OSError):  # killed while it spoke
            told = received(starter, files)
            if told is not None and self._numbers(told["environ"]) == self._own:
                starter.sendall(b"y")
                self._fork(starter, told, files)
                is_taken = True
        for number in files:
            os.close(number)
        if not is_taken:
            starter.close()

    def _fork(self, starter: socket.socket, told: dict[str, Any], files: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(told, files)
        handle = os.pidfd_open(pid)

        def gone() -> None:
            _, status = os.waitpid(pid, 0)
            with suppress(OSError):
                starter.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            for one in (starter, handle):
                with suppress(KeyError):
                    self._selector.unregister(one)
            starter.close()
            os.close(handle)

        def left() -> None:
            self._selector.unregister(starter)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

        self._selector.register(handle, selectors.EVENT_READ, gone)
        self._selector.register(starter, selectors.EVENT_READ, left)

    def _become(self, told: dict[str, Any], files: list[int]) -> NoReturn:
        """What the starter would have been."""
        mother = os.getppid()
        os.setsid()
        moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in files]
        os.closerange(0, _HIGH)
        for number, target in zip(moved, told["files"], strict=True):
            os.dup2(number, target, inheritable=True)
        os.closerange(_HIGH, _HIGH + 2 * _MOST_FILES)
        os.environ.clear()
        os.environ.update({**self._added, **told["environ"]})
        os.chdir(told["folder"])
        sys.path[0] = told["folder"]
        agent = int(told["words"][1])
        forkserver.die_with_parent = lambda parent: die_with_parent(mother if parent == agent else parent)  # type: ignore[attr-defined]
        status = 1
        try:
            status = forkserver.main(told["words"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)


def received(starter: socket.socket, files: list[int]) -> dict[str, Any] | None:
    """What a starter said, all of it; `files` get its files as they are open here."""
    starter.settimeout(10)
    found = array.array("i")
    length, beside, _, _ = starter.recvmsg(8, socket.CMSG_SPACE(_MOST_FILES * found.itemsize))
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    files += found
    said = b""
    while len(said) < int.from_bytes(length, "little"):
        more = starter.recv(1 << 20)
        if not more:
            return None
        said += more
    told: dict[str, Any] | None = json.loads(said) if said else None
    return told


def main(path: str, parent: str) -> None:
    """Never returns."""
    die_with_parent(int(parent))
    with socket.socket(socket.AF_UNIX) as listener:
        mother = Mother(listener)
        listener.bind(f"\0{path}")
        listener.listen(64)
        mother.live()


if __name__ == "__main__":
    main(*sys.argv[1:])
