"""A worker process ends the job as Python would, within a limit, and its children end with the command."""

import gzip
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.run_processes import wait_until_gone

JOB = """
import atexit, gzip, threading, time, zipfile
plain = open("plain", "w"); plain.write("x")
raw = open("raw", "wb"); raw.write(b"x")
packed = gzip.open("packed.gz", "wt"); packed.write("hello")
archive = zipfile.ZipFile("archive.zip", "w"); archive.writestr("a", "b")
class Cycle:
    def __init__(self):
        self.me, self.file = self, open("cycle", "w")
        self.file.write("x")
cycle = Cycle()
atexit.register(lambda: open("atexit", "w").close())
def late():
    time.sleep(0.2)
    open("thread", "w").close()
threading.Thread(target=late).start()
print("no line", end="")
"""
MAIN = "import sys; sys.path.insert(0, ''); import own; del own; {more}; from paceline.launch.agent.process_exit import end_python, exit_now; {end}"


def ended(folder: Path, end: str, *, more: str = "pass") -> "subprocess.CompletedProcess[str]":
    (folder / "own.py").write_text(JOB)
    words = [sys.executable, "-c", MAIN.format(end=end, more=more)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_job_s_threads_exit_functions_and_files_end_as_python_ends_them(tmp_path: Path) -> None:
    done = ended(tmp_path, "end_python(75)")
    assert (done.returncode, done.stdout, done.stderr) == (75, "no line", "")
    assert (tmp_path / "atexit").exists() and (tmp_path / "thread").exists()
    assert [(tmp_path / name).read_text() for name in ("plain", "raw", "cycle")] == ["x", "x", "x"]
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"hello"
    assert zipfile.ZipFile(tmp_path / "archive.zip").namelist() == ["a"]


def test_who_leaves_at_once_loses_no_line(tmp_path: Path) -> None:
    done = ended(tmp_path, "exit_now(3)")
    assert (done.returncode, done.stdout) == (3, "no line") and not (tmp_path / "atexit").exists()
    assert [(tmp_path / name).read_text() for name in ("plain", "raw", "cycle")] == ["x", "x", "x"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, name='uploader').start()", "uploader"),
        ("import atexit, threading; atexit.register(threading.Event().wait)", "exit functions"),
    ],
)
def test_what_does_not_end_is_told_and_left(tmp_path: Path, more: str, named: str) -> None:
    done = ended(tmp_path, "end_python(0, limit_seconds=1.0)", more=more)
    assert done.returncode == 0, done.stderr
    assert (
        named in done.stderr
        and "and is ended here, with these stacks:" in done.stderr
        and "threading.py" in done.stderr
    )


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no handles of processes")
@pytest.mark.parametrize("killed", ["command", "starter"])
def test_what_the_job_has_started_ends_with_whoever_is_killed(tmp_path: Path, killed: str) -> None:
    mark = f"guarded-{tmp_path}"
    starter = (
        "import os, subprocess, time\n"
        "from paceline.launch.agent.cleanup_process import start_cleanup_process\n"
        "start_cleanup_process(os.getppid())\n"
        "print(os.getpid(), subprocess.Popen(['sleep', '300'], stdout=-3).pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    command = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {starter!r}], start_new_session=True)\n"
        "time.sleep(300)\n"
    )
    words, environ = [sys.executable, "-c", command], {**os.environ, "MARK": mark}
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        leader, child = map(int, process.stdout.readline().split())
        os.kill(process.pid if killed == "command" else leader, 9)
        if killed == "starter":
            process.kill()
    left = wait_until_gone(mark)
    for pid in left:
        os.kill(pid, 9)
    assert not left, (leader, child)
