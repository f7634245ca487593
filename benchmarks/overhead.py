"""Step time of Paceline's whole loop against hand-written loops, interleaved step by step in one run.

    python benchmarks/overhead.py                        # 2 ranks: plain DDP, its twin, Paceline, Fabric, Accelerate
    python benchmarks/overhead.py --ranks 1 --width 64   # one small process: what is left is the loop itself
    python benchmarks/overhead.py --checks               # each default check, on and off

Every rank holds all loops over the same model, data and optimizer. A round is one step of each, in an order that
changes from round to round, each step timed alone after a barrier. Paceline's is the loop that `paceline train` runs:
feed, step, finite check, replica check, heartbeat, log lines to its default sinks, signals; only saving is left out.
All other loops keep the same contract: global counts, clipping, a finite check. Printed: the median step, the mean of
paired differences to the plain loop over the rounds that are left when the slowest 5 % (over all loops together) are
dropped, and its bootstrap 95 % interval in blocks of 20 rounds. The weights must be the plain loop's, bit for bit.
"""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.session import open_session
from paceline.trainer.setup.prepare import prepare

Step = Callable[[], object]
SAMPLES, WARM_UP, BLOCK = 4096, 30, 20


class Net(nn.Module):
    """A residual MLP with 20 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.last(x)


def loss(output: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy over the samples that are not masked."""
    kept = batch[1] != 9
    return F.cross_entropy(output[kept], batch[1][kept], reduction="sum"), kept.sum()


class Bench:
    """One rank's loops over the same model and data."""

    def __init__(self, world: World, *, width: int, batch: int, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.world, self.width, self.batch, self.folder = world, width, batch, folder
        self.rows = torch.utils.data.TensorDataset(
            torch.randn(SAMPLES, 64, generator=generator), torch.randint(0, 10, (SAMPLES,), generator=generator)
        )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net(self.width)

    def batches(self) -> Iterator[list[Tensor]]:
        """This rank's share of each global batch, read and collated as a DataLoader without workers does."""
        share, position = self.batch // self.world.world_size, 0
        while True:
            start = position % SAMPLES + self.world.rank * share
            yield torch.utils.data.default_collate([self.rows[i] for i in range(start, start + share)])
            position += self.batch

    def plain(self) -> tuple[Step, nn.Module]:
        """The loop that a careful person writes with DDP."""
        model, world, batches = self.model(), self.world, self.batches()
        ddp = DistributedDataParallel(model) if world.world_size > 1 else model
        optimizer = sgd(model)

        def step() -> None:
            batch = next(batches)
            optimizer.zero_grad()
            total, count = loss(ddp(batch[0]), batch)
            joint = torch.stack([total.detach().double(), count.double()])
            work = dist.all_reduce(joint, async_op=True) if world.world_size > 1 else None
            (total * world.world_size).backward()  # DDP averages; the contract wants a sum
            if work is not None:
                work.wait()
            torch._foreach_div_([p.grad for p in model.parameters()], joint[1].item())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise RuntimeError("not finite")
            optimizer.step()

        return step, model

    def paceline(
        self, name: str, *, finite: bool = True, pulse: bool = True, **settings: object
    ) -> tuple[Step, nn.Module]:
        """What `paceline train` runs, with some of its checks off."""
        job = pl.Job(
            model=self.model, loss=loss, train_data=self.rows, optimizer=lambda named: sgd(named),
            global_batch_size=self.batch, max_grad_norm=1.0, order="sequential",
        )  # fmt: skip
        asked = {"train.steps": 10**9, "train.threads": 1, **settings}
        ranks = self.world.world_size
        task = Task(
            verb="train", job="overhead", layout="ddp" if ranks > 1 else "single", ranks=ranks, device="cpu",
            run=str(self.folder / name), settings=asked, origins=dict.fromkeys(asked, "benchmark"),
        )  # fmt: skip
        session = open_session(prepare(task, job=job), world=self.world)
        session.setup.update._checks_finite = finite
        if not pulse:
            session.loop._heartbeat = None
        batches = session.loop.batches()
        return lambda: session.loop.step(next(batches)), session.setup.model

    def fabric(self) -> tuple[Step, nn.Module]:
        """Lightning Fabric with the same contract."""
        from lightning.fabric import Fabric

        ranks = self.world.world_size
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        fabric.launch()
        raw, batches = self.model(), self.batches()
        model, optimizer = fabric.setup(raw, sgd(raw))

        def step() -> None:
            batch = next(batches)
            optimizer.zero_grad()
            total, count = loss(model(batch[0]), batch)
            fabric.backward(total * ranks / fabric.all_reduce(count, reduce_op="sum"))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=True)
            optimizer.step()

        return step, raw

    def accelerate(self) -> tuple[Step, nn.Module]:
        """Accelerate with the same contract."""
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        raw, batches, ranks = self.model(), self.batches(), self.world.world_size
        model, optimizer = accelerator.prepare(raw, sgd(raw))

        def step() -> None:
            batch = next(batches)
            optimizer.zero_grad()
            total, count = loss(model(batch[0]), batch)
            accelerator.backward(total * ranks / accelerator.reduce(count, reduction="sum"))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise RuntimeError("not finite")
            optimizer.step()

        return step, raw


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The same optimizer for a model and for (name, parameter) pairs."""
    given = parameters.parameters() if isinstance(parameters, nn.Module) else [p for _, p in parameters]  # type: ignore[attr-defined]
    return torch.optim.SGD(given, lr=1e-3, momentum=0.9)


def make_loops(bench: Bench, *, checks: bool) -> tuple[dict[str, tuple[Step, nn.Module]], list[str]]:
    """The loops by name, and what could not be had."""
    loops = {"plain loop": bench.plain(), "its twin": bench.plain(), "paceline": bench.paceline("whole")}
    if checks:
        loops["no finite check"] = bench.paceline("finite", finite=False)
        loops["no replica check"] = bench.paceline("replicas", **{"train.check_every": 0})
        loops["no heartbeat"] = bench.paceline("pulse", pulse=False)
        loops["no log lines"] = bench.paceline("log", **{"log.every": 10**9})
        return loops, []
    missing = []
    for name in ("fabric", "accelerate"):
        try:
            loops[name] = getattr(bench, name)()
        except ImportError as error:
            missing.append(f"{name} is not installed ({error}): pip install lightning accelerate")
    return loops, missing


def worker(payload: dict) -> int:
    """Time the loops in turn, in the same order on every rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    if world.world_size > 1:
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "bench")  # the others then join the world that is there
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # else they would make one
    folder = Path(payload["folder"])
    bench = Bench(world, width=payload["width"], batch=payload["batch"], folder=folder)
    loops, missing = make_loops(bench, checks=payload["checks"])
    times: dict[str, list[float]] = {name: [] for name in loops}
    shuffle = random.Random(0)
    for number in range(payload["rounds"] + WARM_UP):
        for name in shuffle.sample(list(loops), len(loops)):
            world.barrier()
            began = time.perf_counter()
            loops[name][0]()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    pairs = zip(loops["plain loop"][1].parameters(), loops["paceline"][1].parameters(), strict=True)
    equal = all(torch.equal(p, q) for p, q in pairs)
    if world.is_main:
        answer = {"times": times, "equal": equal, "missing": missing}
        (folder / "answer.json").write_text(json.dumps(answer))
    world.barrier()
    return 0


