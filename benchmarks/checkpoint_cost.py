"""What checkpoints cost a training: in memory at every step, and on disk, beside torch's asynchronous saves.

    python benchmarks/checkpoint_cost.py                                # 50 MB of state on each of 2 ranks
    python benchmarks/checkpoint_cost.py --megabytes 1000 --rounds 10
    python benchmarks/checkpoint_cost.py --megabytes 1 --step 0.02 --rounds 2 --steps 3      # try it

The model is a pipeline of two stages, so that each rank has its own state (weights and two moments of Adam), and the
ranks exchange next to nothing. Its forward sleeps for as long as a step is shorter than --step seconds. A round is one
block of --steps steps of each kind, in an order that changes from round to round:

    no saves             Paceline, which only trains
    memory               a checkpoint in memory after each step
    disk                 after the first step of the block, a checkpoint on disk
    background           the same with checkpoint.background
    torch, no saves      a hand-written loop of the same stages
    torch async_save     the same, and after the first step torch.distributed.checkpoint.async_save

Printed for each kind: the time of a step without it; the mean over the rounds of the log ratio of its blocks to those
without saves, as a ratio, with its 95 % interval by Student's t; and what a save adds in milliseconds. A write in the
background that has not ended with its block is waited for outside the measured time, and the wait is printed. The last
lines say how long a plain copy of the same bytes takes on all ranks at once, which is the limit of a copy in memory,
and SHA-256 of them.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from two_commits import interval

import paceline as pl
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.session import open_session
from paceline.trainer.setup.prepare import prepare

RANKS, WARM_UP, BYTES_PER_PARAMETER = 2, 4, 12  # fp32: the parameter and two moments
PACELINE, TORCH = ("no saves", "memory", "disk", "background"), ("torch, no saves", "torch async_save")
PAUSE = [0.0]  # seconds that each block sleeps


class Block(nn.Module):
    """A linear layer whose forward takes longer than it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PAUSE[0])
        return x + torch.tanh(self.linear(x))


def make_model(width: int, blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


class PacelineLoop:
    """The loop that `paceline train` runs; its saves are due when a block says so."""

    def __init__(self, world: World, payload: dict[str, Any]) -> None:
        width, blocks = payload["width"], payload["blocks"]
        job = pl.Job(
            model=lambda: make_model(width, blocks),
            loss=loss,
            train_data=torch.utils.data.TensorDataset(torch.randn(64, width), torch.zeros(64)),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
            global_batch_size=2,
        )
        settings = {
            "train.steps": 10**9, "train.threads": 1, "train.micro_batch_size": 2, "log.every": 10**9,
            "checkpoint.every": 10**9, "checkpoint.keep": 1, "checkpoint.background": True,
            "checkpoint.memory_every": 1, "watch.to": ["jsonl"],
        }  # fmt: skip
        task = Task(
            verb="train", job="checkpoint_cost", layout="pp=2", ranks=RANKS, device="cpu",
            run=str(Path(payload["folder"]) / "run"), settings=settings, origins=dict.fromkeys(settings, "benchmark"),
            memory_folder=payload["memory_folder"],
        )  # fmt: skip
        self.session = open_session(prepare(task, job=job), world=world)
        self._batches = self.session.loop.batches()

    def step(self, *, in_memory: bool = False) -> None:
        loop = self.session.loop
        loop._next_memory_step = 0 if in_memory else math.inf
        loop.step(next(self._batches))

    def run_block(self, kind: str, steps: int) -> Callable[[], object]:
        """Run the steps of a block, and return a function that waits for a write in the background."""
        loop = self.session.loop
        for number in range(steps):
            self.step(in_memory=kind == "memory")
            if number == 0 and kind in ("disk", "background"):
                loop.save(in_background=kind == "background")
        return loop._checkpointer.complete


class TorchLoop:
    """A loop of the same stages by hand: one microbatch, sent from the first stage to the second and back."""

    def __init__(self, world: World, payload: dict[str, Any]) -> None:
        blocks, self._world = payload["blocks"], world
        half = blocks // RANKS
        self.stage = make_model(payload["width"], blocks)[world.rank * half : (world.rank + 1) * half]
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-4)
        self._batch = torch.randn(2, payload["width"])
        self._group = dist.new_group(backend="gloo")  # torch saves in a thread, which needs messages of its own
        self._folder = Path(payload["folder"]) / "torch"

    def step(self) -> None:
        self.optimizer.zero_grad()
        if self._world.rank == 0:
            output = self.stage(self._batch)
            dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            received = torch.empty_like(self._batch).requires_grad_()
            with torch.no_grad():
                dist.recv(received, 0)
            total, count = loss(self.stage(received), [])
            (total / count).backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
        self.optimizer.step()

    def run_block(self, kind: str, steps: int) -> Callable[[], object]:
        """Run the steps of a block, and return a function that waits for a write in the background."""
        wait: Callable[[], object] = lambda: None  # noqa: E731
        for number in range(steps):
            self.step()
            if number == 0 and kind == "torch async_save":
                state = {"model": self.stage.state_dict(), "optimizer": self.optimizer.state_dict()}
                named = {f"rank{self._world.rank}": state}  # else both ranks would save the same names
                wait = dcp.async_save(named, checkpoint_id=str(self._folder), process_group=self._group).result
        return wait


