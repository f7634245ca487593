"""`paceline check -- COMMAND` with real commands: an injected recorder, a failure, no step, a hang, a wrong line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.script_check.recording import FOLDER_VARIABLE
from paceline.script_check.script_process import recorded_processes
from tests.waiting import wait_until

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("the end", model.weight.sum().item())
"""
TWO_RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def check(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "check", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_two_ranks_of_torchrun_are_ended_after_the_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = check(tmp_path, "--steps", "3", "--json", "--", *torchrun)
    verdict = json.loads(done.stdout)
    assert done.returncode == 0 and verdict["findings"] == [] and (verdict["ranks"], verdict["steps"]) == (2, 3), done
    assert not list(tmp_path.glob("*.jsonl")), "nothing is left in the folder of the script"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_runs_on_without_the_command_that_checks(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "paceline",
        "check",
        "--steps",
        "0",
        "--out",
        "kept",
        "--",
        *torchrun,
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    folder = tmp_path / "kept"
    wait_until(lambda: len(list(folder.glob("rank-*.jsonl"))) == 2)
    assert len(recorded_processes(folder)) >= 3
    process.send_signal(number)
    process.communicate(timeout=60)
    wait_until(lambda: recorded_processes(folder) == [])


def test_a_stop_signal_also_ends_a_script_that_makes_no_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(10000)")
    command = [sys.executable, "-m", "paceline", "check", "--out", "kept", "--", sys.executable, "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: len(recorded_processes(tmp_path / "kept")) == 1)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert recorded_processes(tmp_path / "kept") == []


STOPPED_AT_THE_START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.script_check import script_process
from paceline.script_check.recording import ScriptRecording

start = subprocess.Popen

def start_and_stop(*args, **options):
    process = start(*args, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    return process

subprocess.Popen = start_and_stop
folder, command = Path("kept"), (sys.executable, "-c", "import time; time.sleep(10000)")
try:
    script_process.run_recorded(
        ScriptRecording(command=command, steps=1), folder=folder, wait_seconds=60, environ=os.environ, report=print
    )
except SystemExit as error:
    print("exit", error.code, script_process.recorded_processes(folder))
"""


def test_a_stop_signal_while_the_command_starts_ends_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_THE_START],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for left in recorded_processes(tmp_path / "kept"):
        left.kill()
    assert done.stdout == f"exit {128 + signal.SIGTERM} []\n", done


def test_one_process_runs_to_its_end_and_the_recording_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = check(tmp_path, "--steps", "0", "--out", "kept", "--", sys.executable, "train.py", "5")
    assert done.returncode == 0 and "5 steps of 1 rank" in done.stdout, done
    assert "one rank: nothing was reduced" in done.stdout
    assert "the end" in (tmp_path / "kept" / "output.log").read_text()
    assert len((tmp_path / "kept" / "rank-0.jsonl").read_text().splitlines()) == 1 + 1 + 5
    plain = subprocess.run([sys.executable, "train.py", "5"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert plain.stdout == (tmp_path / "kept" / "output.log").read_text()
    again = check(tmp_path, "--out", "kept", "--", sys.executable, "train.py", "5")
    assert again.returncode == 2 and "--out kept is not an empty folder" in again.stderr


def test_gradients_and_weights_of_some_steps_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--steps", "7", "--every", "4", "--out", "kept", "--", sys.executable, "train.py", "9")
    done = check(tmp_path, *words)
    assert done.returncode == 0 and "gradients and weights at 3 of 7 steps: --every leaves them out" in done.stdout, (
        done
    )
    lines = [json.loads(line) for line in (tmp_path / "kept" / "rank-0.jsonl").read_text().splitlines()[1:]]
    assert [line["step"] for line in lines] == list(range(8)) and all(line["calls"] for line in lines[1:])
    for field in ("weights", "gradients", "own_gradients"):
        assert [line["step"] for line in lines[1:] if line[field]] == [1, 2, 4, 7], field
    wrong = check(tmp_path, "--every", "0", "--", sys.executable, "train.py", "9")
    assert wrong.returncode == 2 and "--every 0 must be positive" in wrong.stderr, wrong


def test_a_command_that_fails_later_is_no_clean_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("    optimizer.step()", "    optimizer.step()\n    assert step < 3, 'too far'")
    )
    done = check(tmp_path, "--steps", "9", "--", sys.executable, "train.py", "20")
    assert done.returncode == 5 and "failed with exit code 1 after 4 steps" in done.stdout, done
    assert "AssertionError: too far" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch; raise ValueError('no data')", "ended with exit code 1 before an optimizer made a step"),
        ("import torch", "without a step of a torch optimizer"),
        ("import torch, time; time.sleep(10000)", "no optimizer made a step in time"),
    ],
    ids=["a failure", "no step", "a hang"],
)
def test_a_command_without_a_step_can_not_be_judged(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "train.py").write_text(text)
    done = check(tmp_path, "--wait", "5" if "sleep" in text else "100", "--", sys.executable, "train.py")
    assert done.returncode == 5 and said in done.stdout, done
    assert ("ValueError: no data" in done.stdout) == ("no data" in text)


def test_a_launcher_that_starts_too_few_processes_is_no_clean_run(tmp_path: Path) -> None:
    """As `accelerate launch --cpu --num_processes 2` does, which starts one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = check(tmp_path, "--steps", "2", "--", sys.executable, "train.py", "5", "--num_processes=2")
    assert done.returncode == 5 and "asks for 2 processes (--num_processes 2)" in done.stdout, done


def test_wrong_lines_name_the_right_one(tmp_path: Path) -> None:
    done = check(tmp_path, "torchrun", "train.py")
    assert done.returncode == 2 and "to do: paceline check -- torchrun train.py" in done.stderr, done
    done = check(tmp_path, "--", "no-such-program", "train.py")
    assert done.returncode == 2 and "no-such-program can't be started" in done.stderr, done


def test_a_recorder_that_fails_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "file").write_text("")
    injected = Path(sys.modules["paceline"].__path__[0]) / "script_check" / "injected"
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path / "file" / "folder")}
    environ["PYTHONPATH"] = os.pathsep.join([str(injected), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "train.py", "3"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "the end" in done.stdout, done
    assert "the recording has stopped, and the training goes on" in done.stderr
