"""A run folder holds one run at a time, whoever started it and however it ended."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.config.task import Task
from paceline.errors import UsageError
from paceline.filesystem import run_lock as module
from paceline.filesystem.run_lock import LOCK, lock_run_folder
from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.test_interrupted_runs import wait_for
from tests.trainer.test_edge_cases_of_a_run import job, rows, trained

LONG = (
    "--train.steps", "100000", "--checkpoint.every", "100000", "--eval.every", "100000",
    "--train.on_nonfinite", "skip", "--watch.to", "console,jsonl",
)  # fmt: skip
OWN_LOOP = """
import paceline as pl
from job import make_job
try:
    with pl.Run(make_job(), ranks=1, run_dir="run") as run:
        raise SystemExit("it began")
except pl.PacelineError as error:
    raise SystemExit(f"refused: {error}")
"""


@pytest.mark.soak
def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(shop: Shop) -> None:
    shop.write("own.py", OWN_LOOP)
    first = shop.start("train", "job.py", "--ranks", "2", "--run-dir", "run", *LONG)
    try:
        log = shop.path / "run" / "logs" / "attempt-1" / "rank-0.log"
        wait_for(log, "step 20 ")
        told = f"run is in use: process {first.pid} on "
        ended = shop.train("run")
        assert ended.code == 2 and told in ended.err and "--run-dir" in ended.err, ended.text
        assert "starting" not in ended.out and not (shop.path / "run" / "logs" / "attempt-2").exists()

        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29513"]
        for command in (
            [*torchrun, "-m", "paceline", "train", "job.py", "--run-dir", "run"],
            [sys.executable, "own.py"],
        ):
            ended = shop.call(command, timeout=90)
            assert ended.code and told in ended.err, ended.text

        assert shop.run("report", "run").code == 0  # who only reads needs no lock
        before = log.read_text().count("step ")
        time.sleep(0.5)
        assert log.read_text().count("step ") > before
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=30)
    assert first.returncode == 75


def test_a_killed_launcher_leaves_no_lock(shop: Shop) -> None:
    first = shop.start("train", "job.py", "--ranks", "2", "--run-dir", "run", *LONG, "--data.workers", "1")
    try:
        wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    finally:
        first.kill()
        first.communicate(timeout=30)
    assert (shop.path / "run" / LOCK).read_text()  # it could not say good-bye
    ended = shop.train("run", steps=3)
    assert ended.code == 0, ended.text
    assert not (shop.path / "run" / LOCK).read_text()


HOLDER = """
import os, sys, time
from pathlib import Path
from paceline.filesystem.run_lock import lock_run_folder
held = lock_run_folder(Path(sys.argv[1]), on_wait=print)
if os.fork() == 0:
    print("child", flush=True)
    time.sleep(1.5)
    Path(sys.argv[1], "written").touch()
    os._exit(0)
time.sleep(60)
"""


def test_who_comes_after_a_killed_launcher_waits_for_its_workers(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "child\n"
    with pytest.raises(UsageError, match=f"process {launcher.pid} on "):
        lock_run_folder(tmp_path, on_wait=print)
    launcher.kill()
    launcher.wait()
    told: list[str] = []
    held = lock_run_folder(tmp_path, on_wait=told.append)
    assert (tmp_path / "written").exists() and len(told) == 1
    held.close()
    launcher.stdout.close()


def test_a_worker_that_does_not_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.2)
    held = lock_run_folder(tmp_path, on_wait=print)
    holder = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**holder, "born": "0"}))  # the number was given to another process since
    with pytest.raises(UsageError, match="in use") as refused:
        lock_run_folder(tmp_path, on_wait=print)
    assert "launcher has ended" in refused.value.cause and "fuser" in refused.value.hint
    held.close()


def test_a_disk_without_locks_still_tells_a_second_run_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", flock)
    held = lock_run_folder(tmp_path, on_wait=print)
    with pytest.raises(UsageError, match=f"process {os.getpid()} on "):
        lock_run_folder(tmp_path, on_wait=print)
    held.close()
    lock_run_folder(tmp_path, on_wait=print).close()


def test_a_disk_without_locks_still_tells_a_second_run_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its process is alive can't be seen from here, so it counts as alive."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", flock)
    (tmp_path / LOCK).write_text(json.dumps({**module.this_process(), "host": "another-machine", "machine": "?"}))
    assert module.is_run_folder_locked(tmp_path)
    with pytest.raises(UsageError, match=f"process {os.getpid()} on another-machine "):
        lock_run_folder(tmp_path, on_wait=pytest.fail)


def test_a_host_name_of_its_own_does_not_make_another_machine(tmp_path: Path) -> None:
    """A played node has one; its process is seen from here, and so is its end."""
    played = {**module.this_process(), "host": "node0"}
    assert module.is_on_this_machine(played) and module.is_holder_alive(played)
    gone = {**played, "born": "1"}
    (tmp_path / LOCK).write_text(json.dumps(gone))
    assert not module.is_holder_alive(gone) and not module.is_run_folder_locked(tmp_path)


def test_a_run_that_ended_while_the_folder_was_waited_for_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def other_ends_first(path: Path, **more: Any) -> Any:
        monkeypatch.setattr("paceline.trainer.setup.prepare.lock_run_folder", lock_run_folder)
        trained(job(), folder, train_steps=3)
        return lock_run_folder(path, **more)

    monkeypatch.setattr("paceline.trainer.setup.prepare.lock_run_folder", other_ends_first)
    trained(job(), folder, train_steps=5, log_every=1)
    assert [row["step"] for row in rows(folder) if "loss" in row] == [1, 3, 4, 5]


def test_so_does_a_rank_that_the_command_started(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shop.train("run", ranks=1, steps=4).code == 0
    monkeypatch.chdir(shop.path)
    settings = {"train.steps": 6, "log.every": 1, "watch.to": ["jsonl"]}
    task = Task(verb="train", job="job.py", run="run", layout="single", ranks=1, device="cpu", settings=settings)
    with pl.Run.worker(task) as run:
        steps = [run.step(batch).step for batch in run.batches()]
    assert steps == [5, 6]


@pytest.mark.soak
def test_a_job_that_goes_to_another_folder_leaves_its_run_where_it_was_asked_for(shop: Shop) -> None:
    away = shop.path / "away"
    away.mkdir()
    shop.write("job.py", f"import os\nos.chdir({str(away)!r})\n" + SMALL_JOB)
    for steps in (2, 4):
        assert shop.train("run", steps=steps).code == 0
    run = shop.path / "run"
    saved = [json.loads((run / name).read_text()) for name in ("weights.json", "task.json")]
    assert saved[0]["step"] == 4 and Path(saved[1]["job"]).is_file()
    first = run / "checkpoints" / "step-00000002"
    words = (
        "train",
        "job.py",
        "--resume",
        f"run/checkpoints/{first.name}",
        "--run-dir",
        "branch",
        "--train.steps",
        "3",
    )
    for verb in (("evaluate", "run"), ("verify", "job.py", "--run-dir", "proved", "--ranks", "2"), words):
        ended = shop.run(*verb)
        assert ended.code == 0, ended.text
    assert (shop.path / "branch" / "weights.json").exists() and (run / "answer-evaluate.json").exists()
    assert list(away.iterdir()) == []