def measure(*, rounds: int, ranks: int, width: int, batch: int, checks: bool) -> dict:
    """Start the ranks and read what they measured."""
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    payload = {"rounds": rounds, "checks": checks, "width": width, "batch": batch, "folder": str(folder)}
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder), entry="overhead:worker", payload=payload))
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    return json.loads((folder / "answer.json").read_text())


def compared(times: dict[str, list[float]], *, base: str, kept: float = 0.95) -> list[str]:
    """A line per loop: its paired difference to `base`."""
    rounds = sorted(range(len(times[base])), key=lambda i: sum(values[i] for values in times.values()))
    chosen = sorted(rounds[: int(len(rounds) * kept)])
    typical = statistics.mean(times[base][i] for i in chosen)
    lines = []
    for name, values in times.items():
        extra = [values[i] - times[base][i] for i in chosen]
        middle, (low, high) = statistics.mean(extra), bootstrap(extra)
        lines.append(
            f"{name:<18}{statistics.median(values) * 1e3:9.3f} ms   {middle * 1e6:+9.1f} us "
            f"[{low * 1e6:+8.1f}, {high * 1e6:+8.1f}]   ratio {1 + middle / typical:.4f} "
            f"[{1 + low / typical:.4f}, {1 + high / typical:.4f}]"
        )
    return lines


def bootstrap(values: list[float], *, block: int = BLOCK) -> tuple[float, float]:
    """A 95 % interval of the mean; `block` neighbours are drawn together, since machines drift."""
    blocks = [values[i : i + block] for i in range(0, len(values), block)]
    draw = random.Random(1)
    means = sorted(statistics.fmean(v for b in draw.choices(blocks, k=len(blocks)) for v in b) for _ in range(1000))
    return means[25], means[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--checks", action="store_true", help="each default check on and off, instead of other loops")
    asked = parser.parse_args()
    answer = measure(rounds=asked.rounds, ranks=asked.ranks, width=asked.width, batch=asked.batch, checks=asked.checks)
    print(
        f"{asked.ranks} ranks, {asked.rounds} rounds, width {asked.width}, batch {asked.batch}, "
        f"torch {torch.__version__}"
    )
    base = "paceline" if asked.checks else "plain loop"
    print(f"{'':<18}{'median':>12}   mean difference to {base!r} [95 %]")
    print("\n".join(compared(answer["times"], base=base)))
    print(*answer["missing"], sep="\n", end="\n" if answer["missing"] else "")
    print(f"weights bit for bit those of the plain loop: {answer['equal']}")


if __name__ == "__main__":
    main()
