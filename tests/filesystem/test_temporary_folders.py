"""A run or an evaluation leaves no temporary folder, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.filesystem.temporary_folders import remove_abandoned_folders, scratch_folder
from tests.conftest import Shop

LIMIT_SECONDS = 60.0
JOB = """
import os, time, torch, paceline as pl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if END == "data" and i == 40: raise ValueError("sample 40 is odd")
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum(0, keepdim=True)

calls = 0
def loss(out, batch):
    global calls
    calls += 1
    if calls == 3 and END == "evaluation":
        raise ValueError("the metric is odd")
    if calls == 3 and END in ("SIGTERM", "SIGKILL"):
        open(f"there-{os.environ['RANK']}", "w").close()
    if calls == 3 and END == "rank" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    if calls >= 3 and END in ("SIGTERM", "SIGKILL"):
        time.sleep(0.05)
    return torch.nn.functional.mse_loss(out, batch[1])

def make_job():
    return pl.Job(model=lambda: torch.nn.Linear(4, 1), loss=loss, train_data=Data(), eval_data=Data(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01), global_batch_size=16)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command, and what it starts by itself, has its temporary files; a socket's path has 107 characters."""
    monkeypatch.delenv("PACELINE_FORKSERVER_COMMAND", raising=False)
    with tempfile.TemporaryDirectory(prefix="left-") as found:
        yield Path(found)


def left(place: Path) -> list[str]:
    """Ours, and multiprocessing's; torch keeps a cache of its own there."""
    return sorted(path.name for path in place.glob("*") if path.name.startswith(("paceline-", "pymp-")))


def is_empty_in_time(place: Path) -> bool:
    """What removes a folder after a kill may be the last one to end."""
    until = time.monotonic() + LIMIT_SECONDS
    while left(place) and time.monotonic() < until:
        time.sleep(0.05)
    return not left(place)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("done", marks=pytest.mark.soak),
        pytest.param("data", marks=pytest.mark.soak),
        "rank",
        pytest.param("SIGTERM", marks=pytest.mark.soak),
        "SIGKILL",
    ],
)
def test_a_run_with_data_workers_leaves_nothing(shop: Shop, place: Path, end: str) -> None:
    shop.write("job.py", f"END = {end!r}\n" + JOB)
    words = ["train", "job.py", "--ranks", "2", "--data.workers", "2", "--run-dir", "run", "--train.steps"]
    if end not in ("SIGTERM", "SIGKILL"):
        ended = shop.run(*words, "6", environ={"TMPDIR": str(place)})
        assert ended.code == (0 if end == "done" else 1), ended.text
    else:
        process = shop.start(*words, "2000", environ={"TMPDIR": str(place)})
        until = time.monotonic() + LIMIT_SECONDS
        while not all((shop.path / f"there-{rank}").exists() for rank in range(2)) and time.monotonic() < until:
            time.sleep(0.05)
        assert [name[:5] for name in left(place)] == ["pymp-"], "all ranks and data workers share one"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 7, "what starts the ranks, two ranks, and two data workers of each"
        process.send_signal(getattr(signal, end))
        process.communicate(timeout=LIMIT_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=LIMIT_SECONDS)
        assert not alive, "a data worker ends with its rank"
    assert is_empty_in_time(place), left(place)


@pytest.mark.soak
def test_an_evaluation_keeps_its_logs_only_where_a_rank_failed(shop: Shop, place: Path) -> None:
    shop.write("job.py", "END = 'done'\n" + JOB)
    assert shop.train("run", ranks=1).code == 0
    there = {"TMPDIR": str(place)}
    assert shop.run("evaluate", "run", environ=there).code == 0 and is_empty_in_time(place)
    assert shop.run("evaluate", "run", "--split", "odd", environ=there).code == 2 and is_empty_in_time(place)
    shop.write("job.py", "END = 'evaluation'\n" + JOB)
    ended = shop.run("evaluate", "run", environ=there)
    assert ended.code == 1 and len(left(place)) == 1 and left(place)[0] in ended.err, ended.text


def test_a_scratch_folder_goes_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once as a rule; where the process was killed, with the next one. Others' folders that are in use stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyError), scratch_folder("trial") as folder:
        assert folder.path.is_dir() and folder.path.name.startswith("paceline-trial-")
        raise KeyError
    assert not left(tmp_path)
    killed = "import os; from paceline.filesystem.temporary_folders import *\nwith scratch_folder('trial'): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(left(tmp_path)) == 1
    with scratch_folder("trial") as mine:
        assert left(tmp_path) == [mine.path.name], "what was abandoned has gone"
        remove_abandoned_folders("paceline-trial-")
        assert left(tmp_path) == [mine.path.name], "it is held"


def test_commands_side_by_side_leave_each_other_their_folders(tmp_path: Path) -> None:
    loop = """
from paceline.filesystem.temporary_folders import scratch_folder
for _ in range(300):
    with scratch_folder("trial") as folder:
        assert folder.path.is_dir()
"""
    command = [sys.executable, "-c", loop]
    started = [subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_only_being_made_is_left_alone_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = tmp_path / ".paceline-trial-1"
    made.mkdir()
    (made / ".scratch").touch()
    remove_abandoned_folders("paceline-trial-")
    assert made.is_dir()
    os.utime(made, (0, 0))
    remove_abandoned_folders("paceline-trial-")
    assert not made.exists()


def test_a_kept_folder_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("trial") as folder:
        folder.keep()
    (tmp_path / "paceline-trial-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    remove_abandoned_folders("paceline-trial-")
    assert folder.path.is_dir()
    os.utime(folder.path, (0, 0))
    remove_abandoned_folders("paceline-trial-")
    assert left(tmp_path) == ["paceline-trial-link"] and (tmp_path / "other").is_dir()
