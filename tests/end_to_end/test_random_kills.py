"""A run resumed after kills of random processes at random moments ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from paceline.launch.failures.stack_dumps import has_signal_handler
from tests.conftest import Shop
from tests.end_to_end.run_processes import children, marked_processes, wait_until_gone

STEPS = 40
JOB = """
import json, os, time
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(53, 6, generator=generator).double(), torch.randint(0, 4, (53,), generator=generator)
    def __len__(self): return 53
    def __getitem__(self, index): return self.x[index] + 0.01 * torch.randn(6), self.y[index], index

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.2)
    def forward(self, x): return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))

def forward(model, batch):
    if model.training:
        time.sleep(float(os.environ.get("SLOW", 0)))
        with open(f"read-{os.environ['RUN']}{os.environ['PACELINE_ATTEMPT_FOLDER'].rsplit('-')[-1]}-{os.environ.get('RANK', 0)}.txt", "a") as file:
            file.write(json.dumps(batch[2].tolist()) + "\\n")
    return model(batch[0])

def make_job():
    data = Data()
    return pl.Job(
        model=lambda: Net().double(), forward=forward, train_data=data, eval_data=torch.utils.data.Subset(data, range(20)),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2), ema=0.9,
        lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.9),
        global_batch_size=12, micro_batch_size=3, max_grad_norm=1.0,
        metrics={"right": lambda output, batch: ((output.argmax(-1) == batch[1]).sum(), len(output))},
    )
"""
VICTIMS = ("rank", "rank", "rank", "launcher", "fork server", "starter", "data worker", "ctrl-c", "term")


@dataclass
class Story:
    """One run with all its attempts, and what happened to it."""

    shop: Shop
    rng: random.Random
    name: str = "cut"
    told: list[str] = field(default_factory=list)

    def attempt(self, *, ranks: int, workers: int, hurt: bool) -> int:
        """Start the run, hurt it at some moment, and see that nothing is left of it."""
        mark = f"MARK{uuid.uuid4().hex}"
        environ = {"MARK": mark, "SLOW": "0.03", "RUN": self.name}
        process = self.shop.start(*_words(self.name, ranks=ranks, workers=workers), environ=environ)
        if hurt:
            time.sleep(self.rng.uniform(0.5, 4.0))
            self._hurt(process, mark)
        _, err = process.communicate(timeout=60)
        assert wait_until_gone(mark) == [], (self.told, err)
        assert "Traceback" not in err, (self.told, err)
        self.told.append(f"-> {process.returncode}")
        if self.told[-2:-1] in (["ctrl-c"], ["term"]):
            assert process.returncode in (0, 75), (self.told, err)
        return process.returncode

    def _hurt(self, process: "subprocess.Popen[str]", mark: str) -> None:
        victim = self.rng.choice(VICTIMS)
        if victim in ("ctrl-c", "term"):
            while process.poll() is None and not has_signal_handler(process.pid, signal.SIGTERM):
                time.sleep(0.01)  # before the run listens, a signal ends it as it would end any command
            process.send_signal(signal.SIGINT if victim == "ctrl-c" else signal.SIGTERM)
        elif found := _of_kind(victim, process.pid, mark):
            os.kill(self.rng.choice(found), signal.SIGKILL)
        self.told.append(victim)


def _words(run: str, *, ranks: int, workers: int) -> list[str]:
    return [
        "train", "job.py", "--ranks", str(ranks), "--run-dir", run, "--train.steps", str(STEPS), "--train.threads", "1",
        "--checkpoint.every", "3", "--eval.every", "7", "--data.workers", str(workers), "--watch.to", "jsonl",
        "--log.every", "1",
    ]  # fmt: skip


def _of_kind(victim: str, launcher: int, mark: str) -> list[int]:
    """The living processes of one kind."""
    alive = set(marked_processes(mark))
    forkservers = [pid for pid in children(launcher) if pid in alive]
    starters = [pid for forkserver in forkservers for pid in children(forkserver) if children(pid)]
    ranks = [pid for starter in starters for pid in children(starter)]
    workers = [pid for rank in ranks for pid in children(rank)]
    found = {"launcher": [launcher], "fork server": forkservers, "starter": starters, "rank": ranks}
    return {**found, "data worker": workers}[victim]


def samples_by_step(shop: Shop, run: str) -> dict[int, list[int]]:
    """Which samples went into each step, the last time it was done; each attempt is read from where it began."""
    events = [
        json.loads(line) for line in (shop.path / run / "events.jsonl").read_text().splitlines() if line[-1:] == "}"
    ]
    begun = {event["attempt"]: event.get("resumed_from") or 0 for event in events if event.get("event") == "RunStarted"}
    found: dict[int, list[int]] = {}
    for attempt, first in sorted(begun.items()):
        steps: dict[int, list[int]] = {}
        for file in shop.path.glob(f"read-{run}{attempt}-*.txt"):
            rank, ranks = int(file.stem.rsplit("-")[-1]), _ranks(shop, run, attempt)
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")]
            for step, mine in _dealt(lines, first=first, rank=rank, ranks=ranks).items():
                steps.setdefault(step, []).extend(mine)
        found |= {step: sorted(indices) for step, indices in steps.items()}
    return found


def _ranks(shop: Shop, run: str, attempt: int) -> int:
    return int(json.loads((shop.path / run / "logs" / f"attempt-{attempt}" / "request.json").read_text())["ranks"])


def _dealt(lines: list[list[int]], *, first: int, rank: int, ranks: int) -> Mapping[int, list[int]]:
    """Cut a rank's microbatches into steps: an epoch of 53 samples is four batches of 12 and one of 5, in threes."""
    found: dict[int, list[int]] = {}
    rest = list(lines)
    for step in range(first + 1, STEPS + 1):
        micro = 2 if step % 5 == 0 else 4
        mine = len(range(rank, micro, ranks))
        part, rest = rest[:mine], rest[mine:]
        if len(part) < mine:
            break
        found[step] = [index for indices in part for index in indices]
    return found


