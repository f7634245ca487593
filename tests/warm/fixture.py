"""What makes the commands of a folder's tests find a nursery that waits."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.start import CHOSEN_KERNELS, EXACT_KERNELS
from paceline.survive.agent import STARTER

_ROOT = Path(__file__).parents[2]
STARTING = ("docs", "fault", "matrix", "parity")
COLD = ("test_kills", "test_runs", "test_stops", "test_own_script", "test_asynchronous_kills", "test_one_run")
_MATH_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@pytest.fixture(scope="module", autouse=True)
def warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs start from a nursery that waits, but where the start itself is tried."""
    if sys.platform != "linux" or request.path.parent.name not in STARTING or request.path.stem in COLD:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STARTER, request.getfixturevalue("mother"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def mother() -> Iterator[str]:
    """The words that start a nursery."""
    name = f"paceline-warm-{os.getpid()}"
    environ = {**os.environ, **dict.fromkeys(_MATH_THREADS, "1"), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ExitStack() as stack:
        for kernels in ("", CHOSEN_KERNELS):
            words = [sys.executable, "-W", "ignore", "-m", "tests.warm.mother", name + kernels, str(os.getpid())]
            own = {**environ, **({EXACT_KERNELS: kernels} if kernels else {})}
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(words, env=own, cwd=_ROOT, stdin=pipe, stdout=pipe))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"here\n"
        yield shlex.join([sys.executable, "-S", "-E", str(Path(__file__).with_name("starter.py")), name])
