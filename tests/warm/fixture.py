"""What makes the commands of a folder's tests find a fork server that waits."""

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.launch.agent.forkserver_client import FORKSERVER_COMMAND
from paceline.launch.launch_environment import DEFAULT_EXACT_KERNELS, KERNELS_VARIABLE
from tests.quick import is_quick

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parents[1]
COLD = ("test_random_kills", "test_stop_requests", "test_script_restart")
_MATH_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SHARED = "mothers"


class SharedMothers:
    """Of a session with several workers: made once, by the process that starts the workers."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._name = ""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: "WorkerController") -> None:
        """Tell a worker where they wait; they import while it collects."""
        if node.config.option.markexpr == "quick":  # no test of the quick lane starts a run
            return
        if not self._name:
            self._name = self._stack.enter_context(started())
        node.workerinput[_SHARED] = self._name

    def pytest_unconfigure(self) -> None:
        """End them."""
        self._stack.close()


@pytest.fixture(scope="module", autouse=True)
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs start from a fork server that waits, but where the start itself is tried."""
    if sys.platform != "linux" or request.path.stem in COLD or request.node.get_closest_marker("gpu"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if not is_quick(str(request.path.relative_to(TESTS))):
            patch.setenv(FORKSERVER_COMMAND, request.getfixturevalue("mother"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def cold(request: pytest.FixtureRequest, warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the runs of a test that is marked `cold` as a user's are."""
    if request.node.get_closest_marker("cold") is not None:
        monkeypatch.delenv(FORKSERVER_COMMAND, raising=False)


@pytest.fixture(scope="session")
def mother(pytestconfig: pytest.Config) -> Iterator[str]:
    """The words that start a fork server."""
    told = getattr(pytestconfig, "workerinput", {}).get(_SHARED)
    with ExitStack() as stack:
        name = told or stack.enter_context(started())
        for kernels in ("", DEFAULT_EXACT_KERNELS):
            _wait(f"{name}{kernels}")
        yield shlex.join([sys.executable, "-S", "-E", str(Path(__file__).with_name("starter.py")), name])


@contextmanager
def started() -> Iterator[str]:
    """Processes with torch imported, one for each choice of kernels; the name that they listen at."""
    name = f"paceline-warm-{os.getpid()}"
    environ = {**os.environ, **dict.fromkeys(_MATH_THREADS, "1"), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ExitStack() as stack:
        for kernels in ("", DEFAULT_EXACT_KERNELS):
            words = [sys.executable, "-W", "ignore", "-m", "tests.warm.mother", name + kernels, str(os.getpid())]
            own = {**environ, **({KERNELS_VARIABLE: kernels} if kernels else {})}
            process = stack.enter_context(subprocess.Popen(words, env=own, cwd=_ROOT, stdin=subprocess.PIPE))
            stack.callback(process.kill)
        yield name


def _wait(name: str, *, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as mother:
            try:
                mother.connect(f"\0{name}")
                return
            except ConnectionRefusedError:
                assert time.monotonic() < until, f"nobody waits at {name}"
        time.sleep(0.1)
