"""What checkpoints in the memory of two nodes cost a training, with copies on the other node and without.

    python benchmarks/peer_copies.py                              # 50 MB of state on each of 2 nodes
    python benchmarks/peer_copies.py --megabytes 2 --rounds 2     # try it

Each of two nodes is a command `paceline train --nodes` with one rank, on 127.0.0.1. The layout is a pipeline of two
stages, so that each rank has its own state (weights and two moments of Adam). The forward sleeps for most of a step. A
round is one run of each kind, in an order that changes from round to round:

    no saves     --checkpoint.memory_every 0
    memory       a checkpoint in memory after each step, --checkpoint.peer_copies 0
    copies       the same with --checkpoint.peer_copies 1
    derived      with copies, and the interval that Paceline derives, so that saves take at most 1% of the time

Printed for each kind: the median time of a step; the mean over the rounds of the log ratio of the total time of its
steps to that without saves, as a ratio, with its 95 % interval by Student's t; and what a step adds in milliseconds.
"""

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from two_commits import interval

KINDS = {
    "no saves": ["--checkpoint.memory_every", "0"],
    "memory": ["--checkpoint.memory_every", "1", "--checkpoint.peer_copies", "0"],
    "copies": ["--checkpoint.memory_every", "1", "--checkpoint.peer_copies", "1"],
    "derived": [],
}
WARM_UP = 5
JOB = """
import time
import torch
from torch import nn
import paceline as pl

class Sleeping(nn.Module):
    def __init__(self, width, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return torch.relu(self.linear(x))

def make_job(width: int = 512, seconds: float = 0.1) -> pl.Job:
    data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.zeros(64))
    return pl.Job(
        model=lambda: nn.Sequential(*[Sleeping(width, seconds) for _ in range(4)]),
        loss=lambda output, batch: (output.square().sum(), output.numel()),
        train_data=data,
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4),
        global_batch_size=2,
        micro_batch_size=2,
    )
"""


def step_times(folder: Path, kind: str, options: argparse.Namespace, *, number: int) -> list[float]:
    """Train once, and return the seconds of each step after the first ones."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    width = int(math.sqrt(options.megabytes * 1e6 / 12 / 2))  # 2 layers on a rank, 12 bytes a parameter
    run = folder / f"run-{number}"
    words = [
        sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--nodes", f"2:127.0.0.1:{port}",
        "--run-dir", str(run), "--layout", "pp=2", "--job.width", str(width), "--job.seconds", str(options.step / 4),
        "--train.steps", str(WARM_UP + options.steps), "--train.threads", "1", "--checkpoint.every", "100000",
        "--checkpoint.consolidated", "none", "--log.every", "1", "--watch.to", "jsonl", *KINDS[kind],
    ]  # fmt: skip
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    nodes = [
        subprocess.Popen([*words, "--node", str(node)], cwd=folder, env=environ, stdout=subprocess.DEVNULL)
        for node in range(2)
    ]
    codes = [node.wait(timeout=600) for node in nodes]
    if any(codes):
        sys.exit(f"a run failed; its logs are in {run}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ends = [event["time"] for event in events if event["event"] == "StepDone"][WARM_UP - 1 :]
    return [end - start for start, end in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=50, help="state of each rank")
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run that are counted")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each kind")
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    shuffle = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        for _ in range(options.rounds):
            for kind in shuffle.sample(list(KINDS), len(KINDS)):
                number = sum(map(len, times.values()))
                times[kind].append(step_times(folder, kind, options, number=number))
    base = times["no saves"]
    for kind, runs in times.items():
        logs = [math.log(sum(run) / sum(without)) for run, without in zip(runs, base, strict=True)]
        middle, low, high = interval(logs)
        added = statistics.median(sum(run) - sum(without) for run, without in zip(runs, base, strict=True))
        step = statistics.median([seconds for run in runs for seconds in run])
        print(
            f"{kind:<10} step {step:.3f} s   ratio {middle:.4f} [{low:.4f}, {high:.4f}]   "
            f"{added / options.steps * 1e3:+7.1f} ms a step"
        )


if __name__ == "__main__":
    main()
