"""Saves in the background: the same training and the same checkpoints as without, whatever happens during the copy."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import check_checkpoint, list_checkpoints, read_manifest
from paceline.launch.agent.forkserver_client import FORKSERVER_COMMAND
from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.run_processes import wait_until_gone
from tests.end_to_end.test_automatic_restarts import LAYOUTS, job_of_blocks, memory_folder, restarts
from tests.filesystem.test_full_disk import small_disk

__all__ = ["small_disk"]

pytestmark = pytest.mark.one_worker

# What the copy of the checkpoint of step 6 does the first time, on rank 0. The copy is the only user of os.sendfile.
HOOKED = """
import os, time
from pathlib import Path
real_sendfile, mark = os.sendfile, Path("copying").resolve()

def sendfile(out, *rest):
    target = os.readlink(f"/proc/self/fd/{out}")
    if "step-00000006" in target and not mark.exists():
        mark.touch()
        HOOK
    return real_sendfile(out, *rest)

os.sendfile = sendfile
"""
SLEEP = "time.sleep(60)"
FILL = """
        filler = open(Path(target).parents[3] / "filler", "wb", buffering=0)
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
"""
WORDS = ("--checkpoint.background", "--checkpoint.every", "3", "--eval.every", "6")


@pytest.fixture(scope="module")
def whole_digest(tmp_path_factory: pytest.TempPathFactory, mother: str) -> str:
    """The digest of a run that nothing disturbs and that saves without background."""
    shop = Shop(tmp_path_factory.mktemp("whole"))
    shop.write("job.py", SMALL_JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORKSERVER_COMMAND, mother)
        ended = shop.train("whole", *WORDS[1:])
    assert ended.code == 0, ended.text
    return shop.digest("whole")


def hooked(hook: str) -> str:
    return HOOKED.replace("HOOK", hook) + SMALL_JOB


def events(shop: Shop, run: str, kind: str) -> list[dict[str, Any]]:
    lines = (shop.path / run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def stored(checkpoint: Path) -> Any:
    """All that a checkpoint says, but for the settings and how the data was read."""
    body = read_manifest(checkpoint)
    state = {name: value for name, value in body.state.items() if name != "settings"}
    return body.step, state, body.files


def assert_nothing_is_left(shop: Shop, run: str) -> None:
    assert not memory_folder(shop, run).exists()
    assert not [path.name for path in (shop.path / run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "fsdp" else pytest.mark.soak) for n in ("ddp", "zero2", "fsdp", "pp")]
)
def test_checkpoints_are_those_of_a_run_that_waits(shop: Shop, name: str) -> None:
    ranks, words = LAYOUTS[name]
    shop.write("job.py", job_of_blocks())
    more = (*words, *WORDS[1:], "--checkpoint.keep", "2")
    waiting = shop.train("waiting", *more, ranks=ranks, steps=14)
    assert waiting.code == 0, waiting.text
    background = shop.train("background", *more, WORDS[0], "--checkpoint.memory_every", "0", ranks=ranks, steps=14)
    assert background.code == 0 and "background is off" not in background.text, background.text
    assert shop.digest("background") == shop.digest("waiting")
    pairs = [list_checkpoints(shop.path / run / "checkpoints") for run in ("waiting", "background")]
    assert [path.name for path in pairs[0]] == [path.name for path in pairs[1]]
    for before, now in zip(*pairs, strict=True):
        check_checkpoint(now)
        assert stored(now) == stored(before)
    for mark in ("best", "latest"):
        marks = [(shop.path / run / "checkpoints" / mark).read_text() for run in ("waiting", "background")]
        assert marks[0] == marks[1]
    saved = [[event["step"] for event in events(shop, run, "CheckpointSaved")] for run in ("waiting", "background")]
    assert saved[0] == saved[1] == [3, 6, 9, 12, 14]
    assert_nothing_is_left(shop, "background")


def test_a_kill_during_the_copy_restarts_from_memory(shop: Shop, whole_digest: str) -> None:
    shop.write("job.py", hooked(SLEEP))
    cut = shop.train("cut", *WORDS, "--checkpoint.memory_every", "0", "--faults", "kill rank=1 step=8")
    assert cut.code == 0 and (shop.path / "copying").exists(), cut.text
    assert [(event["source"], event["resumed_step"]) for event in restarts(shop, "cut")] == [("memory", 6)]
    assert shop.digest("cut") == whole_digest
    saved = [event["step"] for event in events(shop, "cut", "CheckpointSaved")]
    assert saved == [3, 6, 9, 12], "step 6 is evaluated again, is the best, and is then saved on disk"
    assert_nothing_is_left(shop, "cut")


@pytest.mark.cold
def test_a_kill_of_the_command_during_the_copy_leaves_the_checkpoint_before(shop: Shop, whole_digest: str) -> None:
    shop.write("job.py", hooked(SLEEP))
    mark = f"background-{time.monotonic_ns()}"
    words = ("train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "12", *WORDS)
    process = shop.start(*words, environ={"TEST_MARK": mark})
    deadline = time.monotonic() + 60
    while not (shop.path / "copying").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not wait_until_gone(mark, seconds=30)
    while memory_folder(shop, "cut").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    checkpoints = shop.path / "cut" / "checkpoints"
    assert [path.name for path in list_checkpoints(checkpoints)] == ["step-00000003"]
    assert len(list(checkpoints.glob(".saving-step-00000006-*"))) == 1
    resumed = shop.run(*words)
    assert resumed.code == 0 and "the save was interrupted" in resumed.text, resumed.text
    assert "resumed: step-00000003" in resumed.text
    assert shop.digest("cut") == whole_digest
    assert_nothing_is_left(shop, "cut")


def test_a_stop_during_the_copy_waits_for_it(shop: Shop, whole_digest: str) -> None:
    shop.write("job.py", hooked("time.sleep(2)"))
    cut = shop.train("cut", *WORDS, "--faults", "stop rank=1 step=8")
    assert cut.code == 75 and "Stopped and saved." in cut.err, cut.text
    names = [path.name for path in list_checkpoints(shop.path / "cut" / "checkpoints")]
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    assert_nothing_is_left(shop, "cut")
    assert shop.train("cut", *WORDS).code == 0
    assert shop.digest("cut") == whole_digest


def test_a_disk_that_fills_up_during_the_copy_is_said_at_the_next_save(shop: Shop, small_disk: Path) -> None:
    shop.write("job.py", hooked(FILL))
    run = small_disk / "run"
    ended = shop.train(str(run), *WORDS, "--watch.to", "console")
    warning = "a checkpoint could not be saved: step 6 could not be written: No space left on device."
    assert ended.out.count(f"warning: {warning}") == 1 and "disk is step-00000003" in ended.out, ended.text
    assert ended.code == 3, ended.text
    assert re.match(r"FAILED at step 12. First error: rank \d, SaveError: a checkpoint needs", ended.err), ended.err
    assert ended.err.splitlines()[-1].startswith("Resume: ")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    assert_nothing_is_left(shop, str(run))
    (small_disk / "filler").unlink()
    resumed = shop.train(str(run), *WORDS, "--watch.to", "console")
    assert resumed.code == 0 and "resumed: step-00000003" in resumed.text, resumed.text


def test_after_a_failed_copy_a_stop_still_saves(shop: Shop) -> None:
    shop.write("job.py", hooked("raise OSError(5, os.strerror(5))"))
    cut = shop.train("cut", *WORDS, "--faults", "stop rank=1 step=8")
    assert cut.code == 75 and "step 6 could not be written: Input/output error" in cut.out, cut.text
    names = [path.name for path in list_checkpoints(shop.path / "cut" / "checkpoints")]
    assert names == ["step-00000003", "step-00000008"]
    assert_nothing_is_left(shop, "cut")


def test_a_first_copy_that_fails_ends_the_run(shop: Shop) -> None:
    shop.write("job.py", hooked("raise OSError(5, os.strerror(5))"))
    ended = shop.train("cut", "--checkpoint.background", "--checkpoint.every", "6", "--eval.every", "100", steps=18)
    assert ended.code == 3 and "SaveError: step 6 could not be written: Input/output error" in ended.err, ended.text
    assert list_checkpoints(shop.path / "cut" / "checkpoints") == []
    assert_nothing_is_left(shop, "cut")


def test_without_a_memory_folder_each_save_waits(shop: Shop) -> None:
    settings = "{'train.steps': 12, 'checkpoint.background': True, 'checkpoint.every': 3, 'eval.every': 12}"
    shop.write(
        "script.py",
        "import paceline as pl\nfrom job import make_job\n"
        f"with pl.Run(make_job(), ranks=1, run_dir='run', settings={settings}) as run:\n"
        "    for batch in run.batches():\n        run.step(batch)\n",
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "script.py"],
        cwd=shop.path, env=shop.environ(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    notes = [event["text"] for event in events(shop, "run", "Note")]
    assert sum("checkpoint.background is off: another launcher" in text for text in notes) == 1
    assert [event["step"] for event in events(shop, "run", "CheckpointSaved")] == [3, 6, 9, 12]
