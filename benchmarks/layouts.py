"""Step time of fsdp, tp and pp on two ranks against hand-written torch doing the same, interleaved in one run.

    python benchmarks/layouts.py                          # each layout in turn
    python benchmarks/layouts.py --layouts tp --rounds 100
    python benchmarks/layouts.py --layouts tp --profile   # where Paceline's step spends its time on rank 0

Every rank holds all loops over the same small Llama, data, AdamW and clipping (`hand.py`). A round is one step of each
in an order that changes, each timed after a barrier until the last rank is done. Printed: medians, and the ratio to
the hand-written loop (for tp the faster of two) as the mean of the log ratios over the rounds that are left when the
slowest 5 % are dropped, with its 95 % bootstrap interval in blocks of neighbouring rounds. "its twin" is the same
loop again: what the machine's noise makes of a ratio of 1. After the last round the weights are held against the
hand-written loop's: the norm of the difference by the norm of the way they have gone.
"""

import argparse
import cProfile
import json
import math
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hand import LOOPS, OTHERS, installed
from hand_model import Llama, Loop, Size, adamw, loss
from overhead import bootstrap
from torch import Tensor, nn

import paceline as pl
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.console import output as talk
from paceline.data.order.cursor import Cursor
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import build_training_setup
from paceline.trainer.setup.prepare import prepare
from paceline.verification.compare_in_lockstep import build_layout_loader

SAMPLES, WARM_UP, PROFILED, KEPT = 512, 5, 5, 0.95
OURS, TWIN = "paceline", "its twin"


class Bench:
    """One rank's loops under one layout."""

    def __init__(self, world: World, *, layout: str, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self.world, self.layout, self.size = world, layout, size
        tokens = torch.randint(0, size.vocabulary, (SAMPLES, size.length + 1), generator=generator)
        self.rows = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return Llama(self.size)

    def batches(self) -> Iterator[list[Tensor]]:
        """This rank's part of each batch: all of it, but for fsdp."""
        replicas = self.world.world_size if self.layout == "fsdp" else 1
        share, place = self.size.batch // replicas, self.world.rank % replicas
        position = 0
        while True:
            begin = position % SAMPLES + place * share
            yield torch.utils.data.default_collate([self.rows[i] for i in range(begin, begin + share)])
            position += self.size.batch

    def paceline(self) -> Loop:
        """The step that `paceline train` takes, and its feed."""
        micro = self.size.micro if self.layout == "pp" else None
        job = pl.Job(
            model=self.model, loss=loss, train_data=self.rows, order="sequential", max_grad_norm=1.0,
            optimizer=lambda named: adamw([p for _, p in named]), global_batch_size=self.size.batch,
        )  # fmt: skip
        asked = {"train.threads": 1, **({"train.micro_batch_size": micro} if micro else {})}
        task = Task(
            verb="train", job="layouts", layout=self.layout, ranks=self.world.world_size, device="cpu",
            settings=asked, origins=dict.fromkeys(asked, "benchmark"),
        )  # fmt: skip
        ready = prepare(task, job=job)
        built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=self.world)
        start_from(built, self.model())
        feed = iter(build_layout_loader(built, Cursor()))
        holding = built.weights

        def whole() -> dict[str, Tensor]:
            return dict(
                holding.gather_full_tensors({name: held.tensor for name, held in holding.local_tensors.items()})
            )

        return Loop(step=lambda: built.step.run(next(feed)), whole=whole)

    def loops(self) -> tuple[dict[str, Loop], list[str]]:
        """By name, the hand-written first; and what could not be had."""
        hand = LOOPS[self.layout]
        found = {name: make(self.model(), self.batches, self.size) for name, make in hand.items()}
        found[TWIN] = list(hand.values())[-1](self.model(), self.batches, self.size)
        found[OURS] = self.paceline()
        missing = []
        for name, make in OTHERS.get(self.layout, {}).items():
            loop = installed(make, self.model(), self.batches, self.size)
            if isinstance(loop, str):
                missing.append(f"left out: {name}, {loop}")
            else:
                found[name] = loop
        return found, missing


def start_from(built: Any, model: nn.Module) -> None:
    """Every parameter's part of the same start weights: the seed of `paceline train` draws others."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = built.weights.local_tensors[name]
            if local.tensor is not None:
                local.tensor.copy_(local.shard_spec.extract(parameter))


def worker(payload: dict[str, Any]) -> int:
    """Time the loops in turn, in the same order on every rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    talk.print_line = lambda *_, **__: None  # type: ignore[assignment]
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    bench = Bench(world, layout=payload["layout"], size=Size(**payload["size"]))
    loops, missing = bench.loops()
    times: dict[str, list[float]] = {name: [] for name in loops}
    busy: dict[str, list[float]] = {name: [] for name in loops}
    shuffle = random.Random(0)
    for number in range(payload["rounds"] + WARM_UP):
        for name in shuffle.sample(list(loops), len(loops)):
            took, computed = timed(loops[name].step, world)
            if number >= WARM_UP:
                times[name].append(took)
                busy[name].append(computed)
    wholes = {name: loop.whole() for name, loop in loops.items()}
    begun = dict(bench.model().named_parameters())
    far = {name: [apart(weights, wholes[base], begun) for base in wholes] for name, weights in wholes.items()}
    everybody = world.gather_json({"times": times, "busy": busy, "far": far})
    if payload["profile"]:
        profiled(loops, world, folder=Path(payload["answer"]).parent)
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps({"ranks": everybody, "missing": missing}))
    world.barrier()
    return 0


