"""Break one running training in seven ways for half an hour, and see it end with the same weights and samples.

    python benchmarks/chaos.py                            # 62 faults in 30 minutes; needs root, for ip and mount
    python benchmarks/chaos.py --minutes 3 --faults 8     # fewer

The training runs in a network namespace of its own, with its run folder on a small disk of its own. Its steps take at
least 0.5 s. While it runs, this script breaks it:

    kill        SIGKILL to a random rank
    stop        SIGSTOP to a random rank, SIGCONT after 1 s
    partition   no packet passes between the ranks for 1 s (the loopback device of the namespace is down)
    full disk   the disk of the run folder is filled, until a save has failed
    corrupt     bytes of the newest checkpoint on disk and of the newest one in memory change; then SIGKILL to a rank
    slow        a rank is stopped for 0.1 s, ten times in 3 s
    nan         the loss of one step is NaN on one rank

It prints a line for each fault: the time until the next new step. At the end it prints the goodput and where the time
went, as in `report.html`, and compares the digest of the weights and the samples of each step with an undisturbed run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.reporting.goodput_section import read_goodput
from paceline.reporting.run_history import read_history
from paceline.run_folder.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kills import Events, left_behind, processes_of

KIND_COUNTS = {"kill": 26, "stop": 7, "partition": 7, "full disk": 4, "corrupt": 6, "slow": 6, "nan": 6}
RANKS, GLOBAL_BATCH, MICRO_BATCH = 2, 16, 4
MICRO_BATCHES = GLOBAL_BATCH // RANKS // MICRO_BATCH  # of a rank in a step
DISK_BYTES = 64 << 20
WAIT_SECONDS = 120.0
SAVE_STEPS = 20


class Net(nn.Module):
    """A small model whose step takes as long as `PAUSE` says, and whose output is NaN once after `NAN_FILE` appears."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.pause = float(os.environ.get("PAUSE", "0")) / MICRO_BATCHES
        self.nan_file = Path(f"{os.environ.get('NAN_FILE', 'none')}-{os.environ.get('RANK', '0')}")

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        for block in self.blocks:
            x = block(x)
        if not self.nan_file.exists():
            return x
        self.nan_file.unlink()
        return x * float("nan")


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The loss; the indices of the samples are written to a file of this attempt and rank."""
    attempt = os.environ.get("PACELINE_ATTEMPT_FOLDER", "").rpartition("-")[2]
    with Path(f"{os.environ['SAMPLES']}-{attempt}-{os.environ.get('RANK', '0')}").open("a") as file:
        file.write(" ".join(str(int(index)) for index in batch[2]) + "\n")
    return (output - batch[1]).square().sum(), output.numel()


def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator)
    y = x @ torch.randn(64, 64, generator=generator) / 8
    return pl.Job(
        model=Net,
        forward=lambda model, batch: model(batch[0]),
        loss=loss,
        train_data=torch.utils.data.TensorDataset(x, y, torch.arange(len(x))),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch_size=GLOBAL_BATCH,
    )


class Chaos:
    """A running training, and the ways to break it."""

    def __init__(self, command: int, folder: Path, *, namespace: str, nan_file: Path, chance: random.Random) -> None:
        self._command = command
        self._folder = folder
        self._namespace = namespace
        self._nan_file = nan_file
        self._chance = chance

    def inflict(self, kind: str) -> None:
        """Cause a fault of this kind, and return when the cause is over."""
        getattr(self, "_" + kind.replace(" ", "_"))()

    def _random_rank(self) -> int:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            ranks = processes_of(self._command).ranks
            if ranks:
                return self._chance.choice(ranks)
            time.sleep(0.01)
        raise SystemExit("the training has no ranks")

    def _signal(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def _kill(self) -> None:
        self._signal(self._random_rank(), signal.SIGKILL)

    def _stop(self, seconds: float = 1.0) -> None:
        pid = self._random_rank()
        self._signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(pid, signal.SIGCONT)

    def _slow(self) -> None:
        for _ in range(10):
            self._stop(0.1)
            time.sleep(0.2)

    def _partition(self) -> None:
        device = ["ip", "-n", self._namespace, "link", "set", "lo"]
        subprocess.run([*device, "down"], check=True)
        time.sleep(1.0)
        subprocess.run([*device, "up"], check=True)

    def _full_disk(self) -> None:
        disk = self._folder.parent
        filler = disk / "filler"
        warnings = self._count_failed_saves()
        free = shutil.disk_usage(disk).free
        with suppress(OSError), filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free)
        deadline = time.monotonic() + WAIT_SECONDS
        while self._count_failed_saves() == warnings and time.monotonic() < deadline:
            time.sleep(0.05)
        filler.unlink()

    def _count_failed_saves(self) -> int:
        return (self._folder / "events.jsonl").read_text().count("could not be saved")

    def _corrupt(self) -> None:
        for parent in (self._folder / "checkpoints", *Path("/dev/shm").glob("paceline-memory-*")):
            shards = sorted(parent.glob("step-*/*.safetensors"), key=lambda path: path.stat().st_mtime)
            for path in shards[-1:]:
                with suppress(OSError), path.open("r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    file.write(self._chance.randbytes(8))
        self._kill()

    def _nan(self) -> None:
        self._nan_file.with_name(f"{self._nan_file.name}-{self._chance.randrange(RANKS)}").touch()


@contextmanager
def own_namespace() -> Iterator[str]:
    """Return a context with a network namespace that has only a loopback device."""
    name = f"chaos-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@contextmanager
def own_disk(folder: Path) -> Iterator[Path]:
    """Return a context with a small disk of its own, mounted at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def words(folder: Path, *, steps: int) -> list[str]:
    return [
        sys.executable, "-W", "ignore", "-m", "paceline", "train", str(Path(__file__).resolve()), "--layout", "ddp",
        "--ranks", str(RANKS), "--run-dir", str(folder), "--train.steps", str(steps),
        "--train.micro_batch_size", str(MICRO_BATCH), "--train.threads", "1", "--checkpoint.every", str(SAVE_STEPS),
        "--checkpoint.memory_every", "1", "--log.every", "1", "--watch.to", "jsonl", "--survive.restarts", "8",
    ]  # fmt: skip


