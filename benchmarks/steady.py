"""The bubble of a training run in full swing: pipelines that are never flushed beside GPipe and 1F1B.

    python benchmarks/steady.py                        # 2 and 4 stages
    python benchmarks/steady.py --ranks 4 --wait 0.02 --steps 60

A real run, with its loop, its optimizer and its messages, of a model whose blocks sleep: WAIT seconds in the forward,
twice that in the backward. Every block writes down when it slept. The bubble is the part of a window in the middle of
the run in which a rank's blocks did not sleep, mean over the ranks: all that is no compute counts as idle, updates and
messages too. A rank is a process (gloo, CPU); runs follow one another on one machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.config.task import Task
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.run import Run

RUNS = {  # by name: layout, update, microbatches a rank in a batch
    "gpipe": ("pp,schedule=gpipe", "sync", 4),
    "1f1b": ("pp,schedule=1f1b", "sync", 4),
    "pipedream": ("pp", "pipedream", 0),
    "2bw": ("pp", "2bw", 1),
}
SLEPT: list[tuple[float, float]] = []


class Waits(torch.autograd.Function):
    """The identity, after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sleep(2 * ctx.seconds)
        return gradient, None


def sleep(seconds: float) -> None:
    """And write down when."""
    began = time.monotonic()
    time.sleep(seconds)
    SLEPT.append((began, time.monotonic()))


class Block(nn.Module):
    """A small layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return Waits.apply(x + self.layer(x).tanh(), self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def make_job(stages: int = 2, wait: float = 0.02, batch: int = 1) -> pl.Job:
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=lambda: nn.Sequential(*(Block(wait) for _ in range(stages))),
        loss=lambda output, batch: (output.square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, x),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9),
        global_batch_size=batch,
        micro_batch_size=1,
    )


def worker(payload: dict[str, Any]) -> int:
    """Step, then gather when every rank slept; window: the middle half of the run."""
    task = Task.from_json(payload)
    session = Run.worker(task).open()
    batches = session.loop.batches()
    SLEPT.clear()
    for _ in range(int(task.options["steps"])):
        session.loop.step(next(batches))
    session.setup.step.finish_pending()
    found = session.world.gather_json(SLEPT)
    if session.world.is_main:
        Path(task.options["answer"]).write_text(json.dumps(found))
    session.world.barrier()
    session.close()
    return 0


def bubble(slept: list[list[tuple[float, float]]]) -> float:
    """In the middle half of the time in which all ranks had begun and none had ended."""
    first, last = max(row[0][0] for row in slept), min(row[-1][1] for row in slept)
    left, right = first + (last - first) / 4, last - (last - first) / 4
    busy = [sum(max(0.0, min(b, right) - max(a, left)) for a, b in row) for row in slept]
    return 1 - mean(busy) / (right - left)


def measure(name: str, *, ranks: int, wait: float, micro: int) -> float:
    """One run's."""
    layout, update, each = RUNS[name]
    batch = max(1, each * ranks)
    folder = Path(tempfile.mkdtemp())
    steps = max(4, micro // batch)
    settings = {"job.stages": ranks, "job.wait": wait, "job.batch": batch, "train.steps": steps + 1}
    settings |= {"train.check_every": 0, "checkpoint.every": steps + 1, "log.every": 10, "watch.to": ["jsonl"]}
    task = Task(
        verb="train", job="steady:make_job", run=str(folder), layout=layout, update=update, ranks=ranks,
        settings=settings, options={"steps": steps, "answer": str(folder / "answer.json")},
    )  # fmt: skip
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder), entry="steady:worker", payload=task.as_json()))
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    return bubble(json.loads((folder / "answer.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--wait", type=float, default=0.02, help="seconds of a stage's forward; its backward takes two")
    parser.add_argument("--micro", type=int, default=160, help="microbatches in each run")
    asked = parser.parse_args()
    print(f"forward {1e3 * asked.wait:g} ms, backward {2e3 * asked.wait:g} ms, {asked.micro} microbatches")
    for ranks in asked.ranks:
        for name in asked.runs:
            found = measure(name, ranks=ranks, wait=asked.wait, micro=asked.micro)
            print(f"{ranks:3} stages  {name:<10} bubble {found:7.2%}", flush=True)


if __name__ == "__main__":
    main()
