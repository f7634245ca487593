"""Exact mode gives one digest under every launcher: it chooses kernels before torch is imported, or is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.resume_checks import check_identity
from paceline.errors import ResumeError
from paceline.launch.launch_environment import KERNELS_VARIABLE
from tests.conftest import SMALL_JOB, Ended, Shop

WORDS = ("--train.exact", "--train.micro_batch_size", "3", "--watch.to", "jsonl")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable)
MPICH = ("mpiexec.hydra", "-n", "2", sys.executable)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SETTINGS = '{"train.steps": 12, "train.exact": True, "train.micro_batch_size": 3, "watch.to": ("jsonl",)}'
SCRIPT = f"""
import os, sys
{SMALL_JOB}
with open(f"starts-{{os.environ.get('RANK', 'x')}}", "a") as file:
    file.write(f"{{os.getpid()}} {{os.environ.get('{KERNELS_VARIABLE}', 'none')}}\\n")
    os.set_inheritable(file.fileno(), False)
BEFORE
if __name__ == "__main__":
    with pl.Run(make_job(), run_dir=sys.argv[1], settings={SETTINGS}) as run:
        for batch in run.batches():
            run.step(batch)
"""


def launch(shop: Shop, *words: str, **environ: str) -> Ended:
    """Run a command line here in an environment that has chosen no kernels but these."""
    found = {name: value for name, value in shop.environ().items() if name != KERNELS_VARIABLE}
    done = subprocess.run(
        words, cwd=shop.path, env={**found, **environ}, capture_output=True, text=True, timeout=120, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def train(shop: Shop, run: str, *words: str, steps: int = 12, **environ: str) -> Ended:
    """`paceline train` of the small job, in exact mode."""
    command = shop.command("train", "job.py", "--run-dir", run, "--train.steps", str(steps), *WORDS, *words)
    return launch(shop, *command, **environ)


def condition(shop: Shop, run: str) -> tuple[str, Any]:
    """The digest, and the kernels beside it."""
    found = json.loads((shop.path / run / "weights.json").read_text())
    assert found["torch_build"] and found["cpu"]
    return shop.digest(run), found["kernels"]


def starts(folder: Path, rank: int) -> list[list[str]]:
    """The process and the kernels of each time that a rank's script began."""
    return [line.split() for line in (folder / f"starts-{rank}").read_text().splitlines()]


@pytest.fixture
def ours(shop: Shop) -> tuple[str, Any]:
    """What our own launcher gives."""
    ended = train(shop, "ours", "--ranks", "1")
    assert ended.code == 0, ended.text
    return condition(shop, "ours")


@pytest.mark.soak
def test_the_command_under_torchrun_and_mpirun_is_the_same_training(shop: Shop, ours: tuple[str, Any]) -> None:
    assert ours[1] == "AVX2"
    words = ["-m", "paceline", "train", "job.py", "--train.steps", "12", *WORDS, "--run-dir"]
    ended = launch(shop, *TORCHRUN, "2", *words, "torchrun")
    assert ended.code == 0 and condition(shop, "torchrun") == ours, ended.text
    others = {"mpirun": MPIRUN, "mpich": MPICH}
    for name, launcher in others.items():
        if shutil.which(launcher[0]) is not None:
            ended = launch(shop, *launcher, *words, name)
            assert ended.code == 0 and condition(shop, name) == ours, ended.text
    missing = [launcher[0] for launcher in others.values() if shutil.which(launcher[0]) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: torchrun was compared")


@pytest.mark.soak
def test_a_run_that_another_launcher_began_goes_on_under_ours(shop: Shop, ours: tuple[str, Any]) -> None:
    words = ["-m", "paceline", "train", "job.py", "--train.steps", "12", *WORDS, "--run-dir", "cut"]
    assert launch(shop, *TORCHRUN, "2", *words, "--checkpoint.every", "4", "--faults", "kill rank=1 step=7").code != 0
    assert train(shop, "cut", "--ranks", "3").code == 0
    assert condition(shop, "cut") == ours


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.soak)])
@pytest.mark.soak
def test_a_loop_of_ones_own_begins_once_more_in_the_same_process(
    shop: Shop, ours: tuple[str, Any], launcher: str
) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    script = shop.write("own.py", SCRIPT.replace("BEFORE", ""))
    ended = launch(shop, *([*TORCHRUN, "2"] if launcher == "torchrun" else MPIRUN), str(script), "own")
    assert ended.code == 0 and condition(shop, "own") == ours, ended.text
    for rank in (0, 1) if launcher == "torchrun" else ():
        (first, none), (again, chosen) = starts(shop.path, rank)
        assert first == again and (none, chosen) == ("none", "AVX2")


