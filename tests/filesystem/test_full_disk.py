"""A run reports a full disk on the screen, although it can write no file."""

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.agent.shared_status import make_status_buffer
from paceline.launch.failures.failure_record import failure_from_exception, read_failure, write_failure
from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.test_interrupted_runs import wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], check=False, capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("a small file system can't be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_disk_without_room_for_a_checkpoint_is_found_after_the_first_step(small_disk: Path) -> None:
    shop = Shop(small_disk)
    shop.write("job.py", SMALL_JOB)
    (small_disk / "other").write_bytes(bytes(12 << 20))
    ended = shop.train("run", "--checkpoint.every", "1000", "--watch.to", "console", steps=2000)
    assert ended.code == 3 and "a checkpoint needs" in ended.err and "step 1" in ended.err, ended.text


def test_a_run_that_has_saved_is_not_ended_before_its_next_save(small_disk: Path) -> None:
    """There may be space again by then."""
    shop = Shop(small_disk)
    shop.write("job.py", SMALL_JOB)
    assert shop.train("run", ranks=1, steps=4).code == 0
    (small_disk / "other").write_bytes(bytes(12 << 20))
    ended = shop.train("run", "--log.every", "1", ranks=1, steps=8)
    assert ended.code == 3 and "FAILED at step 8" in ended.err, ended.text
    assert "run/checkpoints may become full" in ended.text


@pytest.mark.parametrize("num_kept", [2, 10**9])
def test_a_disk_that_will_be_full_is_warned_of(shop: Shop, num_kept: int) -> None:
    shop.write("job.py", SMALL_JOB)
    ended = shop.train("run", "--checkpoint.keep", str(num_kept), "--watch.to", "console", ranks=1, steps=3)
    assert ended.code == 0 and ("run/checkpoints may become full" in ended.text) == (num_kept > 2), ended.text


def test_a_disk_that_is_full_when_a_save_is_due_is_said(small_disk: Path) -> None:
    shop = Shop(small_disk)
    slow = "def forward(self, x):\n        import time; time.sleep(0.05)"
    shop.write("job.py", SMALL_JOB.replace("def forward(self, x):", slow))
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100", "--checkpoint.every", "60",
        "--eval.every", "1000", "--log.every", "1", "--train.on_nonfinite", "skip", "--watch.to", "console,jsonl",
    )  # fmt: skip
    wait_for(small_disk / "run" / "logs" / "attempt-1" / "rank-0.log", "step 5 ")
    fill(small_disk)
    _, err = process.communicate(timeout=60)
    first = err.splitlines()[0]
    assert re.search(r"SaveError: a checkpoint needs \S+ KiB and 16.0 MiB to spare, but \S+ KiB are free", first), err
    assert process.returncode == 3 and err.splitlines()[-1].startswith("Resume: paceline train job.py")


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@pytest.mark.parametrize("name", ["", "pulse-0"])
def test_a_limit_on_the_size_of_files_has_its_cause_wherever_it_is_met(name: str) -> None:
    """A log, as of a print, has no name."""
    failure = failure_from_exception(OSError(errno.EFBIG, "File too large", *([name] if name else [])), rank=0, step=3)
    assert (failure.kind, failure.exit_code, failure.step) == ("SaveError", 3, 3)
    assert failure.said["where"] == name and "`ulimit -f`" in failure.said["cause"]
    assert failure.said["hint"] == "ulimit -f unlimited"
    assert failure_from_exception(OSError(errno.ENOENT, "no"), rank=0).exit_code == 1


@pytest.mark.parametrize("name", ["consolidated", "checkpoints/best", "weights.json"])
def test_what_can_not_be_written_is_said_in_our_words(shop: Shop, name: str) -> None:
    """A file where a folder must be, or a folder where a file must be."""
    path = shop.path / "run" / name
    path.parent.mkdir(parents=True)
    if name == "consolidated":
        path.write_text("in the way")
    else:
        (path / "in the way").mkdir(parents=True)
    ended = shop.train("run", ranks=1, steps=4)
    if name == "checkpoints/best":
        assert ended.code == 0 and "warning: that step 4 is the best could not be written" in ended.out, ended.text
        return
    told = {"consolidated": "the consolidated weights", "weights.json": "weights.json"}
    first = ended.err.splitlines()[0]
    assert ended.code == 3 and "SaveError" in first and told[name] in first and "could not be written" in first, (
        ended.text
    )
    assert ended.err.splitlines()[-1].startswith("Resume: ")
    assert (
        "likely cause: a folder of that name already exists" in ended.err
        or "has the name of a folder that is needed" in ended.err
    )


def test_a_slate_carries_what_a_file_can_not(tmp_path: Path) -> None:
    status_fd = make_status_buffer()
    try:
        write_failure(tmp_path / "gone", rank=2, error=ValueError("too much"), status_fd=status_fd)
        write_failure(tmp_path / "gone", rank=1, error=ValueError("\u2028" * 10**6), status_fd=status_fd)
        found = [read_failure(tmp_path / "gone", rank, status_fd=status_fd) for rank in range(4)]
    finally:
        os.close(status_fd)
    assert [failure and failure.rank for failure in found] == [None, 1, 2, None]
    assert found[2] is not None and found[2].message == "too much"


@pytest.mark.parametrize("room", ["size=16k", "size=4m,nr_inodes=10", "size=4m,nr_inodes=14"])
def test_a_disk_that_is_full_at_the_start_is_said(room: str, shop: Shop, small_disk: Path) -> None:
    """An open log that takes no more has no name; a rank's first file; the settings of the run."""
    subprocess.run(["mount", "-o", f"remount,{room}", str(small_disk)], check=True)
    ended = shop.train(str(small_disk / "run"), steps=2)
    assert ended.code == 3, ended.text
    refused = r"SaveError: a file could not be written|MachineError: the log rank-\d\.log can't be created"
    assert re.search(rf"rank \d, ({refused}): No space left on device", ended.err), ended.text
    assert f"where: {small_disk}/run" in ended.err and "to do: " in ended.err
    assert ("all inodes are used" in ended.err) == ("inodes" in room)
