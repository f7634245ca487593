"""Runs that the tests fork from a warm process give the same numbers and end alike as runs in a fresh Python."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.launch.agent.forkserver_client import FORKSERVER_COMMAND
from paceline.launch.launch_environment import DEFAULT_EXACT_KERNELS, KERNELS_VARIABLE
from tests.conftest import Shop


def test_a_run_from_a_fork_server_that_waited_is_the_same(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ[FORKSERVER_COMMAND]
    ended = shop.train("warm")
    assert ended.code == 0, ended.text
    monkeypatch.delenv(FORKSERVER_COMMAND)
    assert shop.train("cold").code == 0
    assert shop.digest("warm") == shop.digest("cold")


def test_it_is_forked_where_the_numbers_would_be_the_same_and_else_begun(shop: Shop) -> None:
    lines = "from pathlib import Path\nimport psutil\n" + shop.path.joinpath("job.py").read_text()
    tell = "Path('line').write_text('; '.join(' '.join(p.cmdline()) for p in psutil.Process().parents()))"
    shop.write("job.py", lines.replace("    generator =", f"    {tell}\n    generator ="))
    words = ("train", "job.py", "--ranks", "1", "--train.steps", "1")
    assert shop.run(*words).code == 0
    assert "tests.warm.mother" in (shop.path / "line").read_text()
    assert shop.run(*words, "--train.exact", "true").code == 0
    assert f"{DEFAULT_EXACT_KERNELS} " in (shop.path / "line").read_text()
    assert shop.run(*words, environ={"KMP_DUPLICATE_LIB_OK": "True"}).code == 0  # as where a test imported sklearn
    assert "tests.warm.mother" in (shop.path / "line").read_text()
    assert shop.run(*words, environ={KERNELS_VARIABLE: "COMPATIBLE"}).code == 0
    line = (shop.path / "line").read_text()
    assert "tests.warm.mother" not in line and "paceline.launch.agent.forkserver" in line


def test_a_failure_is_told_alike(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.write("other.py", "def make_job():\n    raise SystemExit(9)\n")
    words = ("train", "other.py", "--ranks", "1", "--run-dir", "run")
    first = shop.run(*words)
    monkeypatch.delenv(FORKSERVER_COMMAND)
    second = shop.run(*words[:-1], "other-run")
    assert first.code == second.code != 0
    assert first.err == second.err.replace("other-run", "run")


def test_ranks_go_with_the_command_that_is_killed(shop: Shop) -> None:
    process = shop.start("train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000")
    pulses = [shop.path / "run" / "logs" / "attempt-1" / f"pulse-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(pulse.exists() for pulse in pulses) and time.monotonic() < until:
        time.sleep(0.05)
    ranks = [p for p in psutil.process_iter() if under(shop.path, p)]
    assert len(ranks) >= 3
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert not left


def test_what_waits_goes_on_where_a_command_and_its_ranks_die_at_once(shop: Shop) -> None:
    process = shop.start("train", "job.py", "--ranks", "1", "--run-dir", "run", "--train.steps", "100000")
    until = time.monotonic() + 60
    while not (shop.path / "run" / "logs" / "attempt-1" / "pulse-0").exists() and time.monotonic() < until:
        time.sleep(0.05)
    forkserver, mother = next(
        (p, parent) for p in psutil.process_iter() if under(shop.path, p) and (parent := p.parent()) in mothers()
    )
    mother.suspend()
    forkserver.kill()
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    time.sleep(0.2)  # of both it hears in one look, of the fork server first
    mother.resume()
    assert shop.train("again").code == 0
    assert mother.is_running() and mother.status() != psutil.STATUS_ZOMBIE


def mothers() -> list[psutil.Process]:
    """Those of all workers."""
    return [p for p in psutil.process_iter(["cmdline"]) if "tests.warm.mother" in (p.info["cmdline"] or ())]


def under(folder: Path, process: psutil.Process) -> bool:
    """Whether it works in this folder."""
    try:
        return Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