REFUSED = {
    "a group of its own": "import torch.distributed as dist; dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())",
    "another folder": "os.makedirs('inner', exist_ok=True); os.chdir('inner')",
    "a run before": "with pl.Run(make_job(), run_dir='first', settings={'train.steps': 1}) as run:\n"
    "    for batch in run.batches(): run.step(batch)",
    "the verb": "pl.train('job.py', settings={'train.exact': True}); sys.exit()",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("a run before", "the verb") else pytest.mark.soak) for n in REFUSED]
)
def test_what_can_not_begin_once_more_is_refused_with_the_line_to_type(shop: Shop, name: str) -> None:
    shop.write("own.py", SCRIPT.replace("BEFORE", REFUSED[name]))
    world = {"RANK": "0", "WORLD_SIZE": "1"}
    ended = launch(shop, sys.executable, "own.py", "own", **world)
    assert ended.code != 0 and "exact mode needs kernels that MKL_CBWR selects before torch" in ended.text, ended.text
    assert "export MKL_CBWR=AVX2, then the same command" in ended.text
    assert len(starts(shop.path, 0)) == 1 and not (shop.path / "own" / "weights.json").exists()


def test_exact_mode_that_only_the_job_asks_for_is_refused_by_the_command(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace("max_grad_norm=1.0,", 'max_grad_norm=1.0, settings={"train.exact": True},'))
    ended = launch(shop, *shop.command("train", "job.py", "--run-dir", "run", "--train.steps", "2"))
    assert ended.code == 2 and "Job(settings=) requests exact mode" in ended.text, ended.text
    assert "to do: paceline train job.py --train.exact" in ended.text
    assert train(shop, "run", steps=2).code == 0


@pytest.mark.soak
def test_other_kernels_are_told_and_no_silent_change_on_a_resume(shop: Shop) -> None:
    other = {KERNELS_VARIABLE: "COMPATIBLE"}
    assert train(shop, "run", steps=4, **other).code == 0
    assert condition(shop, "run")[1] == "COMPATIBLE"
    refused = train(shop, "run", steps=6)
    assert refused.code == 2 and "kernels: was COMPATIBLE, is AVX2." in refused.text, refused.text
    assert "MKL_CBWR=COMPATIBLE before the same command, or --allow kernels" in refused.text
    assert train(shop, "run", "--allow", "kernels", steps=6).code == 0
    assert condition(shop, "run")[1] == "AVX2"


def test_kernels_are_compared_where_both_runs_are_exact_and_name_them() -> None:
    saved = {"exact": True, "kernels": "COMPATIBLE", "data": {"fingerprint": "1"}}
    now = {"exact": True, "kernels": "AVX2", "data": {"fingerprint": "1"}}
    with pytest.raises(ResumeError, match="kernels: was COMPATIBLE, is AVX2"):
        check_identity(saved, now, allow=())
    check_identity({**saved, "exact": False}, {**now, "exact": False}, allow=())
    check_identity({name: saved[name] for name in ("exact", "data")}, now, allow=())
    check_identity(saved, {**now, "exact": False}, allow=("exact",))
    check_identity(saved, {**now, "data": {"fingerprint": "2"}}, allow=("kernels",))
