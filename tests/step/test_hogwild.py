"""Hogwild workers train and share one model, and unsupported options are refused."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from paceline.comm.process_group import World
from paceline.parallel.data_parallel import shared_memory_model as shared
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from tests.conftest import Shop

DIGITS = "paceline.examples.digits_cnn"


def accuracy(shop: Shop, run: str) -> float:
    records = [json.loads(line) for line in (shop.path / run / "metrics.jsonl").read_text().splitlines()]
    return max(record["eval/accuracy"] for record in records if "eval/accuracy" in record)


@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_it_reaches_the_accuracy_of_the_digits_example(shop: Shop, workers: int) -> None:
    ended = shop.run("train", DIGITS, "--ranks", str(workers), "--update", "hogwild", "--run-dir", "run", timeout=300)
    assert ended.code == 0, ended.text
    assert accuracy(shop, "run") > 0.97
    events = [json.loads(line) for line in (shop.path / "run/events.jsonl").read_text().splitlines()]
    told = next(event for event in reversed(events) if event["event"] == "Staleness")["told"]
    assert len(told) == workers
    updates = sum(count for one in told for _, count in one["late"])
    assert told[0]["made"] == updates * 10 and 0 <= told[0]["lost"] < told[0]["made"]
    assert any(late for one in told for late, _ in one["late"]), "nobody ever wrote while another read"


def shared_weights() -> set[Path]:
    """Other tests have checkpoints in memory at the same time."""
    return {path for path in Path("/dev/shm").glob("paceline-*") if not path.name.startswith("paceline-memory-")}


def test_killed_it_goes_on_and_leaves_no_shared_memory(shop: Shop) -> None:
    before = shared_weights()
    words = ("--update", "hogwild", "--checkpoint.every", "4")
    killed = shop.train("run", *words, "--survive.restarts", "0", "--faults", "kill rank=1 step=7", steps=12)
    assert killed.code == 1 and "rank 1" in killed.text
    again = shop.train("run", *words, steps=12)
    assert again.code == 0 and "resumed: step-00000004" in again.text, again.text
    assert shared_weights() == before


def test_where_one_worker_has_all_samples_it_is_one_process(shop: Shop) -> None:
    words = ("--train.threads", "1", "--train.micro_batch_size", "12")  # a batch is one microbatch
    raced = shop.train("raced", *words, "--update", "hogwild", steps=7)
    alone = shop.train("alone", *words, ranks=1, steps=7)
    assert not raced.code and not alone.code, raced.text + alone.text
    assert shop.digest("raced") == shop.digest("alone")


def test_two_terms_with_counts_and_running_statistics(shop: Shop) -> None:
    words = ("--update", "hogwild", "--job.two_terms", "true", "--job.norm", "true", "--train.micro_batch_size", "3")
    ended = shop.train("run", *words, "--train.check_every", "3", steps=10)
    assert ended.code == 0, ended.text
    assert "buffers: one copy in shared memory" in ended.text and "as one process" not in ended.text


SELDOM = """
import os
import torch, torch.nn.functional as F, paceline as pl


def schedule(optimizer):
    def rate(step):
        with open(f"steps-{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{step} ")
        return 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def make_job(terms: int = 2, none: bool = False) -> pl.Job:
    draw = torch.Generator().manual_seed(0)
    x, seldom = torch.randn(6, 5, generator=draw), torch.zeros(6)
    if not none:
        seldom[1:] = 1.0  # all but one sample have the second term
    sum_of = lambda out, batch: ((out[:, 1] - 1) ** 2 * batch[1]).sum()
    def loss(out, batch):
        second = (sum_of(out, batch), batch[1].sum())
        return {"first": ((out[:, 0] ** 2).sum(), len(out)), "second": second} if terms == 2 else second
    return pl.Job(model=lambda: torch.nn.Linear(5, 2), loss=loss, global_batch_size=4,
                  train_data=torch.utils.data.TensorDataset(x, seldom), lr_schedule=schedule,
                  count=lambda b: {"first": len(b[1]), "second": b[1].sum()} if terms == 2 else b[1].sum(),
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.05))
"""


@pytest.mark.parametrize("terms", ["1", "2"])
def test_a_share_without_a_target_and_one_without_a_sample_are_no_error(shop: Shop, terms: str) -> None:
    shop.write("seldom.py", SELDOM)
    words = ("--update", "hogwild", "--train.micro_batch_size", "1", "--ranks", "3")
    ended = shop.run("train", "seldom.py", *words, "--job.terms", terms, "--train.steps", "8", "--run-dir", "run")
    assert ended.code == 0, ended.text
    followed = [(shop.path / f"steps-{rank}").read_text().split() for rank in range(3)]
    assert all(steps == [str(step) for step in range(9)] for steps in followed), followed


@pytest.mark.parametrize("terms", ["1", "2"])
def test_a_batch_without_a_target_is_an_error_as_elsewhere(shop: Shop, terms: str) -> None:
    shop.write("seldom.py", SELDOM)
    words = ("--update", "hogwild", "--train.micro_batch_size", "1", "--ranks", "2", "--job.none", "true")
    ended = shop.run("train", "seldom.py", *words, "--job.terms", terms, "--train.steps", "8", "--run-dir", "run")
    term = "second" if terms == "2" else "loss"
    assert ended.code == 1 and f"the count of {term} is 0 over the whole global batch" in ended.text, ended.text


STILL = """
import time
import torch, torch.nn.functional as F, paceline as pl


