"""Make ranks hang in nine ways, see which rank, kind and line is named and when; and see that sound runs name nobody.

    python benchmarks/hangs.py                             # 60 hangs and 200 sound runs
    python benchmarks/hangs.py --hangs 18 --sound 16       # fewer
    python benchmarks/hangs.py --kinds stopped native      # only these

Each hang happens on a random rank of two to four, at a random step. Named right means: the first message has the right
rank, kind and, where the job has one, the line. The time is that from the moment at which the rank stops until the
message. It is compared with the limit: 2 s or three usual steps (10 s for data and for ranks that all wait for each
other, 0.5 s for a stopped process).

A sound run compiles its model, evaluates for 6 s on one rank, reads a slow sample (5 s), saves slowly (5 s), is held by
a debugger (5 s), or has steps of very different lengths. Any message about a hang is then a false alarm.
"""

import argparse
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline as pl

HANGS = {  # what the job does, and the kind that the message has
    "stopped": "stopped",
    "sleep": "code",
    "program": "code",
    "lock": "lock",
    "native": "native",
    "data": "data",
    "data worker": "data",
    "receive": "mismatch",
    "disk": "disk",
}
SOUND = ("compile", "on_eval", "slow sample", "slow worker", "slow save", "debugger", "uneven")
LIMITS = {"data": 10.0, "data worker": 10.0, "receive": 10.0, "stopped": 0.5}
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
FAULT = os.environ.get("FAULT", "")
FAULT_RANK = int(os.environ.get("FAULT_RANK", "-1"))
FAULT_STEP = int(os.environ.get("FAULT_STEP", "10"))
PAUSE = 0.03


def is_due(step: int) -> bool:
    """Whether this rank is to hang now; what happens is written to a file, for the time."""
    if int(os.environ.get("RANK", "0")) != FAULT_RANK or step != FAULT_STEP:
        return False
    Path(os.environ["FAULT_FILE"]).write_text(str(time.time()))
    return True


class Net(nn.Module):
    """A small model that pauses; its state takes long to read if the run is to save slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Points(torch.utils.data.TensorDataset):
    """Samples, one of which may never arrive."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        Points.reads += 1
        if FAULT in ("data", "data worker") and Points.reads > 4 * FAULT_STEP and is_due(FAULT_STEP):
            time.sleep(600)  # hang: data
        if FAULT in ("slow sample", "slow worker") and index == 7:
            time.sleep(5)
        return super().__getitem__(index)


calls = 0


def loss(output: Tensor, batch: Any) -> Any:
    global calls
    calls += 1
    time.sleep(PAUSE + (random.random() ** 8 * 1.6 if FAULT == "uneven" else 0.0))
    if FAULT in HANGS and FAULT not in ("data", "data worker", "stopped") and is_due(calls):
        hang()
    return (output - batch[1]).square().sum(), output.numel()


def hang() -> None:
    if FAULT == "sleep":
        time.sleep(600)  # hang: sleep
    if FAULT == "program":
        subprocess.run(["sleep", "600"], check=True)  # hang: program
    if FAULT == "native":
        ctypes.PyDLL(None).sleep(600)  # hang: native
    if FAULT == "receive":
        dist.recv(torch.zeros(1), src=(FAULT_RANK + 1) % dist.get_world_size())  # hang: receive
    lock = threading.Lock()
    if FAULT == "lock":
        condition = threading.Condition(lock)
        with condition:
            condition.wait()  # hang: lock
    if FAULT == "disk":
        Path(os.environ["FROZEN"], "file").write_text("x")  # hang: disk


