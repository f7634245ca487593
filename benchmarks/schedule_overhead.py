"""What the interpreter of pipeline programs costs beside torch's own schedule runtime, on the same hand-made stages.

Two processes, gloo, CPU. Each round runs one step of torch's schedule and one of ours, in turns; the ratio of their
times is taken per round. `--work SECONDS` puts a calibrated wait into each stage's forward and backward, so that the
ratio is one of steps; without it, stages do next to nothing and the cost per action shows.

    python benchmarks/schedule_overhead.py [--schedule 1f1b] [--micro 8] [--rounds 40] [--work 0.02] [--width 256]
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.place.stages import Sent
from paceline.schedule.build import build
from paceline.step.pipeline import Pipeline
from paceline.world import Place, World

TORCH = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Wait(torch.autograd.Function):
    """Takes `seconds` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    """One linear layer and a wait."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return Wait.apply(y, self.seconds) if self.seconds else y


class Ours:
    """The interpreter's `Work` on a stage of one's own."""

    def __init__(self, module: nn.Module, inputs: list[Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.module, self.inputs, self.loss = module, inputs, loss
        self.is_last = dist.get_rank() == dist.get_world_size() - 1

    def forward(self, *, stage: int, microbatch: int, received: Sent | None) -> Sent | Tensor:
        output = self.module(self.inputs[microbatch] if received is None else received.tensors[0])
        if self.is_last:
            return self.loss(output, self.inputs[microbatch])
        return Sent(tensors=[output], spec=None)

    def before_backward(self, *, stage: int, microbatch: int) -> None: ...

    def after_backward(self, *, stage: int, microbatch: int) -> None: ...


def one_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = World.join(place=Place.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    torch.manual_seed(world.rank)
    module = Stage(options.width, options.work)
    inputs = [torch.randn(options.batch, options.width) for _ in range(options.micro)]
    loss = lambda output, target: (output - target).square().mean()  # noqa: E731
    stage = PipelineStage(module, world.rank, world.world_size, world.device)
    theirs = TORCH[options.schedule](stage, n_microbatches=options.micro, loss_fn=loss, scale_grads=False)
    program = build(options.schedule, ranks=world.world_size, micro=options.micro)
    pipeline, work = Pipeline(program, world=world), Ours(module, inputs, loss)
    whole = torch.cat(inputs)

    def run_theirs() -> None:
        is_first, is_last = world.rank == 0, world.rank == world.world_size - 1
        theirs.step(*([whole] if is_first else []), **({"target": whole} if is_last else {}))

    def seconds(run: Callable[[], object]) -> float:
        module.zero_grad()
        world.barrier()
        began = time.perf_counter()
        run()
        world.barrier()
        return time.perf_counter() - began

    def gradient(run: Callable[[], object]) -> Tensor:
        seconds(run)
        assert module.layer.weight.grad is not None
        return module.layer.weight.grad.clone()

    run_ours = lambda: pipeline.run(work)  # noqa: E731
    equal = torch.equal(gradient(run_theirs), gradient(run_ours))
    order = random.Random(7)
    rows = []
    for _ in range(options.rounds):
        pair = [("torch", run_theirs), ("ours", run_ours)]
        order.shuffle(pair)
        took = {name: seconds(run) for name, run in pair}
        rows.append(took)
    if world.is_main:
        print(json.dumps(answer(rows, program.num_actions // world.world_size, equal)))
    world.barrier()
    world.close()


def answer(rows: list[dict[str, float]], num_actions: int, equal: bool) -> dict[str, Any]:
    """Medians, and the ratio of each round with a bootstrap bound on its median."""
    ratios = [row["ours"] / row["torch"] for row in rows]
    draw = random.Random(1)
    again = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "torch_ms": round(1e3 * median(row["torch"] for row in rows), 3),
        "ours_ms": round(1e3 * median(row["ours"] for row in rows), 3),
        "ratio": round(median(ratios), 4),
        "ratio_mean": round(mean(ratios), 4),
        "upper_95": round(again[int(0.975 * len(again))], 4),
        "ours_per_action_us": round(1e6 * median(row["ours"] for row in rows) / num_actions, 1),
        "gradients_equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=list(TORCH), default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    if "RANK" in os.environ:
        one_rank(options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(options.ranks)}
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", *sys.argv], env=base | {"RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
