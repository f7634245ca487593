"""Step time of Paceline's loop against hand-written DDP loops, interleaved in one run.

    python benchmarks/overhead.py [--rounds 60] [--ranks 2]

Every rank holds several loops over the same model, data and optimizer, and runs a few steps of each in turn, in an
order that changes from round to round. Printed: the median step time of each, the ratio of paired rounds to the plain
loop with a bootstrap 95 % interval, and the plain loop against its own twin beside it. The weights must be equal bit
for bit at the end.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.feed.feed import make_feed
from paceline.feed.types import Cut
from paceline.order.cursor import Cursor
from paceline.plan.settle import Plan
from paceline.spec.settings import Settings, Train
from paceline.start import Request, failure_screen, start
from paceline.store.runs import RunFolder
from paceline.train.built import build
from paceline.train.replicas import check_replicas
from paceline.world import Place, World

BATCH, WIDTH, STEPS_A_ROUND = 64, 512, 4


class Net(torch.nn.Module):
    """A residual MLP with a few dozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.last = torch.nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.last(x)


def loss(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    kept = batch[1] != 9
    return F.cross_entropy(output[kept], batch[1][kept], reduction="sum"), kept.sum()


def data() -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(4096, 64, generator=generator), torch.randint(0, 10, (4096,), generator=generator)
    )


def job() -> pl.Job:
    return pl.Job(
        model=Net,
        loss=loss,
        train_data=data(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3, momentum=0.9),
        global_batch_size=BATCH,
        max_grad_norm=1.0,
        order="sequential",
    )


def plain(world: World, model: torch.nn.Module) -> Callable[[], object]:
    """The loop that a careful person writes with DDP: global counts, clipping, a finite check."""
    ddp = DistributedDataParallel(model) if world.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rows, share = data(), BATCH // world.world_size
    position = 0

    def step() -> None:
        nonlocal position
        start = position % 4096 + world.rank * share
        batch = torch.utils.data.default_collate([rows[i] for i in range(start, start + share)])
        position += BATCH
        optimizer.zero_grad()
        total, count = loss(ddp(batch[0]), batch)
        joint = torch.stack([total.detach().double(), count.double()])
        work = dist.all_reduce(joint, async_op=True)
        (total * world.world_size).backward()  # DDP averages; the contract wants a sum
        work.wait()
        for parameter in model.parameters():
            parameter.grad.div_(joint[1])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise RuntimeError("not finite")
        optimizer.step()

    return step


def ours(
    world: World, *, check_finite: bool = True, exact: bool = False
) -> tuple[Callable[[], object], torch.nn.Module]:
    """Paceline's feed and step."""
    share = BATCH // world.world_size
    settings = Settings(train=Train(max_grad_norm=1.0, exact=exact))
    plan = Plan(
        layout="ddp", update="sync", processes=world.world_size, replicas=world.world_size, device="cpu",
        backend="gloo", threads=1, global_batch_size=BATCH, micro_batch_size=share,
        num_micro=world.world_size, notes=(),
    )  # fmt: skip
    built = build(job=replace(job(), model=seeded), settings=settings, plan=plan, world=world)
    built.update._check = check_finite
    cut = Cut(global_batch_size=BATCH, micro_batch_size=share, replica=world.rank, replicas=world.world_size)
    feed = iter(make_feed(data=data(), collate=None, order="sequential", seed=0, cut=cut, cursor=Cursor()))
    return lambda: built.step.run(next(feed)).loss, built.model


def seeded() -> torch.nn.Module:
    torch.manual_seed(0)
    return Net()


def worker(payload: dict) -> int:
    """Time the loops in turn, the same order on every rank."""
    world = World.join(place=Place.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    model_a, model_b = seeded(), seeded()
    our_step, our_model = ours(world)
    loops = {"plain loop": plain(world, model_a), "its twin": plain(world, model_b), "paceline": our_step}
    if payload["checks"]:
        loops["without finite check"] = ours(world, check_finite=False)[0]
        counter = {"n": 0}
        checked, checked_model = ours(world)

        def with_check() -> None:
            checked()
            counter["n"] += 1
            if counter["n"] % 100 == 0:
                check_replicas(checked_model, world=world, step=counter["n"])

        loops["with replica check every 100"] = with_check
    if payload["exact"]:
        loops["exact"] = ours(world, exact=True)[0]
    times: dict[str, list[float]] = {name: [] for name in loops}
    shuffle = random.Random(0)
    for number in range(payload["rounds"] + 3):
        for name in shuffle.sample(list(loops), len(loops)):
            world.barrier()
            began = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                loops[name]()
            if number >= 3:
                times[name].append((time.perf_counter() - began) / STEPS_A_ROUND)
    equal = all(torch.equal(p, q) for p, q in zip(model_a.parameters(), our_model.parameters(), strict=True))
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps({"times": times, "equal": equal}))
    world.close()
    return 0


def bootstrap(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def measure(*, rounds: int, ranks: int, checks: bool, exact: bool) -> dict:
    """Start the ranks and read what they measured."""
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    payload = {"rounds": rounds, "checks": checks, "exact": exact, "answer": str(folder / "answer.json")}
    outcome = start(Request(ranks=ranks, run=RunFolder(folder), entry="overhead:worker", payload=payload))
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    return json.loads((folder / "answer.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    answer = measure(rounds=options.rounds, ranks=options.ranks, checks=True, exact=False)
    times = answer["times"]
    base = times["plain loop"]
    print(f"{options.ranks} ranks, {options.rounds} rounds of {STEPS_A_ROUND} steps, torch {torch.__version__}")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        low, high = bootstrap(ratios)
        extra = statistics.median([a - b for a, b in zip(values, base, strict=True)]) * 1e6
        print(
            f"{name:<30} {statistics.median(values) * 1e3:8.3f} ms   ratio {statistics.median(ratios):.4f} "
            f"[{low:.4f}, {high:.4f}]   {extra:+8.1f} us"
        )
    print(f"weights bit for bit those of the plain loop: {answer['equal']}")


if __name__ == "__main__":
    main()
