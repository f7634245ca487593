"""A run in the user's process leaves signals and threads as a plain script would, and the next run starts clean."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from tests.conftest import Shop
from tests.trainer.test_edge_cases_of_a_run import job


def trained(folder: Path, act: Any = None, **settings: Any) -> int:
    """The step that a run of six comes to; `act` is called after its third."""
    given = {"train.steps": 6, "watch.to": ("jsonl",), **settings}
    step = 0
    with pl.Run(job(), ranks=1, run_dir=folder, settings=given) as run:
        for batch in run.batches():
            step = run.step(batch).step
            if step == 3 and act is not None:
                act()
    return step


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise ValueError("a mistake in the cell")


@pytest.mark.parametrize(("act", "raised"), [(interrupt, SystemExit), (fail, ValueError)])
def test_after_a_run_that_was_left_the_next_one_begins_afresh(tmp_path: Path, act: Any, raised: type) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)}
    threads = torch.get_num_threads()
    with pytest.raises(raised):
        trained(tmp_path / "first", act)
    assert {number: signal.getsignal(number) for number in before} == before
    assert trained(tmp_path / "second") == 6
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert torch.get_num_threads() == threads


def test_a_run_in_this_process_has_the_threads_that_its_settings_ask_for(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    for asked in (1, 3):
        for made, settings in ((job(), {"train.threads": asked}), (job(settings={"train.threads": asked}), {})):
            with pl.Run(made, ranks=1, run_dir=tmp_path / f"{asked}-{len(settings)}", settings=settings):
                assert torch.get_num_threads() == asked
            assert torch.get_num_threads() == before


def test_a_run_that_does_not_begin_leaves_the_signals_too(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made = job(model=lambda: fail())
    with pytest.raises(ValueError, match="a mistake"), pl.Run(made, ranks=1, run_dir=tmp_path):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_is_heard_though_the_job_listens_itself(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def listen() -> None:
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def act(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    steps: list[int] = []
    settings = {"train.steps": 60, "watch.to": ("jsonl",)}
    try:
        with pytest.raises(SystemExit), pl.Run(job(), ranks=1, run_dir=tmp_path, settings=settings) as run:
            listen()
            for batch in run.batches():
                act(len(steps))
                steps.append(run.step(batch).step)
        assert heard == [signal.SIGTERM] and steps == [1, 2, 3, 4]
        assert signal.getsignal(signal.SIGTERM) is not before  # it is the job's again
    finally:
        signal.signal(signal.SIGTERM, before)


CHILD = """
import os, sys
import paceline as pl
from job import make_job
if __name__ == "__main__":
    with pl.Run(make_job(), ranks=1, run_dir="inner", settings={"train.steps": 2}) as run:
        for batch in run.batches():
            run.step(batch)
        print("inner", run.rank, run.folder.name)
"""
STARTS = """
from job import *
import dataclasses, subprocess, sys, multiprocessing
def inner():
    with pl.Run(plain(), ranks=1, run_dir="forked", settings={"train.steps": 2, "watch.to": ("jsonl",)}) as run:
        for batch in run.batches():
            run.step(batch)
plain = make_job
def started(run):
    if run.rank == 0:
        done = subprocess.run([sys.executable, "child.py"], capture_output=True, text=True)
        assert done.returncode == 0 and "inner 0 inner" in done.stdout, done.stdout + done.stderr
        child = multiprocessing.get_context("fork").Process(target=inner)
        child.start()
        child.join(60)
        assert child.exitcode == 0, child.exitcode
    return {}
def make_job():
    return dataclasses.replace(plain(), on_eval=started)
"""


def test_what_a_rank_starts_is_a_run_of_its_own(shop: Shop) -> None:
    shop.write("child.py", CHILD)
    shop.write("outer.py", STARTS)
    ended = shop.run(
        "train", "outer.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "3", "--watch.to", "jsonl"
    )
    assert ended.code == 0, ended.text
    for name in ("run", "inner", "forked"):
        assert (shop.path / name / "weights.json").exists()
