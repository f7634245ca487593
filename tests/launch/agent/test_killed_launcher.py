"""Ranks end with a killed launcher; otherwise they would train on in a folder that a new run uses."""

import ctypes
import inspect
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from paceline.launch.agent.launcher_death import die_with_launcher, outlive_launcher
from tests.conftest import Shop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")


def asked_of_the_kernel() -> int:
    """The signal that this process gets when its parent dies."""
    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))
    return found.value


TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-W", "ignore")
MPICH = ("mpiexec.hydra", "-n", "2", sys.executable, "-W", "ignore")
VERB = ("-m", "paceline", "train", "job.py", "--run-dir", "run", "--train.steps", "100000")
SCRIPT = f"""
import ctypes, sys
import paceline as pl
from job import make_job

{inspect.getsource(asked_of_the_kernel)}
with pl.Run(make_job(), run_dir="run", settings={{"train.steps": int(sys.argv[1])}}) as run:
    for batch in run.batches():
        run.step(batch)
    print("in it", asked_of_the_kernel())
print("after it", asked_of_the_kernel())
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*TORCHRUN, *VERB), id="torchrun, the command", marks=pytest.mark.soak),
        pytest.param((*TORCHRUN, "script.py", "100000"), id="torchrun, a script"),
        pytest.param((*MPIRUN, *VERB), id="mpirun, the command", marks=pytest.mark.soak),
        pytest.param((*MPIRUN, "script.py", "100000"), id="mpirun, a script", marks=pytest.mark.soak),
        pytest.param((*MPICH, *VERB), id="MPICH, the command", marks=pytest.mark.soak),
        pytest.param((*MPICH, "script.py", "100000"), id="MPICH, a script", marks=pytest.mark.soak),
    ],
)
def test_ranks_end_with_a_launcher_that_is_killed(shop: Shop, command: tuple[str, ...]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    shop.write("script.py", SCRIPT)
    environ = shop.environ({"PAUSE": "0.02"})
    launcher = subprocess.Popen(command, cwd=shop.path, env=environ, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 90
        while not (shop.path / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) >= 2
    finally:
        launcher.kill()
        launcher.wait()
    assert not psutil.wait_procs(ranks, timeout=20)[1]


@pytest.mark.soak
@pytest.mark.cold
def test_after_its_run_a_script_is_its_launcher_s_as_any_other(shop: Shop) -> None:
    shop.write("script.py", SCRIPT)
    ended = shop.call([*TORCHRUN, "script.py", "3"])
    assert ended.code == 0, ended.text
    assert ended.out.count("in it 9") == ended.out.count("after it 0") == 2, ended.text


@pytest.mark.parametrize("before", [0, int(signal.SIGTERM)])
def test_after_the_run_the_process_outlives_its_launcher_as_before(before: int) -> None:
    theirs = asked_of_the_kernel()
    ctypes.CDLL(None).prctl(1, before)
    try:
        told = die_with_launcher({"TORCHELASTIC_RUN_ID": "any"})
        assert (told, asked_of_the_kernel()) == (before, signal.SIGKILL)
        outlive_launcher(before)
        assert asked_of_the_kernel() == before
        assert die_with_launcher({}) is None and asked_of_the_kernel() == before, "a shell may end before what it began"
    finally:
        ctypes.CDLL(None).prctl(1, theirs)
