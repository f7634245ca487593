"""`record`, `compare` and `verify-script` with real commands: equal and unequal scripts, feeding, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.script_check.recorded_script import _first_traceback

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
x = torch.randn(64, 4)
for (batch,) in DataLoader(TensorDataset(x), batch_size=int(sys.argv[2]), shuffle=True):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
RANKS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, 8 // dist.get_world_size(), sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node"


def paceline(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-m", "paceline", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def record(folder: Path, out: str, *words: str, rate: str = "0.1", size: str = "8") -> str:
    done = paceline(
        folder, "record", "--out", out, "--steps", "4", *words, "--", sys.executable, "train.py", rate, size
    )
    assert done.returncode == 0, done
    return done.stdout


def test_recordings_of_one_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "4 steps of 1 rank: one\nto compare: paceline compare one OTHER" in record(tmp_path, "one", "--seed", "3")
    record(tmp_path, "two", "--seed", "3", "--batches", "--every", "9")
    lines = (tmp_path / "two" / "rank-0.jsonl").read_text().splitlines()[1:]
    assert [line["step"] for line in map(json.loads, lines) if line["weights"]] == [0, 1, 2, 4]
    record(tmp_path, "faster", "--seed", "3", rate="0.2")
    record(tmp_path, "unseeded", "--feed", "two")
    record(tmp_path, "fed", "--seed", "3", "--feed", "two", size="16")
    same = paceline(tmp_path, "compare", "one", "two")
    assert same.returncode == 0 and "SAME TRAINING: bitwise, 3 steps" in same.stdout, same
    faster = paceline(tmp_path, "compare", "one", "faster", "--json")
    assert faster.returncode == 4 and "lr of parameter group 0" in json.loads(faster.stdout)["cause"], faster
    unseeded = paceline(tmp_path, "compare", "two", "unseeded")
    assert unseeded.returncode == 5 and "to do: --seed 0 for both" in unseeded.stdout, unseeded
    fed = paceline(tmp_path, "compare", "two", "fed")
    assert fed.returncode == 4 and "the batches of fed are 2 times as large" in fed.stdout, fed


def test_a_recording_that_breaks_or_is_not_whole_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "other.py").write_text(
        SCRIPT.replace("TensorDataset(x)", "TensorDataset(x, x)").replace("(batch,)", "batch, _")
    )
    record(tmp_path, "kept", "--batches")
    command = [sys.executable, "other.py", "0.1", "8"]
    other = paceline(tmp_path, "record", "--out", "other", "--steps", "4", "--feed", "kept", "--", *command)
    assert other.returncode == 5 and "the other recording has batches with ['[0]']" in other.stdout + other.stderr, (
        other
    )
    failed = paceline(tmp_path, "record", "--out", "failed", "--", sys.executable, "train.py", "0.1", "nine")
    assert failed.returncode == 5 and "invalid literal for int()" in failed.stdout + failed.stderr, failed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["record", "--", "python", "train.py"], "--out"),
        (["record", "--out", "full", "--", "python", "train.py"], "--out full is not an empty folder"),
        (
            ["record", "--out", "new", "--feed", "full", "--", "python", "t.py"],
            "--feed full is no recording with batches",
        ),
        (["record", "--out", "new", "--", "no-such-command"], "no-such-command can't be started"),
        (["verify-script", "--one", "python 'a", "--many", "python b"], "--one can't be read as a command"),
        (["verify-script", "--one", "python a", "--many", ""], "--many is empty"),
        (["compare", "full", "script"], "a recording of a script is compared with one other recording of a script"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.json").write_text('{"command":["python"],"steps":0}')
    done = paceline(tmp_path, *words)
    assert done.returncode == 2 and said in done.stderr, done
    assert not (tmp_path / "new" / "rank-0.jsonl").exists()


def test_two_ranks_of_a_script_are_the_same_training_as_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    (tmp_path / "wrong.py").write_text(RANKS.replace(".mean()", ".sum()"))
    one, many, wrong = f"{TORCHRUN} 1 train.py", f"{TORCHRUN} 2 train.py", f"{TORCHRUN} 2 wrong.py"
    done = paceline(tmp_path, "verify-script", "--steps", "3", "--one", one, "--many", many)
    assert done.returncode == 0 and "samples: the same at each step\nSAME TRAINING: equal up to" in done.stdout, done
    done = paceline(tmp_path, "verify-script", "--steps", "3", "--one", one, "--many", wrong, "--json")
    assert done.returncode == 4 and "8 times those of one" in json.loads(done.stdout)["cause"], done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "wrong.py"]


def test_the_exception_of_a_long_traceback_is_shown() -> None:
    frames = [f'[rank1]:   File "{number}.py", line 1, in f' for number in range(50)]
    other = "[rank0]: Traceback (most recent call last):"
    lines = [
        "before",
        "[rank1]: Traceback (most recent call last):",
        *frames,
        other,
        "[rank1]: ValueError: no",
        "after",
    ]
    shown = _first_traceback(lines)
    assert shown[0] == lines[1] and shown[-1] == "[rank1]: ValueError: no" and len(shown) == 20 and other not in shown
    assert _first_traceback(["nothing"]) == []


def test_the_traceback_of_the_launcher_is_not_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('Key pdrop is not in struct')\nsys.exit(1)\n")
    command = [*TORCHRUN.split(), "2", "train.py"]
    done = paceline(tmp_path, "record", "--out", "failed", "--", *command)
    assert done.returncode == 5 and "Key pdrop is not in struct" in done.stderr + done.stdout, done
    assert "Traceback" not in done.stderr + done.stdout
