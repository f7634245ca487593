"""What exact mode costs on the text example: its step time against the default mode, interleaved in one run.

python benchmarks/exact.py [--rounds 40] [--ranks 2]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from overhead import bootstrap

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.job_reference import parse_jobref
from paceline.config.settings import Settings, Train
from paceline.config.task import Task
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.job import load_job
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import failure_screen
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import build_training_setup
from paceline.trainer.setup.prepare import prepare

STEPS_A_ROUND = 3
TEXT = Path(__file__).parents[1] / "src" / "paceline" / "examples" / "text.py"


def worker(payload: dict) -> int:
    """Time both modes in turn, in an order that alternates."""
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    job = load_job(parse_jobref(str(TEXT)), params={})
    batch, share = job.global_batch_size, job.global_batch_size // world.world_size
    cut = BatchPartition(global_batch_size=batch, micro_batch_size=share, replica=world.rank, replicas=world.world_size)
    task = Task(
        verb="train", job=str(TEXT), layout="ddp", ranks=world.world_size, device="cpu",
        settings={"train.threads": 1, "train.micro_batch_size": share}, origins={},
    )  # fmt: skip
    plan = prepare(task, job=job).plan
    loops = {}
    for name, exact in (("default", False), ("exact", True)):
        settings = Settings(train=Train(max_grad_norm=1.0, exact=exact))
        step = build_training_setup(job=job, settings=settings, plan=plan, world=world).step
        feed = iter(make_loader(data=job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))
        loops[name] = (step, feed)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(payload["rounds"] + 2):
        for name in sorted(loops, reverse=bool(number % 2)):
            step, feed = loops[name]
            world.barrier()
            began = time.perf_counter()
            for _ in range(STEPS_A_ROUND):
                step.run(next(feed))
            if number >= 2:
                times[name].append((time.perf_counter() - began) / STEPS_A_ROUND)
    if world.is_main:
        Path(payload["answer"]).write_text(json.dumps(times))
    world.close()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    payload = {"rounds": options.rounds, "answer": str(folder / "answer.json")}
    outcome = start(LaunchRequest(ranks=options.ranks, run=RunFolder(folder), entry="exact:worker", payload=payload))
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    times = json.loads((folder / "answer.json").read_text())
    ratios = [a / b for a, b in zip(times["exact"], times["default"], strict=True)]
    low, high = bootstrap(ratios, block=4)
    print(f"{options.ranks} ranks, {options.rounds} rounds of {STEPS_A_ROUND} steps, torch {torch.__version__}")
    for name, values in times.items():
        print(f"{name:<10} {statistics.median(values) * 1e3:8.2f} ms")
    print(f"exact / default: {statistics.fmean(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
