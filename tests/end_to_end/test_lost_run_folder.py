"""A run folder that is moved or removed during a training: the screen says so within seconds, and nothing restarts."""

import os
import shutil
import signal

import pytest

from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.run_processes import children, starter_of
from tests.end_to_end.test_interrupted_runs import wait_for


@pytest.mark.cold
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_lost_run_folder_is_reported_at_once_and_ends_the_restarts(shop: Shop, how: str) -> None:
    shop.write("job.py", SMALL_JOB)
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000", "--checkpoint.every", "20",
        "--checkpoint.memory_every", "0", "--log.every", "1", "--watch.to", "console", environ={"PAUSE": "0.05"},
    )  # fmt: skip
    wait_for(shop.path / "run" / "logs" / "attempt-1" / "rank-0.log", "saved step-00000020")
    if how == "moved":
        (shop.path / "run").rename(shop.path / "elsewhere")
    else:
        shutil.rmtree(shop.path / "run")
    assert process.stderr is not None and process.stdout is not None
    warning = process.stderr.readline()
    assert warning.startswith("warning: the run folder run was moved or removed. The training continues, but nothing")
    lines = iter(process.stdout.readline, "")
    assert any("a checkpoint could not be saved" in line for line in lines), "the log is still shown"
    (forkserver,) = children(process.pid)
    os.kill(children(starter_of(forkserver))[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "killed by SIGKILL" in err, err
    assert "Not restarted: the run folder was moved or removed." in err
    assert not (shop.path / "run").exists()