def timed(step: Callable[[], object], world: World) -> tuple[float, float]:
    """Seconds of this rank, and of the processor in its main thread, which runs the backward too."""
    world.barrier()
    computed, began = time.thread_time(), time.perf_counter()
    step()
    return time.perf_counter() - began, time.thread_time() - computed


def profiled(loops: dict[str, Loop], world: World, *, folder: Path) -> None:
    """A few steps of rank 0 by function, of our loop and of the last one by hand, in processor time."""
    for name in (TWIN, OURS):
        profile = cProfile.Profile(time.thread_time)
        for _ in range(PROFILED):
            world.barrier()
            if world.is_main:
                profile.enable()
            loops[name].step()
            profile.disable()
        if world.is_main:
            profile.dump_stats(folder / f"{name}.profile")


def apart(weights: dict[str, Tensor], right: dict[str, Tensor], begun: dict[str, Tensor]) -> float:
    """The difference of what both have, by the way from the start."""
    names = sorted(set(weights) & set(right))
    difference = sum(float((weights[n].double() - right[n].double()).square().sum()) for n in names)
    way = sum(float((right[n].double() - begun[n].detach().double()).square().sum()) for n in names)
    return math.sqrt(difference / way)


def measure(layout: str, *, size: dict[str, int], rounds: int, ranks: int, profile: bool = False) -> dict[str, Any]:
    """Start the ranks; the slowest rank's times, and the farthest one's weights."""
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    payload = {
        "layout": layout, "size": size, "rounds": rounds, "profile": profile, "answer": str(folder / "answer.json"),
    }  # fmt: skip
    outcome = start(LaunchRequest(ranks=ranks, run=RunFolder(folder), entry="layouts:worker", payload=payload))
    if not (folder / "answer.json").exists():
        sys.exit(failure_screen(outcome))
    answer = json.loads((folder / "answer.json").read_text())
    names = list(answer["ranks"][0]["times"])
    times = {name: [max(t) for t in zip(*(r["times"][name] for r in answer["ranks"]), strict=True)] for name in names}
    base = min(LOOPS[layout], key=lambda name: statistics.median(times[name]))
    place = names.index(base)
    far = {name: max(rank["far"][name][place] for rank in answer["ranks"]) for name in names}
    for found in sorted(folder.glob("*.profile")):
        print(found.stem, f"{PROFILED} steps")
        pstats.Stats(str(found)).sort_stats("tottime").print_stats(32)
    busy = {name: max(statistics.median(rank["busy"][name]) for rank in answer["ranks"]) for name in names}
    return {"times": times, "busy": busy, "far": far, "base": base, "missing": answer["missing"]}


def ratio(values: list[float], base: list[float], kept: list[int]) -> tuple[float, float, float]:
    """The mean of the log ratios as a ratio, and its interval."""
    logs = [math.log(values[i] / base[i]) for i in kept]
    low, high = bootstrap(logs, block=max(1, len(logs) // 20))
    return math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high)


def compared(answer: dict[str, Any]) -> list[str]:
    """A line for each loop."""
    times, base = answer["times"], answer["base"]
    rounds = sorted(range(len(times[base])), key=lambda i: sum(values[i] for values in times.values()))
    kept = sorted(rounds[: math.ceil(len(rounds) * KEPT)])
    lines = []
    for name, values in times.items():
        of = base if name != TWIN else list(times)[list(times).index(TWIN) - 1]
        middle, low, high = ratio(values, times[of], kept)
        lines.append(
            f"  {name:<20}{statistics.median(values) * 1e3:9.2f} ms, computing {answer['busy'][name] * 1e3:8.2f} ms   "
            f"ratio to {of!r} {middle:.4f} [{low:.4f}, {high:.4f}]   weights apart {answer['far'][name]:.1e}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    default = {"width": 256, "blocks": 4, "heads": 8, "hidden": 688, "vocabulary": 1024, "length": 64, "batch": 8}
    for name, value in {**default, "micro": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    size = {name: getattr(asked, name) for name in (*default, "micro")}
    print(f"{asked.ranks} ranks, {asked.rounds} rounds, {size}, torch {torch.__version__}")
    for layout in asked.layouts:
        answer = measure(layout, size=size, rounds=asked.rounds, ranks=asked.ranks, profile=asked.profile)
        print(layout, *compared(answer), *(f"  {line}" for line in answer["missing"]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