def undisturbed(shop: Shop, *, ranks: int, workers: int) -> dict[int, list[int]]:
    """The run that nobody touches."""
    ended = shop.run(*_words("whole", ranks=ranks, workers=workers), environ={"RUN": "whole"})
    assert ended.code == 0, ended.text
    found = samples_by_step(shop, "whole")
    assert sorted(found) == list(range(1, STEPS + 1)) and all(sum(map(len, found.values())) for _ in found)
    return found


def through(shop: Shop, rng: random.Random, *, ranks: list[int], workers: int, most: int) -> Story:
    """Start again and again until it is done; after `most` hurts it is let be."""
    story = Story(shop, rng)
    for number in range(1, most + 3):
        if story.attempt(ranks=rng.choice(ranks), workers=workers, hurt=number <= most) == 0:
            return story
    raise AssertionError(f"never done: {story.told}")


def check_the_same_ranks(shop: Shop, seed: int, *, most: int) -> None:
    rng = random.Random(seed)
    ranks, workers = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])
    whole = undisturbed(shop, ranks=ranks, workers=workers)
    story = through(shop, rng, ranks=[ranks], workers=workers, most=most)
    print(f"seed {seed}: {ranks} ranks, {workers} workers: {' '.join(story.told)}")
    assert samples_by_step(shop, "cut") == whole, story.told
    assert shop.digest("cut") == shop.digest("whole"), story.told


def check_other_ranks(shop: Shop, seed: int, *, most: int) -> None:
    rng = random.Random(1000 + seed)
    workers = rng.choice([0, 2])
    whole = undisturbed(shop, ranks=2, workers=workers)
    story = through(shop, rng, ranks=[1, 2, 3, 4], workers=workers, most=most)
    print(f"seed {seed}: any ranks, {workers} workers: {' '.join(story.told)}")
    assert samples_by_step(shop, "cut") == whole, story.told
    left, right = (_weights(shop.path / run) for run in ("whole", "cut"))
    for name, value in left.items():  # float64: a sum in another order differs by 1e-16, and no true gradient is zero
        torch.testing.assert_close(right[name], value, rtol=0, atol=1e-12, msg=f"{name} {story.told}")


def _weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "consolidated" / "model.safetensors")


def test_kills_at_random_moments_change_no_bit(shop: Shop) -> None:
    shop.write("job.py", JOB)
    check_the_same_ranks(shop, 0, most=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 31))
def test_many_kills_at_random_moments_change_no_bit(shop: Shop, seed: int) -> None:
    shop.write("job.py", JOB)
    check_the_same_ranks(shop, seed, most=6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(15))
def test_many_kills_on_changing_numbers_of_ranks_keep_every_sample(shop: Shop, seed: int) -> None:
    shop.write("job.py", JOB)
    check_other_ranks(shop, seed, most=6)