def samples_of_steps(path: Path, run: Path) -> dict[int, list[int]]:
    """The samples of each step, from the files of the loss; for a repeated step, those of its last execution."""
    starts = read_history(RunFolder(run)).starts
    found: dict[int, list[int]] = {}
    for start in sorted(starts, key=lambda event: int(event["attempt"])):
        first = int(start.get("resumed_from") or 0)
        found = {step: samples for step, samples in found.items() if step <= first}
        for rank in range(RANKS):
            file = path.with_name(f"{path.name}-{start['attempt']}-{rank}")
            lines = file.read_text().splitlines() if file.exists() else []
            for number, line in enumerate(lines):
                found.setdefault(first + number // MICRO_BATCHES + 1, []).extend(map(int, line.split()))
    return {step: sorted(samples) for step, samples in found.items()}


def run_undisturbed(folder: Path, *, steps: int) -> tuple[str, dict[int, list[int]]]:
    """The digest and the samples of each step of a run that nothing disturbs, without the pauses."""
    run, samples = folder / "undisturbed", folder / "samples-undisturbed"
    environ = {**os.environ, "SAMPLES": str(samples)}
    subprocess.run(words(run, steps=steps), env=environ, check=True, capture_output=True)
    return digest(run), samples_of_steps(samples, run)


def digest(run: Path) -> str:
    try:
        return str(json.loads((run / "weights.json").read_text())["digest"])
    except (OSError, ValueError):
        return "none"


def disturb(chaos: Chaos, events: Events, process: "subprocess.Popen[bytes]", kinds: list[str], seconds: float) -> int:
    """Cause one fault after the other, `seconds` apart; return after how many of them the run made a new step."""
    start, num_recovered = time.monotonic(), 0
    for number, kind in enumerate(kinds):
        time.sleep(max(0.0, start + (number + 0.5) * seconds - time.monotonic()))
        before, begin = events.last_step, time.time()
        chaos.inflict(kind)
        deadline = time.monotonic() + WAIT_SECONDS
        while events.last_step <= before + 1 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        is_recovered = events.last_step > before + 1
        num_recovered += is_recovered
        result = f"{time.time() - begin:5.1f} s until two steps later" if is_recovered else "NOT RECOVERED"
        print(f"{number + 1:3} {kind:<10} at step {before:<5} {result}", flush=True)
        if not is_recovered:
            break
    return num_recovered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=62)
    parser.add_argument("--kinds", nargs="+", default=list(KIND_COUNTS), choices=list(KIND_COUNTS))
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("chaos.py needs root, for `ip netns` and `mount`")
    chance, before = random.Random(options.seed), left_behind()
    pool = [kind for kind in options.kinds for _ in range(KIND_COUNTS[kind])]
    kinds = chance.sample(pool * -(-options.faults // len(pool)), k=options.faults)
    steps = int(options.minutes * 60 / options.step_seconds)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, own_namespace() as namespace:
        folder = Path(name)
        expected_digest, expected_samples = run_undisturbed(folder, steps=steps)
        with own_disk(folder / "disk") as disk:
            run, samples, nan_file = disk / "run", folder / "samples", folder / "nan"
            environ = {
                **os.environ,
                "PAUSE": str(options.step_seconds),
                "SAMPLES": str(samples),
                "NAN_FILE": str(nan_file),
            }
            with (folder / "log").open("w") as log:
                command = ["ip", "netns", "exec", namespace, *words(run, steps=steps)]
                process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
            events = Events(run)
            while not events.last_step and process.poll() is None:
                time.sleep(0.05)
            chaos = Chaos(process.pid, run, namespace=namespace, nan_file=nan_file, chance=chance)
            seconds = options.minutes * 60 / (options.faults + 1)
            num_recovered = disturb(chaos, events, process, kinds, seconds)
            try:
                process.wait(timeout=WAIT_SECONDS + options.minutes * 60)
            except subprocess.TimeoutExpired:
                process.kill()
            is_equal = digest(run) == expected_digest
            are_samples_equal = samples_of_steps(samples, run) == expected_samples
            print_goodput(run)
            print(f"faults {len(kinds)}, recovered {num_recovered}, exit code {process.returncode}")
            print(f"weights {'bitwise' if is_equal else 'DIFFERENT'}, samples of {steps} steps: ", end="")
            print("each exactly once, in the undisturbed order" if are_samples_equal else "DIFFERENT")
            if process.returncode:
                print((folder / "log").read_text()[-3000:])
    print(f"left behind: {sorted(left_behind() - before) or 'nothing'}")
    sys.exit(int(not (is_equal and are_samples_equal and num_recovered == len(kinds))))


def print_goodput(run: Path) -> None:
    history = read_history(RunFolder(run))
    budget = read_goodput(history)
    if budget is None:
        return
    usual = median(event["step_seconds"] for event in history.events_of_kind("StepDone"))
    print(f"goodput {budget.goodput:.2%} of {budget.total:.0f} s, at {usual:.3f} s a step")
    for name, seconds in budget.losses.items():
        print(f"    {name:<15} {seconds:7.2f} s  {seconds / budget.total:6.2%}")


if __name__ == "__main__":
    main()
