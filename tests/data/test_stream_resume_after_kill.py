"""A run over a sharded stream that is killed anywhere resumes on any number of ranks."""

import json
import random
from pathlib import Path

import pytest

from tests.conftest import Shop

JOB = """
import os, torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Numbers:
    def __init__(self, files, buffer):
        self.files, self.buffer, self.num_shards = files, buffer, len(files)
        self.epoch, self.place = 0, [0, 0]

    def shard(self, num_shards, index):
        return Numbers(self.files[index::num_shards], self.buffer)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"place": tuple(self.place)}

    def load_state_dict(self, state):
        self.place = list(state["place"])

    def __iter__(self):
        waiting, generator = [], torch.Generator().manual_seed(self.epoch)
        for value in self.plain():
            waiting.append(value)
            if len(waiting) > self.buffer:
                yield waiting.pop(int(torch.randint(len(waiting), (), generator=generator)))
        yield from waiting

    def plain(self):
        drift = float(os.environ.get("DRIFT", 0)) if int(os.environ.get("RANK", 0)) else 0.0
        while self.place[0] < len(self.files):
            number, length = self.files[self.place[0]]
            while self.place[1] < length:
                self.place[1] += 1
                generator = torch.Generator().manual_seed(1000 * number + self.place[1])
                x = torch.randn(6, generator=generator) + drift
                yield x, (x.sum() > 0).long(), 1000 * number + self.place[1]
            self.place = [self.place[0] + 1, 0]

def make_job(buffer: int = 0) -> pl.Job:
    lengths = [61, 40, 55, 33, 58, 47]
    seen = open(f"seen-{os.environ.get('RANK', 0)}.jsonl", "a")

    def loss(output, batch):
        if torch.is_grad_enabled():
            print(batch[2].tolist(), file=seen, flush=True)
        return F.cross_entropy(output, batch[1], reduction="sum"), len(output)

    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)),
        loss=loss,
        forward=lambda model, batch: model(batch[0]),
        train_data=lambda: Numbers(list(enumerate(lengths)), buffer),
        eval_data=lambda: Numbers(list(enumerate([9, 4, 6])), 0),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        global_batch_size=12,
        micro_batch_size=2,
    )
"""
WORDS = ("--train.exact=true", "--train.micro_batch_size", "2", "--checkpoint.every", "3", "--eval.every", "20")


def seen_in(path: Path) -> list[list[int]]:
    rows = [json.loads(line) for file in path.glob("seen-*.jsonl") for line in file.read_text().splitlines()]
    return sorted(rows)


@pytest.fixture
def stream_shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    shop.write("job.py", JOB)
    return shop


@pytest.mark.parametrize("buffer", [pytest.param(0, marks=pytest.mark.soak), pytest.param(5, marks=pytest.mark.soak)])
def test_kills_and_other_numbers_of_ranks_change_no_sample_and_no_bit(stream_shop: Shop, buffer: int) -> None:
    shop, rng, said = stream_shop, random.Random(buffer), ""
    words = (*WORDS, "--job.buffer", str(buffer))
    assert shop.train("whole", *words, ranks=1, steps=32).code == 0
    for attempt, (ranks, workers) in enumerate(((3, 0), (1, 4)), 1):
        fault = f"kill rank={rng.randrange(ranks)} step={10 * attempt + rng.randrange(-2, 5)} attempt={attempt}"
        ended = shop.train(
            "cut",
            *words,
            "--survive.restarts",
            "0",
            "--faults",
            fault,
            "--data.workers",
            str(workers),
            ranks=ranks,
            steps=32,
        )
        assert ended.code == 1 and "SIGKILL" in ended.err, ended.text
        said += ended.text
    ended = shop.train("cut", *words, "--data.workers", "1", ranks=2, steps=32)
    assert ended.code == 0, ended.text
    assert shop.digest("cut") == shop.digest("whole")
    assert "a stream in 6 virtual shards" in ended.text
    assert ("read again, and are the same" in said + ended.text) == (buffer > 0), said + ended.text


def test_an_epoch_of_a_stream_holds_each_sample_once(stream_shop: Shop) -> None:
    words = [
        "train",
        "job.py",
        "--ranks",
        "3",
        "--run-dir",
        "run",
        "--train.epochs",
        "2",
        "--watch.to",
        "console,jsonl",
    ]
    ended = stream_shop.run(*words, "--checkpoint.every", "1000")
    assert ended.code == 0, ended.text
    seen = sorted(number for row in seen_in(stream_shop.path) for number in row)
    everything = sorted(1000 * file + line + 1 for file, n in enumerate([61, 40, 55, 33, 58, 47]) for line in range(n))
    assert seen == sorted(everything * 2)
    last = json.loads((stream_shop.path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/samples"] == 19 if "eval/samples" in last else True


@pytest.mark.soak  # tests/data/test_stream_sharding.py has the same with replicas as threads
def test_a_rank_that_reads_another_stream_is_found_before_the_first_step(stream_shop: Shop) -> None:
    code = JOB.replace('float(os.environ.get("DRIFT", 0))', "1.0")
    stream_shop.write("job.py", code)
    ended = stream_shop.train("run", ranks=2)
    assert ended.code == 1 and "gives different samples on rank 1 and rank 0" in ended.err, ended.text
    assert "Traceback" not in ended.text


def test_verify_reads_the_stream_in_its_own_way(stream_shop: Shop) -> None:
    ended = stream_shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 0, ended.text
    assert ended.json()["verdict"] in ("bitwise", "rounding")
