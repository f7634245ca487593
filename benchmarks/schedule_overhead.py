"""What the interpreter of pipeline programs costs beside torch's own schedule runtime, on the same hand-made stages.

Two processes, gloo, CPU. Each round runs one step of torch's schedule and one of ours, in turns; the ratio of their
times is taken per round. `--work SECONDS` puts a calibrated wait into each stage's forward and backward, so that the
ratio is one of steps; without it, stages do next to nothing and the cost per action shows. Losses and gradients are
held against torch's. The orders of interleaved and zero-bubble schedules are each side's own; where a backward is in
halves, the wait is in the gradient of the input.

    python benchmarks/schedule_overhead.py --work 0.05              # each schedule that torch has
    python benchmarks/schedule_overhead.py --schedules 1f1b zbv [--micro 8] [--rounds 40] [--width 256]
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
from contextlib import AbstractContextManager, nullcontext
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from paceline.comm.process_group import LaunchInfo, World
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.schedule.registry import build
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.torch_internals.private_api import run_backward

TORCH: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "zb_interleaved": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Wait(torch.autograd.Function):
    """Takes `seconds` in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()  # torch's halves of a backward detach outputs in place, which a view forbids

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
    """The interpreter's `Work` on stages of one's own."""

    def __init__(self, modules: dict[int, Stage], inputs: list[Tensor], *, last: int) -> None:
        self.modules, self.inputs, self.last = modules, inputs, last
        self.losses: dict[int, Tensor] = {}

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> StageOutput | Tensor:
        output = self.modules[stage](self.inputs[microbatch] if received is None else received.tensors[0])
        if stage == self.last:
            found = self.losses[microbatch] = loss(output, self.inputs[microbatch])
            return found
        return StageOutput(tensors=[output], spec=None)

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def run_backward(self, outputs: list[Tensor], gradients: list[Tensor | None], *, microbatch: int) -> None:
        run_backward(outputs, gradients)

    def before_backward(self, *, stage: int, microbatch: int) -> None: ...

    def after_backward(self, *, stage: int, microbatch: int) -> None: ...


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the microbatch."""
    return (output - target).square().mean()


def one_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    for name in options.schedules:
        found = compared(name, options, world)
        if world.is_main:
            print(json.dumps(found), flush=True)
    world.barrier()
    world.close()


def compared(name: str, options: argparse.Namespace, world: World) -> dict[str, Any]:
    """One schedule: torch's runtime and ours on the same modules."""
    program = build(name, ranks=world.world_size, micro=options.micro)
    own, last = program.stages_of(world.rank), program.num_stages - 1
    modules = {number: seeded(number, options, share=len(own)) for number in own}
    torch.manual_seed(1000)
    inputs = [torch.randn(options.batch, options.width) for _ in range(options.micro)]
    stages = [PipelineStage(module, n, program.num_stages, world.device) for n, module in modules.items()]
    given: Any = stages if program.num_stages > world.world_size else stages[0]
    theirs = TORCH[name](given, n_microbatches=options.micro, loss_fn=loss, scale_grads=False)
    pipeline, work = Pipeline(program, world=world), Ours(modules, inputs, last=last)
    whole, losses = torch.cat(inputs), list[Tensor]()

    def run_theirs() -> None:
        losses.clear()
        more = {"target": whole, "losses": losses} if last in own else {}
        theirs.step(*([whole] if 0 in own else []), **more)

    def run_ours() -> None:
        pipeline.run(work)

    def seconds(run: Callable[[], object]) -> float:
        for module in modules.values():
            module.zero_grad()
        world.barrier()
        began = time.perf_counter()
        run()
        world.barrier()
        return time.perf_counter() - began

    def gradients(run: Callable[[], object]) -> list[Tensor]:
        seconds(run)
        return [p.grad.clone() for module in modules.values() for p in module.parameters() if p.grad is not None]

    pairs = list(zip(gradients(run_theirs), gradients(run_ours), strict=True))
    pairs += [(right.detach(), work.losses[n].detach()) for n, right in enumerate(losses)]
    far = max(float((right - mine).abs().max() / right.abs().max()) for right, mine in pairs)
    order = random.Random(7)
    rows = []
    for _ in range(options.rounds):
        pair = [("torch", run_theirs), ("ours", run_ours)]
        order.shuffle(pair)
        rows.append({side: seconds(run) for side, run in pair})
    far = max(world.gather_json(far))
    return {"schedule": name, **answer(rows, program.num_actions // world.world_size, far)}


def seeded(number: int, options: argparse.Namespace, *, share: int) -> Stage:
    """A stage of the chain; a rank's stages share its wait."""
    torch.manual_seed(number)
    return Stage(options.width, options.work / share)


def answer(rows: list[dict[str, float]], num_actions: int, far: float) -> dict[str, Any]:
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
        "losses_and_gradients_apart": far,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH), default=list(TORCH))
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
