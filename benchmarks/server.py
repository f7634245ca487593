"""One worker five times slower than the others: a parameter server beside synchronous data parallelism.

    python benchmarks/server.py                                  # 4 workers, 20 ms a share, 3 rounds
    python benchmarks/server.py --workers 3 --wait 0.05 --rounds 5

Real runs of a model of 10,000 parameters whose forward sleeps: WAIT seconds on each worker, five times that on one. The
runs of a round follow one another on one machine, so that each rule meets the same neighbours. Told is the median
over the rounds of samples per second from the tenth step to the last, how many times that is what `sync` does, how late
gradients were, and the loss at the end: what is faster need not be better. Sleeping workers share no processor; what is
measured is who waits for whom.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl

RULES = ("sync", "ps,staleness=0", "ps,staleness=4", "ps,staleness=16", "ps,staleness=none")
SLOWER = 5
WARM = 10


class Slow(nn.Module):
    """Two layers, and a worker's pace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 160), nn.Tanh(), nn.Linear(160, 32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            slow = os.environ["RANK"] == os.environ["SLOW"]
            time.sleep(float(os.environ["WAIT"]) * (SLOWER if slow else 1))
        return x + self.layers(x)  # type: ignore[no-any-return]


def make_job(batch: int = 16) -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8192, 32, generator=generator)
    y = x @ torch.randn(32, 32, generator=generator) / 6
    return pl.Job(
        model=Slow,
        loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, y),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        global_batch_size=batch,
    )


def run(rule: str, folder: Path, *, workers: int, wait: float, steps: int) -> dict[str, Any]:
    """One run; what its events say."""
    ranks = workers + (rule != "sync")
    words = [
        "train", f"{Path(__file__).resolve()}", "--ranks", str(ranks), "--update", rule, "--run-dir", str(folder),
        "--train.steps", str(steps), "--job.batch", str(4 * workers), "--log.every", "1", "--watch.to", "jsonl",
        "--train.check_every", "0", "--checkpoint.every", str(10 * steps),
    ]  # fmt: skip
    environ = {**os.environ, "WAIT": str(wait), "SLOW": str(ranks - 1)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "paceline", *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "StepDone"]
    first, last = told[WARM - 1], told[-1]
    late = [event for event in events if event["event"] == "Staleness"][-1:]
    counts = [pair for event in late for one in event["told"] for pair in one["late"]]
    return {
        "rate": (last["samples"] - first["samples"]) / (last["time"] - first["time"]),
        "late": sum(n * count for n, count in counts) / max(1, sum(count for _, count in counts)),
        "most": max((n for n, _ in counts), default=0),
        "loss": sum(event["loss"] for event in told[-10:]) / 10,
    }


def main() -> None:
    """All rules in turn, so many rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--wait", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(asked.rounds):
            for rule in RULES:
                folder = Path(temporary) / f"{number}-{rule.replace(',', '-')}"
                found[rule].append(run(rule, folder, workers=asked.workers, wait=asked.wait, steps=asked.steps))
    sync = median(one["rate"] for one in found["sync"])
    print(
        f"{asked.workers} workers, one {SLOWER} times slower, {asked.wait * 1000:.0f} ms a share, {asked.rounds} rounds"
    )
    print("| update | samples/s, median (least to most) | beside sync | late, mean | at most | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rule, runs in found.items():
        rates = [one["rate"] for one in runs]
        rate, late = median(rates), median(one["late"] for one in runs)
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        most, loss = max(one["most"] for one in runs), median(one["loss"] for one in runs)
        print(f"| `{rule}` | {rate:.0f} ({spread}) | {rate / sync:.2f} | {late:.1f} | {most} | {loss:.4f} |")
    if asked.json:
        asked.json.write_text(json.dumps({"asked": {**vars(asked), "json": str(asked.json)}, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
