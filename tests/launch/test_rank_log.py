"""The log of a rank: what it prints goes there too, or only there, until the log is closed."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.rank_log import CopiedStream, RankLog, is_shared_with

PROGRAM = """
import os, sys
from pathlib import Path
from paceline.launch.rank_log import RankLog
print("before")
log = RankLog(Path("rank.log"), redirects={redirects})
print("within")
os.system("echo native within; echo native error >&2")
print("error", file=sys.stderr)
try:
    raise ValueError("not today")
except ValueError as error:
    log.write_traceback(error)
log.close()
print("after")
os.system("echo native after")
"""


def outputs(folder: Path, *, redirects: bool) -> tuple[str, str, str]:
    """What a program with a log prints to its standard output and error, and its log."""
    command = [sys.executable, "-u", "-c", PROGRAM.format(redirects=redirects)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr, (folder / "rank.log").read_text()


def test_redirected_output_goes_only_to_the_log(tmp_path: Path) -> None:
    out, err, log = outputs(tmp_path, redirects=True)
    assert out.split("\n") == ["before", "after", "native after", ""] and err == ""
    assert log.splitlines()[:4] == ["within", "native within", "native error", "error"]
    assert log.endswith("ValueError: not today\n") and "Traceback" in log


def test_copied_output_goes_to_both(tmp_path: Path) -> None:
    out, err, log = outputs(tmp_path, redirects=False)
    assert out.split("\n") == ["before", "within", "native within", "after", "native after", ""]
    assert err.splitlines() == ["native error", "error"]
    assert log.splitlines()[:2] == ["within", "error"] and "ValueError: not today" in log and "after" not in log


def test_a_full_disk_ends_the_copy_and_not_the_output() -> None:
    original, full = io.StringIO(), os.open("/dev/full", os.O_WRONLY)
    stream = CopiedStream(original, full)
    assert stream.write("one ") == 4
    stream.writelines(["two ", "three"])
    assert original.getvalue() == "one two three"
    os.close(full)


def test_a_stream_that_the_job_has_replaced_stays_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    log, other = RankLog(tmp_path / "rank.log", redirects=False), io.StringIO()
    sys.stdout = other
    log.close()
    assert sys.stdout is other


def test_output_is_shared_with_a_parent_unless_it_was_redirected(tmp_path: Path) -> None:
    code = "import os; from paceline.launch.rank_log import is_shared_with; print(is_shared_with(os.getppid()))"
    shared = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    assert subprocess.check_output([sys.executable, "-c", shared], text=True) == "True\n"
    own = shared.replace("])", "], stderr=subprocess.DEVNULL)")
    assert subprocess.check_output([sys.executable, "-c", own], text=True) == "False\n"
    assert not is_shared_with(2**22 + 1), "there is no such process"
