"""`train --resume RUN` without a job: the error has the line to type, with the job that the run names."""

import json
import shlex
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config.task import Task
from paceline.planner.layout.host_resources import visible_gpus

DEVICE = " --device cpu" if visible_gpus() else ""  # is named if `auto` would choose another one


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("runs/digits/first")
    (path / "logs").mkdir(parents=True)
    task = Task(
        verb="train", job="my digits.py", run="elsewhere", ranks=2, layout="fsdp", settings={"train.steps": 9},
        origins={"train.steps": "command line"},
    )  # fmt: skip
    (path / "task.json").write_text(json.dumps({**task.as_json(), "device": "cpu"}))
    return path


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--resume runs/digits/first",
         f"paceline train 'my digits.py' --run-dir runs/digits/first --ranks 2{DEVICE} --layout fsdp --train.steps 9"),
        ("--resume", f"paceline train 'my digits.py' --run-dir runs/digits/first --ranks 2{DEVICE} --layout fsdp --train.steps 9"),
        ("--resume=runs/digits/first --ranks 4", "paceline train 'my digits.py' --resume runs/digits/first --ranks 4"),
        ("--ranks 4 --resume runs/nowhere", "paceline train job.py --ranks 4 --resume"),
        ("--resume job.py --ranks 4", "paceline train job.py --ranks 4 --resume"),
    ],
)  # fmt: skip
def test_the_line_has_the_job(run: Path, typed: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *shlex.split(typed)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: train needs the job") and told.endswith(f"  to do: {line}\n"), told


def test_so_has_the_line_for_a_verb_that_resumes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("resume", "restart"):
        assert main([verb, str(run)]) == 2
        line = f"paceline train 'my digits.py' --run-dir {run} --ranks 2{DEVICE} --layout fsdp --train.steps 9"
        assert capsys.readouterr().err.endswith(f"  to do: {line}\n")
    assert main(["resume", str(run), "--ranks", "4"]) == 2
    assert f"to do: paceline train 'my digits.py' --resume {run} --ranks 4\n" in capsys.readouterr().err


def test_a_job_that_is_missing_without_a_run_is_said_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--ranks", "2"]) == 2
    assert "Missing" in capsys.readouterr().err
