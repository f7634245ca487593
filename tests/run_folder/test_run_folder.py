"""Which folder is a run, which run is the newest, and the message for a name that is none."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.common import start_folder as running
from paceline.commands.common.start_folder import create_run_folder
from paceline.commands.report import report
from paceline.config.task import Task
from paceline.errors import UsageError
from paceline.filesystem.atomic_files import write_json
from paceline.launch.failures.failure_record import missing_log_failure
from paceline.run_folder.run_folder import (
    RunFolder,
    find_run,
    new_run,
    newest_run,
    newest_saved_run,
    number_run,
    read_task,
)


def begin(root: Path, name: str, run_id: str) -> Path:
    path = new_run(name, root=root, run_id=run_id).path
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "latest").write_text("step-00000001\n")
    return path


def test_the_newest_run_is_the_one_that_began_last_whatever_the_clock_said(tmp_path: Path) -> None:
    old = tmp_path / "job" / "20300101-000000-aaaa"  # from before runs had numbers
    (old / "checkpoints").mkdir(parents=True)
    (old / "checkpoints" / "latest").touch()
    begin(tmp_path, "job", "20261125-120000-bbbb")
    last = begin(tmp_path, "job", "20261124-120000-cccc")
    for found in (newest_saved_run("job", root=tmp_path), newest_run("job", root=tmp_path), newest_run(root=tmp_path)):
        assert found is not None and found.path == last
    named = tmp_path / "named"
    (named / "logs").mkdir(parents=True)
    number_run(named, root=tmp_path)
    os.utime(named, (0, 0))
    assert find_run(None, root=tmp_path)[0].path == named
    number_run(last, root=tmp_path)  # that it is gone on with makes it no newer
    assert find_run(None, root=tmp_path)[0].path == named


def test_a_run_that_was_named_is_one_of_its_job(tmp_path: Path) -> None:
    """So `train --resume` and `why` choose the same run, if the newest one has a checkpoint."""
    begin(tmp_path, "job", "20261125-120000-bbbb")
    for name, job in (("branch", "job.py"), ("other", "another.py"), ("unknown", "")):
        named = tmp_path / name
        (named / "checkpoints").mkdir(parents=True)
        (named / "checkpoints" / "latest").write_text("step-00000001\n")
        number_run(named, root=tmp_path)
        if job:
            write_json(RunFolder(named).task, Task(verb="train", job=job).as_json())
    found = newest_saved_run("job", root=tmp_path)
    assert found is not None and found.path == tmp_path / "branch"


def test_a_jobs_name_is_no_pattern(tmp_path: Path) -> None:
    for name in ("job1", "jobx", "job"):
        begin(tmp_path, name, "20261125-120000-bbbb")
    for name in ("job[1]", "job*", "job?", "**"):
        assert newest_saved_run(name, root=tmp_path) is None and newest_run(name, root=tmp_path) is None
        assert newest_saved_run(name, root=tmp_path) is None
        own = begin(tmp_path, name, "20261125-120000-dddd")
        found = newest_saved_run(name, root=tmp_path)
        assert found is not None and found.path == own


def test_a_verb_that_keeps_its_answer_in_a_folder_made_no_run_to_go_on_with(tmp_path: Path) -> None:
    verified = new_run("job", root=tmp_path, run_id="20261125-130000-eeee")
    verified.logs.mkdir()
    assert newest_saved_run("job", root=tmp_path) is None
    begun = new_run("job", root=tmp_path, run_id="20261125-120000-ffff")
    write_json(begun.task, Task(verb="train", job="job.py").as_json())
    found = newest_saved_run("job", root=tmp_path)
    assert found is not None and found.path == begun.path


@pytest.mark.parametrize("name", ["step-by-step", "step-00000001", "step-1"])
def test_a_run_may_be_called_like_a_step(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    (run / "logs").mkdir(parents=True)
    assert find_run(str(run)) == (RunFolder(run), None)
    step = run / "checkpoints" / "step-00000007"
    step.mkdir(parents=True)
    assert find_run(str(step)) == (RunFolder(run), step)  # damaged, as its manifest is missing, but a step


def test_a_name_that_is_none_gets_the_one_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = begin(Path("runs"), "digits", "20261125-120000-bbbb")
    begin(Path("runs"), "digits", "20251125-120000-aaaa")
    (tmp_path / "baseline" / "logs").mkdir(parents=True)
    for typed, meant in (
        ("runs/digits/20261125-120000-bbbc", str(run)),
        ("20261125-120000-bbbb", str(run)),
        ("basline", "baseline"),
        ("./basline/", "baseline"),
    ):
        with pytest.raises(UsageError, match="there is no run") as found:
            find_run(typed)
        assert found.value.cause == f"did you mean {meant}?", typed
    with pytest.raises(UsageError) as found:
        find_run("digits")
    assert found.value.hint == "runs/digits/20251125-120000-aaaa"  # the one that began last
    for empty in ("", "  "):
        with pytest.raises(UsageError, match="the name of the run is empty: is a variable unset"):
            find_run(empty)
    with pytest.raises(UsageError, match="/dev/null is not a folder, but a run must be one"):
        find_run("/dev/null")


def test_a_missing_run_shows_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as found:
        find_run("runs/nowhere")
    assert found.value.hint == f"cd to the folder in which you train; there are no runs in {tmp_path}/runs"
    (tmp_path / "runs/first/logs").mkdir(parents=True)
    (tmp_path / "runs/job/20261125-120000-bbbb/submit").mkdir(parents=True)
    for reference in ("runs/nowhere", " "):
        with pytest.raises(UsageError) as found:
            find_run(reference)
        assert found.value.hint == "it is one of: runs/first"
    for name in ("20261125-120000-aaaa", "20261125-120000-bbbb", "20261125-120000-cccc"):
        (tmp_path / "runs/job" / name / "logs").mkdir(parents=True)
    with pytest.raises(UsageError) as found:
        find_run("runs/nowhere")
    assert found.value.hint.startswith("it is one of: runs/") and found.value.hint.endswith(" and 1 more")
    assert found.value.hint.count("runs/") == 3


BAD: list[Any] = [
    None, [], 7, "x", {}, {"zzz": 1}, {"verb": "train"}, {"verb": "train", "job": 3},
    {"verb": "train", "job": "job.py", "ranks": "x"}, {"verb": "train", "job": "job.py", "settings": []},
    {"verb": "train", "job": "job.py", "layout": None},
]  # fmt: skip


def test_a_damaged_task_is_refused_in_words(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(UsageError, match="does not record its job"):
        read_task(run)
    for content in ("", "{", "[" * 100_000, "\x00", *map(json.dumps, BAD)):
        run.task.write_text(content)
        with pytest.raises(UsageError, match="differs from what was written"):
            read_task(run)
    run.task.unlink()
    os.mkfifo(run.task)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_task(run)
    run.task.unlink()
    task = Task(verb="train", job="job.py", settings={"job.lr": "1"}, allow=("seed",), resume=None)
    write_json(run.task, task.as_json(), private=True)
    assert read_task(run) == task and run.task.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["/", "~", "..", "above"])
def test_a_run_does_not_lie_among_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home" / "work")
    named = {"~": tmp_path / "home", "above": tmp_path}.get(place, Path(place))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="the run's files would mix with everything else there"):
        create_run_folder(named)
    assert sorted(tmp_path.rglob("*")) == before
    create_run_folder(Path())
    create_run_folder(tmp_path / "home" / "runs" / "a")


def test_a_user_without_a_home_folder_has_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bare user id in a container, which no line of /etc/passwd names."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    create_run_folder(tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/run can't be written"):
        create_run_folder(tmp_path / "file" / "run")


def test_a_page_goes_where_it_may_be_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "report.html").mkdir()  # as good as a disk that may only be read
    with pytest.raises(UsageError) as found:
        report(str(run))
    assert found.value.hint == "--page FILE writes it elsewhere"
    assert report(str(run), page=tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in run.iterdir()) == ["logs", "report.html"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_run_folder_of_before_that_can_not_be_written_now_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It was made by an earlier run, and has its number already: nothing else would be written until ranks are there."""

    def refuse(dir: Path) -> None:
        raise OSError(number, os.strerror(number))

    running.create_run_folder(tmp_path / "run")
    monkeypatch.setattr(running, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match=f"the run folder .*run can't be written: {os.strerror(number)}"):
        running.create_run_folder(tmp_path / "run")


def test_a_rank_that_could_not_make_its_log_has_the_disk_s_reason(tmp_path: Path) -> None:
    """A folder that was removed, or a disk without inodes, where nothing that the rank says is written anywhere."""
    found = missing_log_failure(1, log=tmp_path / "gone" / "rank-1.log")
    assert found is not None
    assert (found.rank, found.exit_code) == (1, 3)
    assert "the log rank-1.log can't be created: No such file" in found.screen and "moved or removed" in found.screen
    assert missing_log_failure(1, log=tmp_path / "rank-1.log") is None
    assert not (tmp_path / "rank-1.log").exists()  # nothing of ours in the place of the rank's
    (tmp_path / "rank-1.log").write_text("said")
    assert missing_log_failure(1, log=tmp_path / "rank-1.log") is None
    assert (tmp_path / "rank-1.log").read_text() == "said"