def calibrate(steps: list[Callable[[], None]], *, world: World, seconds: float, blocks: int) -> None:
    """Let each block sleep so long that a step takes `seconds`."""
    for _ in range(WARM_UP):
        for step in steps:
            step()
    times = []
    for _ in range(WARM_UP):
        world.barrier()
        start_time = time.perf_counter()
        steps[0]()
        times.append(time.perf_counter() - start_time)
    PAUSE[0] = max(0.0, float(world.share_json(seconds - statistics.median(times)))) / blocks


def copy_seconds(world: World, num_bytes: int) -> float:
    """The median time of a copy of `num_bytes` bytes in memory, on all ranks at once."""
    source, target = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    times = []
    for _ in range(7):
        world.barrier()
        start_time = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start_time)
    return statistics.median(times)


def digest_seconds(world: World, num_bytes: int) -> float:
    """The time of the SHA-256 of `num_bytes` bytes, on all ranks at once."""
    data = bytes(num_bytes)
    world.barrier()
    start_time = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - start_time


def worker(payload: dict[str, Any]) -> int:
    """Run the blocks in turn, in the same order on every rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=600)
    ours, torch_loop = PacelineLoop(world, payload), TorchLoop(world, payload)
    calibrate([ours.step, torch_loop.step], world=world, seconds=payload["step"], blocks=payload["blocks"])
    kinds = [*PACELINE, *TORCH]
    ours.run_block("memory", 3)  # the first ones allocate memory
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    waits: dict[str, list[float]] = {kind: [] for kind in kinds}
    shuffle = random.Random(0)
    for _ in range(payload["rounds"]):
        for kind in shuffle.sample(kinds, len(kinds)):
            loop = ours if kind in PACELINE else torch_loop
            if world.is_main and kind == "torch async_save":
                shutil.rmtree(torch_loop._folder, ignore_errors=True)
            ours.session.loop._send_heartbeat(phase="save")  # or the supervisor takes the other loop's steps for a hang
            world.barrier()
            start_time = time.perf_counter()
            wait = loop.run_block(kind, payload["steps"])
            world.barrier()
            end_time = time.perf_counter()
            wait()
            times[kind].append(end_time - start_time)
            waits[kind].append(time.perf_counter() - end_time)
    num_bytes = sum(p.numel() for p in torch_loop.stage.parameters()) * BYTES_PER_PARAMETER
    limits = {"copy": copy_seconds(world, num_bytes), "digest": digest_seconds(world, num_bytes)}
    if world.is_main:
        answer = {"times": times, "waits": waits, "bytes": num_bytes, **limits}
        (Path(payload["folder"]) / "answer.json").write_text(json.dumps(answer))
    ours.session.close()
    return 0


def measure(payload: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks and read what they measured."""
    with tempfile.TemporaryDirectory(dir=payload.pop("disk")) as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        run = RunFolder(Path(folder))
        request = LaunchRequest(
            ranks=RANKS, run=run, entry="checkpoint_cost:worker", payload={**payload, "folder": folder}
        )
        outcome = start(request)
        if outcome.exit_code:
            sys.exit(failure_screen(outcome))
        answer: dict[str, Any] = json.loads((Path(folder) / "answer.json").read_text())
        return answer


def report(answer: dict[str, Any], *, steps: int) -> list[str]:
    """A line for each kind of save, and the limits."""
    times, lines = answer["times"], []
    for kind in (*PACELINE[1:], *TORCH[1:]):
        base = times[PACELINE[0] if kind in PACELINE else TORCH[0]]
        logs = [math.log(block / without) for block, without in zip(times[kind], base, strict=True)]
        middle, low, high = interval(logs)
        saves = steps if kind == "memory" else 1
        added = statistics.median(block - without for block, without in zip(times[kind], base, strict=True)) / saves
        lines.append(
            f"{kind:<18} step {statistics.median(base) / steps:.3f} s   ratio {middle:.4f} [{low:.4f}, {high:.4f}]   "
            f"{added * 1e3:+8.1f} ms a save, one in {steps // saves} steps; "
            f"{statistics.median(answer['waits'][kind]):.2f} s left to write"
        )
    step_seconds = statistics.median(times["no saves"]) / steps
    for name, text in (("copy", "a copy of these bytes"), ("digest", "their SHA-256")):
        seconds = answer[name]
        lines.append(
            f"{text}, on {RANKS} ranks at once: {seconds * 1e3:.1f} ms, "
            f"{answer['bytes'] / seconds / 1e9:.1f} GB/s a rank, {seconds / step_seconds:.2%} of a step"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=50, help="state of each rank")
    parser.add_argument("--step", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each kind, each with one save on disk")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--disk", default=None, help="a folder on the disk to write to")
    asked = parser.parse_args()
    if asked.rounds < 2:
        sys.exit("--rounds must be at least 2: an interval needs two values")
    width = 128 if asked.megabytes < 10 else 1024 if asked.megabytes < 200 else 4096
    per_rank = max(1, round(asked.megabytes * 1e6 / (width * width * BYTES_PER_PARAMETER)))
    payload = {"width": width, "blocks": RANKS * per_rank, "step": asked.step, "rounds": asked.rounds}
    answer = measure({**payload, "steps": asked.steps, "disk": asked.disk})
    print(
        f"{RANKS} ranks, {answer['bytes'] / 1e6:.1f} MB of state each, {asked.rounds} rounds, torch {torch.__version__}"
    )
    print("\n".join(report(answer, steps=asked.steps)))


if __name__ == "__main__":
    main()
