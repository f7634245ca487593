"""One process, replicas as threads, and processes (ddp) on the text example: step times, interleaved in one run.

python benchmarks/threads.py [--rounds 30] [--replicas 2] [--width 128]

Every loop runs the same microbatches. One process gives each operation all cores; a replica or a rank has its share.
While one process or its threads are timed, the other ranks wait in a barrier. `ddp` and its twin show the noise.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.job_reference import parse_jobref
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings, Train
from paceline.config.update_rule import UpdateRule
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.job import load_job
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup

STEPS_A_ROUND = 3
TEXT = Path(__file__).parents[1] / "src" / "paceline" / "examples" / "text.py"
LOOPS = {
    "ddp": ("ddp", 0.0),
    "its twin": ("ddp", 0.0),
    "single": ("single", 0.0),
    "threads": ("threads", 0.0),
    "ddp, dropout 0.1": ("ddp", 0.1),
    "threads, dropout 0.1": ("threads", 0.1),
}


class Loop:
    """One layout's step with its own feed, as this rank sees it; `built` is None where it has no part."""

    def __init__(self, world: World, payload: dict, *, layout: str, dropout: float) -> None:
        replicas = payload["replicas"]
        self.cores = replicas if layout == "single" else 1
        self.built: TrainingSetup | None = None
        if layout != "ddp" and world.rank:
            return
        job = load_job(parse_jobref(str(TEXT)), params={"dropout": dropout, "width": payload["width"]})
        plan = make_execution_plan(
            layout=parse_layout(layout),
            update=UpdateRule(),
            resources=Resources(ranks=1 if layout == "single" else replicas, cores=replicas),
            facts=JobFacts(global_batch_size=32, micro_batch_size=-(-32 // replicas)),
        )
        own = world if layout == "ddp" else World.alone()
        self.built = build_training_setup(
            job=job, settings=Settings(train=Train(max_grad_norm=1.0)), plan=plan, world=own
        )
        cut = BatchPartition(
            global_batch_size=32, micro_batch_size=plan.micro_batch_size, replica=own.rank, replicas=own.world_size
        )
        self._given: Iterator = iter(
            make_loader(data=job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor())
        )

    def run(self) -> float:
        """Seconds a step."""
        torch.set_num_threads(self.cores)
        given = [next(self._given) for _ in range(STEPS_A_ROUND)] if self.built else []
        began = time.perf_counter()
        for each in given:
            self.built.step.run(each)
        return (time.perf_counter() - began) / STEPS_A_ROUND


def worker(payload: dict) -> int:
    """Time all loops in every round, in an order that all ranks draw alike."""
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=120)
    loops = {name: Loop(world, payload, layout=kind, dropout=rate) for name, (kind, rate) in LOOPS.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(payload["rounds"] + 2):
        names = list(loops)
        random.Random(number).shuffle(names)
        for name in names:
            world.barrier()
            seconds = loops[name].run()
            if number >= 2:
                times[name].append(seconds)
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps(times))
    world.close()
    return 0


def interval(ratios: list[float]) -> tuple[float, float]:
    """The middle 95 % of medians of samples drawn again from the ratios."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    payload = {**vars(options), "answer": str(folder / "answer.json")}
    outcome = start(
        LaunchRequest(ranks=options.replicas, run=RunFolder(folder), entry="threads:worker", payload=payload)
    )
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    times = json.loads((folder / "answer.json").read_text())
    print(f"{options.replicas} replicas, width {options.width}, {options.rounds} rounds of {STEPS_A_ROUND} steps")
    print(f"{'loop':<22} {'median step':>12}   ratio to ddp [95 %]")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["ddp"], strict=True)]
        low, high = interval(ratios)
        middle = f"{statistics.median(values) * 1e3:9.2f} ms   {statistics.median(ratios):.3f}"
        print(f"{name:<22} {middle} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
