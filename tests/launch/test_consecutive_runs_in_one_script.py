"""One script starts several runs in sequence, and each world has its own store keys under every launcher."""

import shutil
import sys

import pytest

from tests.conftest import Shop

SCRIPT = """
import paceline as pl
from job import make_job
for name in ("first", "second", "third"):
    with pl.Run(make_job(), run_dir=name, settings={"train.steps": 4}) as run:
        for batch in run.batches():
            run.step(batch)
    print("left", name, run.rank, run.exit_code, flush=True)
"""
TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-W", "ignore")
MPICH = ("mpiexec.hydra", "-n", "2", sys.executable, "-W", "ignore")


@pytest.mark.cold
@pytest.mark.parametrize(
    "launcher",
    [TORCHRUN, pytest.param(MPIRUN, marks=pytest.mark.soak), pytest.param(MPICH, marks=pytest.mark.soak)],
    ids=["torchrun", "mpirun", "MPICH"],
)
def test_a_script_of_several_runs_ends(shop: Shop, launcher: tuple[str, ...]) -> None:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    shop.write("script.py", SCRIPT)
    ended = shop.call([*launcher, "script.py"], timeout=100)
    assert ended.code == 0, ended.text
    told = sorted(line for line in ended.out.splitlines() if line.startswith("left "))
    assert told == [f"left {name} {rank} 0" for name in ("first", "second", "third") for rank in (0, 1)]
    assert shop.digest("first") == shop.digest("second") == shop.digest("third")


REFUSED = """
import os
import torch
import paceline as pl
from job import make_job
def say(text):
    print(text + "\\n", end="", flush=True)  # in one write, since two ranks share the pipe
for layout in ("tp", "ddp"):  # the first is refused when the model is built, the second fails in the loop
    try:
        with pl.Run(make_job(), run_dir="failed", settings={"train.steps": 4}, layout=layout) as run:
            raise KeyError("the loop of rank " + os.environ["RANK"])
    except (KeyError, pl.LayoutError) as error:
        say(f"caught {type(error).__name__}")
with pl.Run(make_job(), run_dir="second", settings={"train.steps": 4}) as run:
    for batch in run.batches():
        run.step(batch)
torch.distributed.init_process_group("gloo")
try:
    pl.Run(make_job(), run_dir="third").open()
except pl.PacelineError as error:
    say(f"refused {error.what}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.cold
def test_a_script_that_catches_a_run_s_error_can_start_another(shop: Shop) -> None:
    shop.write("script.py", REFUSED)
    ended = shop.call([*TORCHRUN, "script.py"], timeout=100)
    assert ended.code == 0, ended.text
    assert ended.out.count("caught LayoutError") == ended.out.count("caught KeyError") == 2
    assert shop.digest("second"), ended.text
    assert ended.out.count("refused this process is already in a process group of 2 ranks") == 2, ended.text
