"""Asked to stop by whatever way, with a rank that does not answer, or with no terminal left to say it to."""

import os
import pty
import select
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.conftest import Shop
from tests.fault.test_runs import wait_for

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