def look(run):
    before = [p.detach().clone() for p in run.model.parameters()]
    if run.rank == 0:
        time.sleep(0.7)
    return {"moved": float(sum((p.detach() - old).abs().sum() for p, old in zip(run.model.parameters(), before)))}


def make_job() -> pl.Job:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return pl.Job(model=lambda: torch.nn.Linear(5, 1), train_data=data, eval_data=data, global_batch_size=4,
                  loss=lambda out, b: (((out - b[1]) ** 2).sum(), len(out)), on_eval=look,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.01, maximize=True))
"""


def test_nobody_writes_while_another_still_evaluates(shop: Shop) -> None:
    """The loss gets worse, so that no save makes them wait for each other."""
    shop.write("still.py", STILL)
    words = (
        "--ranks",
        "2",
        "--update",
        "hogwild",
        "--train.micro_batch_size",
        "2",
        "--eval.every",
        "2",
        "--checkpoint.every",
        "99",
    )
    ended = shop.run("train", "still.py", *words, "--train.steps", "6", "--run-dir", "run")
    assert ended.code == 0, ended.text
    events = [json.loads(line) for line in (shop.path / "run/events.jsonl").read_text().splitlines()]
    assert [event["metrics"]["moved"] for event in events if event["event"] == "EvalDone"] == [0.0] * 3


def _add(model: SharedModel, times: int, barrier: "multiprocessing.synchronize.Barrier") -> None:
    barrier.wait()
    for _ in range(times):
        model.parameter_counts += 1


def test_what_two_writers_lose_is_counted() -> None:
    net = torch.nn.Linear(3, 2)
    values = [p.detach().clone() for p in net.parameters()]
    model = SharedModel(net, world=World.alone())
    assert all(torch.equal(a, b) for a, b in zip(values, net.parameters(), strict=True))
    for _ in range(7):
        model.record_update()
    assert model.lost_and_all_additions == (0, 14)
    model.parameter_counts[1] -= 3
    assert model.lost_and_all_additions == (3, 14)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    found = int(model.parameter_counts[0])
    workers = [fork.Process(target=_add, args=(model, 2000, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found + 2000 <= int(model.parameter_counts[0]) <= found + 4000, "both write to the same memory"


BAD = {
    "needs ddp, not pp": ("--layout", "pp", "--ranks", "2"),
    "no other worker races with it": ("--ranks", "1"),
    "--train.exact with --update hogwild": ("--ranks", "2", "--train.exact"),
    "sync_bn with --update hogwild": ("--ranks", "2", "--train.buffers", "sync_bn"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_can_not_be_had_with_is_said(shop: Shop, said: str) -> None:
    ended = shop.run("train", "job.py", "--update", "hogwild", *BAD[said], "--run-dir", "run", "--train.steps", "2")
    assert ended.code == 2 and said in ended.text, ended.text


def test_a_loss_of_the_whole_batch_is_refused(shop: Shop) -> None:
    shop.write("whole.py", "from dataclasses import replace\nimport job as other\n\n\ndef make_job():\n"
               "    return replace(other.make_job(), loss_over='batch')\n")  # fmt: skip
    ended = shop.run(
        "train", "whole.py", "--ranks", "2", "--update", "hogwild", "--run-dir", "run", "--train.steps", "2"
    )
    assert ended.code and "no worker ever has the whole batch" in ended.text, ended.text


def test_verify_says_why_it_has_no_verdict(shop: Shop) -> None:
    ended = shop.run("verify", "job.py", "--ranks", "2", "--update", "hogwild")
    assert ended.code == 2 and "races make every run different" in ended.text


def test_shared_memory_has_no_name_that_a_killed_run_could_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise AssertionError("a file with a name was made")

    monkeypatch.setattr(shared.tempfile, "mkstemp", refuse)
    memory = shared._open_shared_memory(4096, world=World.alone())
    assert memory.numel() == 4096 and memory.dtype is torch.uint8