def on_eval(run: Any) -> dict[str, float]:
    if FAULT == "on_eval" and run.rank == 0:
        time.sleep(6)
    return {}


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(480, 32, generator=generator)
    return pl.Job(
        model=Net,
        loss=loss,
        train_data=Points(x, x),
        eval_data=torch.utils.data.TensorDataset(x[:16], x[:16]),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch_size=12,
        on_eval=on_eval,
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run printed: the seconds until the first message (None: there was none), and whether it was right."""

    seconds: float | None
    is_right: bool
    text: str


def line_of(fault: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    mark = f"# hang: {fault.removesuffix(' worker')}"
    return f"hangs.py:{1 + next(n for n, line in enumerate(lines) if line.endswith(mark))}"


def command(ranks: int, run: Path, *words: str) -> list[str]:
    return [
        sys.executable, "-W", "ignore", "-m", "paceline", "train", str(Path(__file__).resolve()), "--ranks", str(ranks),
        "--run-dir", str(run), "--train.steps", "100", "--log.every", "1", "--watch.to", "jsonl",
        "--survive.restarts", "0", *words,
    ]  # fmt: skip


@contextmanager
def started(folder: Path, fault: str, rank: int, step: int, ranks: int, *words: str, frozen: str = "") -> Iterator[Any]:
    environ = {
        **os.environ, "FAULT": fault, "FAULT_RANK": str(rank), "FAULT_STEP": str(step), "FROZEN": frozen,
        "FAULT_FILE": str(folder / "fault"), "NO_COLOR": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        command(ranks, folder / "run", *words), env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def steps_done(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_text().count("\n")
    except OSError:
        return 0


def rank_pid(run: Path, rank: int) -> int:
    from paceline.launch.agent.rank_activity import read_rank_activity

    activity = read_rank_activity(run / "logs" / "attempt-1", rank)
    return 0 if activity is None else activity.pid


def see_hang(fault: str, rng: random.Random, frozen: str) -> Seen:
    ranks = rng.choice((2, 2, 3, 4))
    rank, step = rng.randrange(ranks), rng.randrange(3, 25)
    words = ["--data.workers", "1"] if fault == "data worker" else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        frozen_folder = freezable(folder) if fault == "disk" else None
        with started(folder, fault, rank, step, ranks, *words, frozen=str(frozen_folder or "")) as process:
            lines: list[tuple[float, str]] = []
            reader = threading.Thread(
                target=lambda: lines.extend((time.time(), line) for line in process.stderr), daemon=True
            )
            reader.start()
            deadline = time.monotonic() + 90
            if fault == "stopped":
                while steps_done(folder / "run") < step and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(rng.random() * PAUSE * 2)
                (folder / "fault").write_text(str(time.time()))
                os.kill(rank_pid(folder / "run", rank), signal.SIGSTOP)
            if frozen_folder is not None:
                while steps_done(folder / "run") < 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
                subprocess.run(["fsfreeze", "-f", str(frozen_folder)], check=True)
            while time.monotonic() < deadline and not any("to do:" in line for _, line in lines):
                time.sleep(0.02)
            if frozen_folder is not None:
                subprocess.run(["fsfreeze", "-u", str(frozen_folder)], check=True)
            fault_file = folder / "fault"
            at = float(fault_file.read_text()) if fault_file.exists() else 0.0
        if frozen_folder is not None:
            while subprocess.run(["umount", str(frozen_folder)], capture_output=True).returncode:
                time.sleep(0.1)  # the ranks are still ending
        text = "".join(line for _, line in lines)
        hangs = folder / "run" / "logs" / "attempt-1" / "hangs.jsonl"
        record = json.loads(hangs.read_text().splitlines()[0]) if hangs.exists() else {}
    if not record or not lines:
        return Seen(seconds=None, is_right=False, text=text)
    is_right = rank in record["ranks"] and record["kind"] == HANGS[fault]
    is_right &= HANGS[fault] == "mismatch" or record["ranks"] == [rank]
    if fault not in ("stopped", "native", "data worker"):
        is_right &= line_of(fault) in record["message"]
    named_at = next(moment for moment, line in lines if re.search("holding up|wait for each other", line))
    return Seen(seconds=named_at - at, is_right=is_right, text=text)


def freezable(folder: Path) -> Path:
    """Mount a small file system that can be frozen, so that a write to it waits in the kernel."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    subprocess.run(["truncate", "-s", "32M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    return mounted


def see_sound(fault: str, rng: random.Random) -> str:
    """Run a sound training, and return what it printed about hangs; empty if nothing."""
    ranks = rng.choice((2, 2, 3))
    words = ["--eval.every", "50"]
    words += ["--train.compile", "true"] if fault == "compile" else []
    words += ["--data.workers", "1"] if fault == "slow worker" else []
    words += ["--checkpoint.every", "20", "--faults", "slow rank=1 step=20 point=save seconds=5"] * (
        fault == "slow save"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, fault, 0, 10, ranks, *words) as process:
            if fault == "debugger":
                hold_by_debugger(process, folder / "run", rng.randrange(ranks))
            _, text = process.communicate(timeout=300)
        hangs = folder / "run" / "logs" / "attempt-1" / "hangs.jsonl"
        if process.returncode != 0:
            return f"exit {process.returncode}: {text[-2000:]}"
        return hangs.read_text() if hangs.exists() else ""


def hold_by_debugger(process: Any, run: Path, rank: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    while steps_done(run) < 10 and process.poll() is None:
        time.sleep(0.02)
    pid = rank_pid(run, rank)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL: a traced process that is not a child
    time.sleep(5)
    libc.ptrace(PTRACE_DETACH, pid, None, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hangs", type=int, default=60)
    parser.add_argument("--sound", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", default=[*HANGS, *SOUND])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="sound runs at the same time")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    hangs = [kind for kind in HANGS if kind in arguments.kinds]
    sound = [kind for kind in SOUND if kind in arguments.kinds]
    num_right, seconds = 0, dict[str, list[float]]()
    for number in range(arguments.hangs if hangs else 0):
        fault = hangs[number % len(hangs)]
        seen = see_hang(fault, rng, "")
        num_right += seen.is_right
        if seen.seconds is not None:
            seconds.setdefault(fault, []).append(seen.seconds)
        if not seen.is_right:
            print(f"WRONG {fault}:\n{seen.text}", flush=True)
    for fault, times in seconds.items():
        limit = LIMITS.get(fault, 2.0)
        found = f"{len(times):3} hangs, named after {median(times):5.2f} s (median), {max(times):5.2f} s (most)"
        print(f"{fault:12} {found}, limit {limit:g} s", flush=True)
    if hangs:
        print(f"{num_right} of {arguments.hangs} hangs named right (rank, kind, line)", flush=True)
    num_alarms, by_kind = 0, dict.fromkeys(sound, 0)
    faults = [sound[number % len(sound)] for number in range(arguments.sound if sound else 0)]
    with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
        seen_texts = list(pool.map(lambda fault: see_sound(fault, random.Random(rng.random())), faults))
    for fault, text in zip(faults, seen_texts, strict=True):
        by_kind[fault] += 1
        if text:
            num_alarms += 1
            print(f"FALSE ALARM {fault}: {text}", flush=True)
    if sound:
        print(f"{num_alarms} false alarms in {arguments.sound} sound runs: {by_kind}", flush=True)


if __name__ == "__main__":
    main()
