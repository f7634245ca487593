"""Each way to compress gradients beside ddp without: bytes sent, time of a step, loss after equal samples.

    python benchmarks/compress.py                      # two ranks on this machine, over loopback
    python benchmarks/compress.py --rounds 400 --ranks 3 --ways none int8 topk,ratio=0.001
    python benchmarks/compress.py --torch              # and torch's DistributedDataParallel with its own hooks

Every rank holds one small Llama for each way, all with the same start weights, samples and AdamW. A round is one step
of each, in an order that changes, timed after a barrier until the last rank is done. Printed: what a rank sends in a
step (counted by operation, as `compare` does), the median step, its ratio to ddp without compression with a 95 %
bootstrap interval in blocks of neighbouring rounds, the loss over the last tenth of the rounds, and its distance to
that of ddp. The text is a chain of tokens of which each has four that may follow, so that there is something to learn.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hand_model import Llama, Size, adamw, loss
from overhead import bootstrap
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import paceline as pl
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.console import output as talk
from paceline.data.order.cursor import Cursor
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.profiling.model_tracing.communication_counter import CommunicationCounter
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import build_training_setup
from paceline.trainer.setup.prepare import prepare
from paceline.verification.compare_in_lockstep import build_layout_loader

SAMPLES, WARM_UP, FOLLOWERS = 4096, 5, 4
PLAIN = "none"
WAYS = (PLAIN, "bf16", "fp16", "int8", "powersgd", "topk")
Step = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One step, which gives its loss; `counted` where what it sends can be seen from Python."""

    step: Step
    counted: bool = True


def rows(size: Size) -> torch.utils.data.TensorDataset:
    """Walks along a graph in which each token has a few that may follow."""
    generator = torch.Generator().manual_seed(0)
    follow = torch.randint(0, size.vocabulary, (size.vocabulary, FOLLOWERS), generator=generator)
    steps = torch.randint(0, FOLLOWERS, (SAMPLES, size.length + 1), generator=generator)
    tokens = torch.empty_like(steps)
    tokens[:, 0] = torch.randint(0, size.vocabulary, (SAMPLES,), generator=generator)
    for place in range(size.length):
        tokens[:, place + 1] = follow[tokens[:, place], steps[:, place]]
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def model(size: Size) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return Llama(size)


def ours(how: str, world: World, size: Size) -> Way:
    """The step that `paceline train --compress` takes, and its feed."""
    job = pl.Job(
        model=lambda: model(size), loss=loss, train_data=rows(size), order="sequential", max_grad_norm=1.0,
        optimizer=lambda named: adamw([p for _, p in named]), global_batch_size=size.batch,
    )  # fmt: skip
    asked = {"train.threads": 1}
    task = Task(
        verb="train", job="compress", layout="ddp", compress=how, ranks=world.world_size, device="cpu",
        settings=asked, origins=dict.fromkeys(asked, "benchmark"),
    )  # fmt: skip
    ready = prepare(task, job=job)
    built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=world)
    given = _endless(lambda: build_layout_loader(built, Cursor()))

    def step() -> float:
        return float(built.step.run(next(given)).loss)

    return Way(step=step)


def _endless(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


def theirs(hook: str, world: World, size: Size) -> Way:
    """`DistributedDataParallel` with a hook of torch's, on the same batches."""
    wrapped = nn.parallel.DistributedDataParallel(model(size))
    if hook == "fp16":  # that of bf16 wants GPUs
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, data = adamw(wrapped.parameters()), rows(size)
    share, count = size.batch // world.world_size, size.batch * size.length
    position = 0

    def step() -> float:
        nonlocal position
        begin = position % (SAMPLES - size.batch) + world.rank * share
        batch: list[Tensor] = torch.utils.data.default_collate([data[i] for i in range(begin, begin + share)])
        position += size.batch
        optimizer.zero_grad()
        total, _ = loss(wrapped(batch[0]), batch)
        (total * world.world_size / count).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        joint = total.detach().double()
        dist.all_reduce(joint)
        return float(joint) / count

    return Way(step=step, counted=False)


def worker(payload: dict[str, Any]) -> int:
    """Time the ways in turn, in the same order on every rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    talk.print_line = lambda *_, **__: None  # type: ignore[assignment]
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=300)
    size = Size(**payload["size"])
    ways = {how: ours(how, world, size) for how in payload["ways"]}
    ways |= {f"torch {hook}": theirs(hook, world, size) for hook in payload["torch"]}
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    shuffle = random.Random(0)
    for number in range(payload["rounds"] + WARM_UP):
        for name in shuffle.sample(list(ways), len(ways)):
            world.barrier()
            began = time.perf_counter()
            losses[name].append(ways[name].step())
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    sent = {name: _sent(way) for name, way in ways.items() if way.counted}
    everybody = world.gather_json({"times": times, "losses": losses, "sent": sent})
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps(everybody))
    world.barrier()
    return 0


def _sent(way: Way) -> float:
    with CommunicationCounter() as sent:
        way.step()
    return sent.total_bytes


def measure(ways: list[str], hooks: list[str], *, size: dict[str, int], rounds: int, ranks: int) -> list[str]:
    """Start the ranks; a line for each way."""
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    answer = folder / "answer.json"
    payload = {"ways": ways, "torch": hooks, "size": size, "rounds": rounds, "answer": str(answer)}
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder), entry="compress:worker", payload=payload))
    if not answer.exists():
        sys.exit(failure_screen(outcome))
    found = json.loads(answer.read_text())
    times = {name: [max(t) for t in zip(*(r["times"][name] for r in found), strict=True)] for name in found[0]["times"]}
    return [_line(name, found, times) for name in times]


def _line(name: str, found: list[dict[str, Any]], times: dict[str, list[float]]) -> str:
    base = PLAIN if PLAIN in times else next(iter(times))
    logs = [math.log(one / other) for one, other in zip(times[name], times[base], strict=True)]
    low, high = bootstrap(logs, block=max(1, len(logs) // 20))
    sent = max(rank["sent"].get(name, math.nan) for rank in found)
    share = sent / max(rank["sent"][base] for rank in found)
    last = max(1, len(times[name]) // 10)
    end, right = (statistics.fmean(found[0]["losses"][each][-last:]) for each in (name, base))
    bytes_said = f"{sent:14,.0f} B ({share:6.3f})" if sent == sent else f"{'not counted':>25}"
    return (
        f"  {name:<22}{bytes_said}   {statistics.median(times[name]) * 1e3:9.2f} ms   ratio "
        f"{math.exp(statistics.fmean(logs)):.3f} [{math.exp(low):.3f}, {math.exp(high):.3f}]   "
        f"loss {end:.4f} ({end - right:+.4f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--torch", action="store_true", help="torch's DistributedDataParallel with its hooks, too")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    default = {"width": 256, "blocks": 4, "heads": 8, "hidden": 688, "vocabulary": 1024, "length": 64, "batch": 12}
    for name, value in default.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    size = {name: getattr(asked, name) for name in default}
    print(f"{asked.ranks} ranks, {asked.rounds} rounds, {size}, torch {torch.__version__}")
    hooks = [PLAIN, "fp16", "powersgd"] if asked.torch else []
    micro = {"micro": size["batch"] // asked.ranks}
    print(*measure(asked.ways, hooks, size={**size, **micro}, rounds=asked.rounds, ranks=asked.ranks), sep="\n")


if __name__ == "__main__":
    main()
