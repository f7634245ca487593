"""The loop in the user's hands: left and begun again, it goes on where the run stands; each batch is stepped once."""

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline.errors import NonFiniteError, UsageError
from tests.conftest import Shop
from tests.parity.test_found import job, rows

SETTINGS = {"train.steps": 7, "watch.to": ("jsonl",), "log.every": 1}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(20):
            yield torch.randn(4, generator=generator), torch.randint(0, 2, (), generator=generator)


def run_in(folder: Path, *, workers: int = 0, **more: Any) -> pl.Run:
    return pl.Run(job(**more), ranks=1, run_dir=folder, settings={**SETTINGS, "data.workers": workers})


def finish(run: pl.Run) -> None:
    for batch in run.batches():
        run.step(batch)


def ended(run: pl.Run) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def test_a_run_in_a_thread_trains_as_any_other(tmp_path: Path) -> None:
    """A notebook or a server runs it so; Python hears signals in the main thread only."""
    found: list[dict[str, Tensor]] = []

    def train(folder: Path) -> None:
        with run_in(folder) as run:
            finish(run)
            found.append(ended(run))

    train(tmp_path / "main")
    thread = threading.Thread(target=train, args=(tmp_path / "thread",))
    thread.start()
    thread.join()
    assert len(found) == 2 and all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_weights_of_a_step_that_is_known_late_to_be_not_finite_are_never_saved(tmp_path: Path) -> None:
    """On a GPU a step's numbers are looked at a step later; before a save there is no later."""
    agreed: Any = SimpleNamespace(counts={"loss": 4.0})
    bad: Any = SimpleNamespace(finite=False, step=1, loss=float("nan"), agreed=agreed)
    with pytest.raises(NonFiniteError, match="step 1: loss is nan"), run_in(tmp_path / "run") as run:
        run.step(next(run.batches()))
        run._live.built.step.late.hear(bad)
        run.save()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


DATA = {"indexed": {}, "stream": {"train_data": Stream()}}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", DATA)
def test_a_loop_that_is_left_and_begun_again_is_the_undisturbed_run(tmp_path: Path, kind: str, workers: int) -> None:
    with run_in(tmp_path / "whole", **DATA[kind]) as run:
        for batch in run.batches():
            run.step(batch)
        whole = ended(run)
    seen = []
    with run_in(tmp_path / "cut", workers=workers, **DATA[kind]) as run:
        for stop in (2, 3, 5):
            for batch in run.batches():
                if run.step(batch).step == stop:
                    break
            run.evaluate()
        next(run.batches())  # taken and not stepped: the next loop begins with it
        for batch in run.batches():
            seen.append(run.step(batch).step)
        assert list(run.batches()) == []
        cut = ended(run)
    assert seen == [6, 7]
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    told = {row["step"]: row["loss"] for row in rows(tmp_path / "cut") if "loss" in row}
    assert told == {row["step"]: row["loss"] for row in rows(tmp_path / "whole") if "loss" in row}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("given", ["job.py", None, job], ids=["a file", "nothing", "a function"])
def test_what_is_no_job_is_refused_by_name(given: Any) -> None:
    with pytest.raises(pl.JobError, match=f"{type(given).__name__}, expected a pl.Job"):
        pl.Run(given)


def test_two_loops_at_once_are_refused_and_leave_no_data_worker(tmp_path: Path) -> None:
    with run_in(tmp_path, workers=1) as run:
        first, second = run.batches(), run.batches()
        run.step(next(first))
        assert run.step(next(second)).step == 2
        with pytest.raises(UsageError, match="another one was begun since"):
            next(first)
        assert run.step(next(second)).step == 3
        finish(run)
    assert not multiprocessing.active_children()


def test_data_workers_that_are_started_again_leave_none_of_the_first(tmp_path: Path) -> None:
    with run_in(tmp_path, workers=1) as run:
        feed = run._live.loop.feed
        first, second = iter(feed), iter(feed)
        next(first), next(second)
        assert len(multiprocessing.active_children()) == 1
        finish(run)
    assert not multiprocessing.active_children()


def test_a_batch_is_stepped_once(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        for batch in run.batches():
            result = run.step(batch)
            with pytest.raises(UsageError, match="this batch was stepped already: it is step"):
                run.step(batch)
        assert result.step == run._live.loop.cursor.step == 7


def test_a_batch_is_not_skipped(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        taken = run.batches()
        run.step(next(taken))
        skipped = next(taken)
        with pytest.raises(UsageError, match="the batch of step 2 was taken") as refused:
            next(taken)
        assert "continue" in refused.value.cause
        again = next(iter(run.batches()))
        assert again is skipped and run.step(again).step == 2
        finish(run)


OWN = """
import sys
from job import make_job
import paceline as pl
settings = {"train.steps": 9, "data.workers": 1, "watch.to": ["jsonl"], "train.micro_batch_size": 5}
if __name__ == "__main__":
    with pl.Run(make_job(dropout=0.2), ranks=2, run_dir=sys.argv[1], settings=settings) as run:
        for stop in map(int, sys.argv[2:]):
            for batch in run.batches():
                if run.step(batch).step == stop:
                    break
"""


@pytest.mark.soak
def test_on_two_ranks_as_well(shop: Shop) -> None:
    shop.write("own.py", OWN)
    for name, stops in (("whole", ["9"]), ("cut", ["2", "6", "9"])):
        command = [sys.executable, "-W", "ignore", "own.py", name, *stops]
        done = subprocess.run(
            command, cwd=shop.path, env=shop.environ(), capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert shop.digest("cut") == shop.digest("whole")


SHOWN = """
from job import make_job
import paceline as pl
if __name__ == "__main__":
    settings = {"train.steps": 14, "watch.to": ["jsonl"], "train.micro_batch_size": 3}
    with pl.Run(make_job(), ranks=2, run_dir="shown", update="local,every=5", settings=settings) as run:
        for batch in run.batches():
            result = run.step(batch)
            if run.rank == 0 and result.step % 3 == 0:
                print("heard", result.step, result.loss, flush=True)
"""


@pytest.mark.soak
def test_one_rank_alone_may_read_what_came_of_a_step_that_sites_tell_late(shop: Shop) -> None:
    shop.write("shown.py", SHOWN)
    done = shop.call([sys.executable, "-W", "ignore", "shown.py"], timeout=90)
    assert done.code == 0 and done.text.count("heard ") == 4, done.text
