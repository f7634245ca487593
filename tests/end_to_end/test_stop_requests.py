"""A run stops on request, although a rank does not answer or no terminal is left."""

import json
import os
import pty
import select
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import Shop
from tests.end_to_end.run_processes import children, starter_of, wait_until_gone
from tests.end_to_end.test_interrupted_runs import wait_for

TRAIN = (
    "train", "job.py", "--ranks", "2", "--run-dir", "run", "--checkpoint.every", "100000", "--eval.every", "100000",
    "--watch.to", "console,jsonl", "--log.every", "10", "--train.on_nonfinite", "skip",
)  # fmt: skip


def log(shop: Shop, rank: int = 0) -> Path:
    return shop.path / "run" / "logs" / "attempt-1" / f"rank-{rank}.log"


def saves(shop: Shop) -> list[str]:
    return [path.name for path in (shop.path / "run" / "checkpoints").glob("step-*")]


def test_a_terminal_that_closes_costs_no_step(shop: Shop) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(shop.path)
        words = shop.command(*TRAIN, "--train.steps", "100000")
        os.execve(words[0], words, {**shop.environ(), "TERM": "xterm"})
    deadline = time.monotonic() + 40
    while not (log(shop).exists() and "step 20 " in log(shop).read_text()) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.05)[0]:
            with suppress(OSError):
                os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert len(saves(shop)) == 1


def test_nohup_outlives_the_hangup(shop: Shop) -> None:
    process = subprocess.Popen(
        ["nohup", *shop.command(*TRAIN, "--train.steps", "300")],
        cwd=shop.path,
        env=shop.environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(log(shop), "step 20 ")
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "step-00000300" in saves(shop)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_what_comes_twice_by_itself_is_no_second_wish(shop: Shop, number: signal.Signals) -> None:
    """A shell that ends with its terminal passes SIGHUP on, beside the kernel's own."""
    process = shop.start(*TRAIN, "--train.steps", "100000")
    wait_for(log(shop), "step 20 ")
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.06)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75 and err.count("finishing the step") == 1, err


@pytest.mark.parametrize("how", ["stopped", pytest.param("hangs", marks=pytest.mark.soak)])
def test_who_does_not_answer_is_named(shop: Shop, how: str) -> None:
    fault = ("--faults", "hang rank=1 step=25") if how == "hangs" else ()
    words = (*TRAIN, "--ranks", "3", "--train.steps", "100000", "--survive.restarts", "0")
    process = shop.start(*words, "--train.timeout_seconds", "4", *fault)
    wait_for(log(shop), "step 20 ")
    if how == "stopped":
        os.kill(rank_pid(process.pid, rank=1), signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    first, *rest = err[err.index("FAILED") :].splitlines()
    assert process.returncode == 1
    assert "rank 1 is holding up step" in err[: err.index("FAILED")], err
    assert "no answer from rank 1" in first and ": nothing from it since step" in first, err
    assert ("(state T)" in first) == (how == "stopped") and "gloo" not in err, err
    assert any("--train.timeout_seconds" in line for line in rest[:-1]) and rest[-1].startswith("Resume: ")
    (told,) = [line.removeprefix("Full text: ") for line in rest if line.startswith("Full text: ")]
    assert "timed out waiting" in (text := (shop.path / told).read_text().lower()) or "application timeout" in text


def test_one_ctrl_c_says_who_holds_it_up_and_a_second_ends_it(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(*TRAIN, "--train.steps", "100000", environ={"MARK": mark})
    wait_for(log(shop), "step 20 ")
    held = rank_pid(process.pid, rank=1)
    os.kill(held, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "finishing the step, then saving; Ctrl-C again stops at once" in process.stderr.readline()
    told = [process.stderr.readline() for _ in range(3)]
    assert "rank 1: nothing from it since step" in told[1] and f"kill -CONT {held} " in told[2], told
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert "Stopped at once. Resume: paceline train " in err, "nothing was saved"
    assert process.returncode == 130 and wait_until_gone(mark) == []


@pytest.mark.soak
def test_a_second_ctrl_c_ends_it_though_the_fork_server_is_stopped(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(*TRAIN, "--train.steps", "100000", environ={"MARK": mark})
    wait_for(log(shop), "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    told = [process.stderr.readline() for _ in range(2)]
    assert f"kill -CONT {forkserver} " in told[1], told
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=8)
    assert process.returncode == 130 and wait_until_gone(mark) == []


def test_a_killed_fork_server_is_said_to_be_that_and_no_rank(shop: Shop) -> None:
    process = shop.start(*TRAIN, "--train.steps", "100000", "--survive.restarts", "0")
    wait_for(log(shop), "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "rank -1" not in err and "other" not in err, err
    assert err.startswith(
        f"FAILED: the process that starts the ranks (PID {forkserver}) was ended by SIGKILL (killed from"
    )
    assert "rank--1.log" not in err and f"Logs of the ranks: {log(shop).parent.relative_to(shop.path)}" in err
    assert err.splitlines()[-1].startswith("Resume: paceline train job.py")
    told = json.loads((log(shop).parent / "first-failure.json").read_text())
    assert told["rank"] == -1 and told["step"] > 20


def rank_pid(launcher: int, *, rank: int) -> int:
    """By the log it writes to."""
    (forkserver,) = children(launcher)
    names = {pid: Path(f"/proc/{pid}/fd/1").resolve().name for pid in children(starter_of(forkserver))}
    return next(pid for pid, name in names.items() if name == f"rank-{rank}.log")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_scheduler_that_signals_all_processes_asks_once(shop: Shop, number: signal.Signals) -> None:
    """As Slurm does: the ranks get the signal, and the request that the command passes on because of it."""
    process = shop.start("train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "5000")
    wait_for(shop.path / "run" / "metrics.jsonl", '"step": 10,')
    for pid in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "Stopped and saved" in out + err, out + err
