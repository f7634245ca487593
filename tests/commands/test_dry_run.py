"""`--dry-run` refuses what a start refuses before it imports the job, creates nothing, and says what would start."""

import json
import subprocess
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.commands.common.start_folder import create_run_folder
from tests.conftest import Shop, no_process

REFUSED = {
    "an unwritable run folder": (("--run-dir", "/proc/x"), "the run folder /proc/x can't be written: "),
    "a run folder in a file": (("--run-dir", "job.py/run"), "the run folder job.py/run can't be written: "),
    "a run folder above this one": (("--run-dir", ".."), "the run's files would mix with everything else there"),
    "a run that does not exist": (("--resume", "runs/nope"), "there is no run runs/nope."),
    "no run to resume": (("--resume",), "there is no run of job to resume"),
    "too few ranks left": (("--survive.min_ranks", "2"), "survive.min_ranks is 2, but the run has 2 ranks."),
    "no smaller layout": (("--layout", "dp=2", "--survive.min_ranks", "1"), "--layout dp_replicate=2 fits no smaller"),
    "a sink that no package has": (("--watch.to", "console,nosuch:Thing"), "no module named 'nosuch'"),
}


@pytest.fixture
def here(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shop.path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "Popen", no_process)
    return shop.path


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_start_refuses_a_dry_run_refuses_too(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    before = _files(here)
    assert main(["train", "job.py", "--ranks", "2", *words, "--dry-run"]) == 2
    assert expected in capsys.readouterr().err
    assert _files(here) == before


@pytest.mark.parametrize(
    "verb", [("verify",), ("plan", "--cluster", "here"), ("compare", "--layouts", "single", "ddp")]
)
def test_so_do_the_other_verbs(here: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb[0], "job.py", *verb[1:], "--ranks", "2", "--run-dir", "/proc/x", "--dry-run"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: the run folder /proc/x") and "can't be written: " in text


def test_all_problems_of_a_start_are_named_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--resume", "runs/nope", "--watch.to", "nosuch:Thing", "--dry-run"]) == 2
    text = capsys.readouterr().err
    assert "1. there is no run runs/nope." in text and "2. 'nosuch:Thing': no module named 'nosuch'." in text


def test_the_first_line_says_what_would_start(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _files(here)
    assert main(["train", "job.py", "--ranks", "2", "--run-dir", "runs/a", "--dry-run"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "would be accepted: ddp on 2 ranks, run folder runs/a"
    assert "layout: ddp" in rest
    assert main(["train", "job.py", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would be accepted: single on 1 rank, a new run folder in runs/job\n")
    assert main(["train", "job.py", "--layout", "auto", "--ranks", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would be accepted: auto on 2 ranks, a new run folder in runs/job\n")
    assert main(["verify", "job.py", "--ranks", "2", "--run-dir", "runs/b", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would be accepted: ddp on 2 ranks, run folder runs/b\n"
    assert main(["plan", "job.py", "--cluster", "8xH100-80G", "--run-dir", "runs/b", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would be accepted: plan, run folder runs/b\n"
    assert main(["train", "job.py", "--ranks", "2", "--run-dir", "runs/a", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "runs/a"
    assert _files(here) == before
    create_run_folder(here / "runs" / "a")
    assert main(["train", "job.py", "--ranks", "2", "--run-dir", "runs/a", "--dry-run"]) == 0


def test_what_is_printed_of_a_start_is_what_was_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--layout", "fsdp", "--train.steps", "9", "--job.lr", "0.1", "--dry-run")
    assert main(["train", "job.py", "--nodes", "2", *words]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "would be accepted: fsdp on 2 ranks, a new run folder in runs/job",
        "job: job.py",
        "nodes: 2",
        "ranks: 2",
        "device: cpu",
        "layout: fsdp",
        "train.steps: 9",
        "job.lr: 0.1",
    ]
    assert not told.err
    assert main(["train", "job.py", "--nodes", "2:host1", *words]) == 0
    assert "nodes: 2:host1\n" in capsys.readouterr().out
    assert main(["train", "job.py", "--nodes", "2", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == "2"
    (here / "secret.py").write_text("import paceline as pl\ndef make_job(api_key: str = '') -> pl.Job: ...\n")
    assert main(["train", "secret.py", "--job.api_key", "abc123", "--dry-run"]) == 0
    told_of_secret = capsys.readouterr().out
    assert "job.api_key: " in told_of_secret and "abc123" not in told_of_secret


@pytest.mark.parametrize("place", ["mysink.py", "mysink/__init__.py", "jobs/mysink.py"])
def test_a_sink_in_this_folder_or_the_jobs_folder_is_accepted(here: Path, place: str) -> None:
    """A rank has both folders on its path; nothing of them is imported here."""
    file = here / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('imported')\n")
    (here / "jobs").mkdir(exist_ok=True)
    (here / "jobs" / "job.py").write_text((here / "job.py").read_text())
    assert main(["train", "jobs/job.py", "--watch.to", "console,mysink:Thing", "--dry-run"]) == 0
