"""A run resumes from an older checkpoint, in its own folder or another, or starts where nothing was saved."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, list_checkpoints, mark_best, resolve_mark
from paceline.checkpoint.files.superseded_checkpoints import move_superseded
from paceline.filesystem.atomic_files import write_json
from paceline.run_folder.run_folder import RunFolder, find_run, new_run, newest_saved_run, run_of_checkpoint
from tests.checkpoint.test_damaged_checkpoints import STATE
from tests.checkpoint.write_checkpoint import save
from tests.conftest import Shop

WORDS = ("--checkpoint.every", "4", "--checkpoint.keep", "9", "--eval.every", "4")
CHANGED = ("--job.lr", "0.05", "--allow", "optimizer")
OLDER = "checkpoints/step-00000004"
SCRIPT = """
import sys
import paceline as pl
from job import make_job
with pl.Run(make_job(), ranks=1, resume=sys.argv[1], settings={"train.steps": 7}) as run:
    print(f"from {run.folder.parent.name} at {run._active_session.loop.cursor.step}")
    for batch in run.batches():
        run.step(batch)
"""


def steps(run: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")]


def _reached_training(shop: Shop, name: str) -> None:
    """Leave what a run leaves that ends before its first save."""
    folder = RunFolder(shop.path / "runs" / "job" / name)
    folder.logs.mkdir(parents=True)
    write_json(folder.task, {"verb": "train"})


@pytest.fixture
def begun(shop: Shop) -> Shop:
    """A run of twelve steps, saved at 4, 8 and 12."""
    ended = shop.train("run", *WORDS, ranks=1)
    assert ended.code == 0 and steps(shop.path / "run") == [4, 8, 12], ended.text
    return shop


@pytest.mark.soak
def test_what_came_after_an_older_checkpoint_is_set_aside_and_the_branch_is_gone_on_with(begun: Shop) -> None:
    shop, run = begun, begun.path / "run"
    branch = ("--resume", f"run/{OLDER}", *CHANGED, *WORDS)
    ended = shop.run("train", "job.py", "--run-dir", "fork", "--ranks", "1", "--train.steps", "11", *branch)
    assert ended.code == 0 and f"resumed: run/{OLDER}, 48 samples consumed" in ended.out, ended.text
    assert steps(run) == [4, 8, 12] and steps(shop.path / "fork") == [8, 11]
    again = shop.run("train", "job.py", "--run-dir", "fork", "--ranks", "1", "--train.steps", "11", *branch)
    assert "resumed: step-00000011" in again.out and again.code == 0, again.text

    best = (run / "checkpoints" / "best").read_text()
    ended = shop.run("train", "job.py", "--ranks", "1", "--train.steps", "6", *branch)
    aside = run / "checkpoints" / "after-step-00000004"
    assert ended.code == 0 and f"were set aside in {aside.relative_to(shop.path)}" in ended.out, ended.text
    assert steps(run) == [4, 6] and [path.name[-2:] for path in list_checkpoints(aside)] == ["08", "12"]
    assert best.startswith("step-00000012\n") and best == (aside / "best").read_text()
    ended = shop.run("train", "job.py", "--run-dir", "run", "--ranks", "1", "--train.steps", "11", *CHANGED[:2], *WORDS)
    assert ended.code == 0 and "resumed: step-00000006" in ended.out, ended.text
    assert shop.digest("run") == shop.digest("fork")

    ended = shop.run("train", "job.py", "--ranks", "1", "--resume", str(aside / "step-00000008"))
    assert (
        ended.code == 2
        and "--run-dir runs/BRANCH" in ended.err
        and run_of_checkpoint(aside / "step-00000008").path == run
    )
    ended = shop.run("evaluate", str(aside / "step-00000012"))
    assert ended.code == 0 and steps(run) == [4, 6, 8, 11], ended.text


@pytest.mark.soak
def test_a_refused_branch_leaves_every_checkpoint_where_it_was(begun: Shop) -> None:
    ended = begun.run("train", "job.py", "--ranks", "1", "--resume", f"run/{OLDER}", "--job.lr", "0.05")
    assert ended.code == 2 and "lr was" in ended.err and steps(begun.path / "run") == [4, 8, 12]
    ended = begun.run("train", "job.py", "--resume", f"run/{OLDER}", "--job.norm", "true", "--seed", "7")
    assert ended.code == 2 and "a different model" in ended.err and "seed: was 0, is 7" in ended.err, ended.err


@pytest.mark.soak
def test_checkpoints_that_are_gone_are_missed_and_a_run_that_saved_nothing_says_so(begun: Shop) -> None:
    run = begun.path / "run"
    for path in list_checkpoints(run / "checkpoints"):
        shutil.rmtree(path)
    ended = begun.train("run", *WORDS, ranks=1)
    assert ended.code == 2 and "`latest` names it, but it no longer exists" in ended.err, ended.text
    _reached_training(begun, "2-died")
    ended = begun.run("train", "job.py", "--resume", "--train.steps", "2")
    assert ended.code == 0 and "resumed: nothing had been saved, so the run starts at its first step" in ended.out
    assert "run: runs/job/2-died" in ended.out
    _reached_training(begun, "3-died")
    ended = begun.run("train", "job.py", "--resume", "--train.steps", "3")
    assert ended.code == 0 and "resumed: step-00000002" in ended.out and "run: runs/job/2-died" in ended.out, ended.text


@pytest.mark.soak
def test_a_script_branches_from_a_run_or_a_checkpoint(begun: Shop) -> None:
    begun.write("own.py", SCRIPT)
    for resume, step in (("run", 12), (f"run/{OLDER}", 4)):
        command = [sys.executable, "-W", "ignore", "own.py", resume]
        ended = begun.call(command)
        assert f"at {step}" in ended.out, ended.text
    assert steps(begun.path / "run") == [4, 7]


def test_a_best_that_came_before_an_older_checkpoint_stays_the_best(tmp_path: Path) -> None:
    paths = [save(tmp_path, step=step, files={}, state=STATE) for step in (4, 8, 12)]
    mark_best(tmp_path, paths[0])
    aside = move_superseded(tmp_path, start=paths[1])
    assert aside is not None and [path.name for path in list_checkpoints(aside)] == [paths[2].name]
    assert resolve_mark(tmp_path, BEST) == paths[0] and not (aside / BEST).exists()
    assert resolve_mark(tmp_path, LATEST) == paths[1]
    mark_best(tmp_path, paths[1])
    later = move_superseded(tmp_path, start=paths[0])
    assert later is not None and resolve_mark(later, BEST) == later / paths[1].name
    assert not (tmp_path / BEST).exists()


def test_without_a_name_what_trains_comes_before_what_was_planned_after_it(tmp_path: Path) -> None:
    for name in ("1", "2"):
        new_run("job", root=tmp_path, run_id=name)
    for trains in (False, True):
        assert find_run(None, root=tmp_path, only_trained=trains)[0].path.name == "2"
    write_json(RunFolder(tmp_path / "job" / "1").task, {})
    assert find_run(None, root=tmp_path)[0].path.name == "2"
    assert find_run(None, root=tmp_path, only_trained=True)[0].path.name == "1"


def test_a_run_in_a_folder_of_its_own_name_is_one_and_what_is_in_it_is_none(tmp_path: Path) -> None:
    for name in ("named/tb", "named/logs", "job/20200101-000000-abcd/logs"):
        (tmp_path / name).mkdir(parents=True)
    for folder in ("named", "job/20200101-000000-abcd"):
        write_json(RunFolder(tmp_path / folder).task, {})
    for trains in (False, True):
        assert find_run(None, root=tmp_path, only_trained=trains)[0].path == tmp_path / "named"
    (tmp_path / "job/29990101-000000-abcd/tb").mkdir(parents=True)
    assert find_run(None, root=tmp_path)[0].path.name == "29990101-000000-abcd"
    assert find_run(None, root=tmp_path, only_trained=True)[0].path == tmp_path / "named"


def test_the_newest_run_that_has_saved_is_gone_on_with(tmp_path: Path) -> None:
    assert newest_saved_run("job", root=tmp_path) is None
    for name in ("1", "2", "3"):
        (tmp_path / "job" / name).mkdir(parents=True)
        write_json(RunFolder(tmp_path / "job" / name).task, {"verb": "train"})
    (tmp_path / "job" / "4").mkdir()  # of a verb that does not train
    newest = newest_saved_run("job", root=tmp_path)
    assert newest is not None and newest.path.name == "3"
    save(RunFolder(tmp_path / "job" / "2").checkpoints, step=3, files={}, state=STATE)
    newest = newest_saved_run("job", root=tmp_path)
    assert newest is not None and newest.path.name == "2"
    assert json.loads((newest.checkpoints / "step-00000003" / "manifest.json").read_text())["digest"]
