"""What exact tp and cp cost on the text example: the step time against plain tp or cp, interleaved in one run.

python benchmarks/exact_shards.py tp [--rounds 40] [--ranks 2] [--shards 2 4] [--context 512] [--samples 4]
python benchmarks/exact_shards.py cp
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

STEPS_A_ROUND = 2
SETTINGS = {"tp": "tensor_shards", "cp": "sequence_shards"}
TEXT = Path(__file__).parents[1] / "src" / "paceline" / "examples" / "text.py"


def worker(payload: dict) -> int:
    """Time the plain layout, and the exact one with each number of shards, in turn."""
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    samples, params = payload["samples"], {name: payload[name] for name in ("context", "width")}
    job = load_job(parse_jobref(str(TEXT)), params=params)
    cut = BatchPartition(global_batch_size=samples, micro_batch_size=samples, replica=0, replicas=1)
    task = Task(
        verb="train", job=str(TEXT), layout=payload["axis"], ranks=world.world_size, device="cpu", origins={},
        settings={"train.threads": 1, "train.micro_batch_size": samples, "train.global_batch_size": samples},
    )  # fmt: skip
    plan = prepare(task, job=job).plan
    settings = {"plain": Train(max_grad_norm=1.0)}
    for shards in payload["shards"]:
        settings[f"exact, {shards} shards"] = Train(
            max_grad_norm=1.0, exact=True, **{SETTINGS[payload["axis"]]: shards}
        )
    loops = {}
    for name, train in settings.items():
        step = build_training_setup(job=job, settings=Settings(train=train), plan=plan, world=world).step
        feed = iter(make_loader(data=job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))
        loops[name] = (step, feed)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(payload["rounds"] + 2):
        for name in list(loops)[:: -1 if number % 2 else 1]:
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
    parser.add_argument("axis", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    payload = {**vars(options), "answer": str(folder / "answer.json")}
    request = LaunchRequest(ranks=options.ranks, run=RunFolder(folder), entry="exact_shards:worker", payload=payload)
    outcome = start(request)
    if outcome.exit_code:
        sys.exit(failure_screen(outcome))
    times = json.loads((folder / "answer.json").read_text())
    print(
        f"{options.axis}={options.ranks}, {options.samples} sequences of {options.context}, width {options.width}, "
        f"{options.rounds} rounds of {STEPS_A_ROUND} steps, torch {torch.__version__}"
    )
    for name, values in times.items():
        print(f"{name:<16} {statistics.median(values) * 1e3:8.2f} ms")
    for name in list(times)[1:]:
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        low, high = bootstrap(ratios, block=4)
        print(f"{name} / plain: {statistics.fmean(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
