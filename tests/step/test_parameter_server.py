"""A parameter server equals DDP without staleness, respects its bound, and neither loses nor repeats a sample."""

import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.comm.process_group import LaunchInfo, WorkerEndpoint
from paceline.data.leased_loader import RandomAccessLoader
from paceline.data.order.leases import BatchShare, Leases
from paceline.data.source import SampleOrder
from paceline.launch.agent.shared_status import read_heartbeat
from paceline.launch.several_nodes.lost_nodes import LOST_NODES, LOST_WORK, LostNode, LostWork
from paceline.step.parameter_server.flat_buffers import gradient_codes, pack_gradients, unpack_gradients
from paceline.step.parameter_server.lost_node_watch import watch_lost_nodes
from paceline.step.parameter_server.push_messages import GradientPush
from paceline.step.parameter_server.server_threads import ServerThreads
from paceline.step.parameter_server.state import ServedWeights, ServerState
from paceline.step.parameter_server.transport import (
    ConnectionAcceptor,
    ConnectionLost,
    MessageKind,
    ServerMessage,
    connect_to_server,
    open_store,
)
from tests.conftest import Ended, Shop
from tests.step.test_hogwild import SELDOM
from tests.waiting import wait_until

COUNTS = """
import os, random, signal, time
import torch
import paceline as pl

class Seen(torch.nn.Module):
    # each sample's number goes down by 1 whenever its gradient is taken; `clock` counts updates, `saw` what was pulled
    def __init__(self, samples, extra):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(samples))
        self.clock = torch.nn.Parameter(torch.zeros(()))
        self.saw = torch.nn.Parameter(torch.zeros(()))
        self.extra = torch.nn.Parameter(torch.zeros(extra))

    def forward(self, index):
        if os.environ.get("DIES") == os.environ.get("RANK") or (os.environ.get("DIES") == "all" and os.environ["RANK"] != "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RAISES") == os.environ.get("RANK"):
            raise ValueError("a worker's own mistake")
        slow = 5 if os.environ.get("SLOW") == os.environ.get("RANK") else 1
        time.sleep(random.Random().random() * float(os.environ.get("DELAY", 0)) * slow)
        moved = self.times[index].sum() + self.clock + self.saw * self.clock.detach() + 0.0 * self.extra.sum()
        return len(index) * moved

class Written(torch.optim.SGD):
    # on the server: how many updates old the weights were that this gradient saw, told by the weights themselves
    def step(self, closure=None):
        _, clock, saw, _ = self.param_groups[0]["params"]
        if saw.numel():  # of several servers the one that has it
            with open(os.environ["WRITTEN"], "a") as file:
                file.write(f"{saw.grad.item() - clock.item():.0f}\\n")
        return super().step()

def make_job(samples: int = 60, batch: int = 12, extra: int = 10_000):
    return pl.Job(
        model=lambda: Seen(samples, extra),
        loss=lambda output, index: (output, len(index)),
        forward=lambda model, index: model(index),
        train_data=torch.arange(samples),
        optimizer=lambda named: Written([p for _, p in named], lr=1.0),
        global_batch_size=batch,
    )
"""


def weights(shop: Shop, run: str) -> dict[str, torch.Tensor]:
    return load_file(next((shop.path / run / "consolidated").glob("*.safetensors")))


def events(shop: Shop, run: str, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (shop.path / run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def notes(shop: Shop, run: str) -> str:
    return "\n".join(event["text"] for event in events(shop, run, "Note"))


def count(shop: Shop, *words: str, ranks: int, epochs: int, environ: dict[str, str] | None = None) -> Ended:
    """Train the counting job; what its optimizer measured is in `written`."""
    if not (shop.path / "count.py").exists():
        shop.write("count.py", COUNTS)
    return shop.run(
        "train", "count.py", "--ranks", str(ranks), "--run-dir", "run", "--train.epochs", str(epochs), *words,
        "--watch.to", "console,jsonl", "--log.every", "100", timeout=550,
        environ={"WRITTEN": str(shop.path / "written"), **(environ or {})},
    )  # fmt: skip


def measured(shop: Shop) -> Counter[int]:
    return Counter(map(int, (shop.path / "written").read_text().split()))


def all_seen(shop: Shop, *, epochs: int, updates: int, each: float = 1.0) -> None:
    """Every sample once an epoch, every update once: the weights themselves have counted, by `each` a sample."""
    found = weights(shop, "run")
    assert found["times"].unique().tolist() == [-epochs * each]
    assert found["clock"].item() == -updates


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        pytest.param(1, (), marks=pytest.mark.soak),
        pytest.param(1, ("--job.two_terms", "true"), marks=pytest.mark.soak),
        pytest.param(1, ("--train.micro_batch_size", "2"), marks=pytest.mark.soak),
        (3, ("--job.two_terms", "true")),
    ],
)
def test_bound_0_is_ddp(shop: Shop, servers: int, words: tuple[str, ...]) -> None:
    words = ("--job.dropout", "0.2", *words)
    one = shop.train("one", *words, ranks=2, steps=9)
    update = f"ps,servers={servers},staleness=0"
    other = shop.train("other", *words, "--update", update, ranks=servers + 2, steps=9)
    assert one.code == other.code == 0, one.text + other.text
    first, second = weights(shop, "one"), weights(shop, "other")
    for name, value in first.items():
        assert torch.allclose(value, second[name], rtol=1e-5, atol=1e-6), name
    losses = [[line["loss"] for line in events(shop, run, "StepDone")] for run in ("one", "other")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 0
    told = [one["late"] for one in events(shop, "other", "Staleness")[-1]["told"]]
    assert all(late == 0 for one in told for late, _ in one)


def test_schedules_advance_once_per_batch_whatever_the_bound(shop: Shop) -> None:
    shop.write("seldom.py", SELDOM)
    words = ("--update", "ps,staleness=1", "--train.micro_batch_size", "1", "--ranks", "3", "--train.steps", "8")
    ended = shop.run("train", "seldom.py", *words, "--job.terms", "1", "--run-dir", "run")
    assert ended.code == 0, ended.text
    assert (shop.path / "steps-0").read_text().split() == [str(step) for step in range(9)]


def _bounded(shop: Shop, bound: str, *, epochs: int, servers: int = 1) -> Counter[int]:
    slow = {"DELAY": "0.002", "SLOW": str(servers + 1)}
    update = f"ps,servers={servers},staleness={bound}"
    words = ("--update", update, "--checkpoint.every", "100000", "--job.batch", "60")
    ended = count(shop, *words, ranks=servers + 3, epochs=epochs, environ=slow)
    assert ended.code == 0, ended.text
    all_seen(shop, epochs=epochs, updates=3 * epochs)
    found = measured(shop)
    told: Counter[int] = Counter()
    for one in events(shop, "run", "Staleness")[-1]["told"]:
        told.update(dict(one["late"]))
    if servers == 1:
        assert found == told, "what the run tells is not what its weights say"
    else:  # the part of another server than the first may have been pulled a moment later, and be newer than told
        assert sum(found.elements()) <= sum(told.elements()) and max(told) <= float(bound)
    assert sum(found.values()) == 3 * epochs
    return found


@pytest.mark.parametrize(
    "bound", [pytest.param("1", marks=pytest.mark.soak), "4", pytest.param("none", marks=pytest.mark.soak)]
)
def test_no_gradient_is_later_than_the_bound(shop: Shop, bound: str) -> None:
    found = _bounded(shop, bound, epochs=60, servers=2 if bound == "4" else 1)
    assert max(found) <= (float("inf") if bound == "none" else int(bound))
    assert max(found) > (4 if bound == "none" else 0), (
        "nothing was late: nothing was tried, or the slow one held up all"
    )


@pytest.mark.soak
@pytest.mark.parametrize("bound", ["1", "4", "none"])
def test_no_gradient_is_later_than_the_bound_in_10000_updates(shop: Shop, bound: str) -> None:
    found = _bounded(shop, bound, epochs=3400)
    print(f"\nstaleness={bound}: {sum(found.values())} updates, by lateness {dict(sorted(found.items()))}")
    assert max(found) <= 4 if bound == "4" else max(found) == 1 if bound == "1" else max(found) > 4


@pytest.mark.parametrize("bound", [pytest.param("0", marks=pytest.mark.soak), "2"])
def test_a_killed_worker_loses_only_its_unpushed_gradient(shop: Shop, bound: str) -> None:
    faults = "kill rank=1 step=7; kill rank=2 step=20"
    ended = count(shop, "--update", f"ps,staleness={bound}", "--faults", faults, ranks=3, epochs=40)
    assert ended.code == 0, ended.text
    joint = bound == "0"
    all_seen(shop, epochs=40, updates=200 if joint else 400, each=0.5 if joint else 1.0)
    told = notes(shop, "run")
    for rank in (1, 2):  # it dies at the first share of that step or a later one: another may have been quicker
        assert re.search(
            rf"lost worker {rank}, whose process has ended: its unpushed gradient is lost, and share \d+ of", told
        )


IN_A_PUSH = """
import os, signal
from paceline.step.parameter_server.transport import MessageKind, Connection
from count import make_job

pushes, plain = [], Connection.send

def send(self, message):
    counts = message.kind is MessageKind.PUSH and os.environ["RANK"] == "3" and os.environ.get("PACELINE_START_NUMBER", "1") == "1"
    pushes.extend([1] if counts else [])
    if counts and len(pushes) == int(os.environ["NTH"]):
        left, through = int(os.environ["PARTS"]), self._complete  # of a message: its head, its words, the gradient

        def done(move, tensor):
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            through(move, tensor)

        self._complete = done
    plain(self, message)

Connection.send = send
"""


@pytest.mark.parametrize(
    ("nth", "parts"), [("9", "2"), *(pytest.param("10", parts, marks=pytest.mark.soak) for parts in "02")]
)
def test_one_that_is_killed_in_a_push_has_pushed_nothing(shop: Shop, nth: str, parts: str) -> None:
    """To the second server, between the two, and to the first, which counts it."""
    shop.write("count.py", COUNTS)
    shop.write("killed.py", IN_A_PUSH)
    ended = shop.run(
        "train", "killed.py", "--ranks", "4", "--run-dir", "run", "--train.epochs", "30", "--update",
        "ps,servers=2,staleness=3", "--watch.to", "console,jsonl",
        environ={"WRITTEN": str(shop.path / "written"), "NTH": nth, "PARTS": parts},
    )  # fmt: skip
    assert ended.code == 0 and "lost worker 3, whose process has ended" in notes(shop, "run"), ended.text
    all_seen(shop, epochs=30, updates=300)


@pytest.mark.soak
def test_workers_that_are_killed_at_any_moment_lose_and_double_nothing(shop: Shop) -> None:
    shop.write("count.py", COUNTS)
    process = shop.start(
        "train", "count.py", "--ranks", "6", "--run-dir", "run", "--train.epochs", "600", "--log.every", "5",
        "--update", "ps,servers=2,staleness=8", "--watch.to", "console,jsonl", "--checkpoint.every", "100",
        environ={"WRITTEN": str(shop.path / "written"), "DELAY": "0.01"},
    )  # fmt: skip
    kills = 0
    try:
        draw = random.Random(5)
        while process.poll() is None and kills < 6:
            time.sleep(draw.uniform(1.0, 3.0))
            with suppress(AssertionError, ProcessLookupError):
                os.kill(pid_of(shop, rank=2 + kills % 4), signal.SIGKILL)
                kills += 1
        out, err = process.communicate(timeout=500)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0 and kills == 6, out + err
    print(f"\n{kills} kills: {notes(shop, 'run')}")
    all_seen(shop, epochs=600, updates=20 * 600)


@pytest.mark.soak
def test_a_killed_worker_is_back_soon(shop: Shop) -> None:
    words = ("--update", "ps,staleness=2", "--faults", "kill rank=1 step=3")
    ended = count(shop, *words, ranks=3, epochs=100, environ={"DELAY": "0.02"})
    assert ended.code == 0 and "the worker of rank 1 has restarted" in notes(shop, "run"), ended.text
    all_seen(shop, epochs=100, updates=1000)


@pytest.mark.soak
def test_one_that_is_killed_again_and_again_is_gone_on_without(shop: Shop) -> None:
    ended = count(shop, "--update", "ps,staleness=2", ranks=3, epochs=30, environ={"DIES": "1", "DELAY": "0.02"})
    assert ended.code == 0 and "rank 1, a worker, was killed again" in ended.err, ended.text
    all_seen(shop, epochs=30, updates=300)


def test_where_all_workers_die_the_run_ends_and_says_so(shop: Shop) -> None:
    began = time.monotonic()
    ended = count(shop, "--update", "ps,staleness=2", ranks=3, epochs=30, environ={"DIES": "all"})
    assert ended.code == 1 and "SIGKILL" in ended.text and "rank 0" not in ended.err.split("First error:")[-1][:8]
    assert time.monotonic() - began < 60


def test_an_error_in_a_worker_ends_the_run_and_is_named(shop: Shop) -> None:
    words = ("--update", "ps,staleness=2", "--survive.restarts", "0")
    ended = count(shop, *words, ranks=3, epochs=30, environ={"RAISES": "2"})
    assert ended.code == 1 and "rank 2" in ended.text and "a worker's own mistake" in ended.text, ended.text


@pytest.mark.parametrize(
    ("bound", "servers"),
    [pytest.param("0", 1, marks=pytest.mark.soak), pytest.param("none", 1, marks=pytest.mark.soak), ("none", 2)],
)
def test_a_killed_server_is_restored_and_what_was_lost_is_said(shop: Shop, bound: str, servers: int) -> None:
    faults = f"kill rank={servers - 1} step=37; kill rank={servers + 1} step=10"
    update = f"ps,servers={servers},staleness={bound}"
    words = ("--update", update, "--checkpoint.every", "20", "--faults", faults)
    ended = count(shop, *words, ranks=servers + 2, epochs=12)
    assert ended.code == 0, ended.text
    said = f"rank {servers - 1} killed by SIGKILL at step 37; restarted in "
    assert said in ended.out and "from step 20 (disk); 17 steps repeated" in ended.out, ended.out
    assert f"lost worker {servers + 1}, whose process has ended" in notes(shop, "run")
    joint = bound == "0"
    all_seen(shop, epochs=12, updates=60 if joint else 120, each=0.5 if joint else 1.0)


def test_a_stopped_run_goes_on_with_another_number_of_workers(shop: Shop) -> None:
    words = ("--update", "ps,staleness=4", "--faults", "stop rank=0 step=30")
    stopped = count(shop, *words, ranks=3, epochs=20)
    assert stopped.code == 75, stopped.text
    again = count(shop, "--update", "ps,staleness=4", ranks=4, epochs=20)
    assert again.code == 0 and "resumed: step-" in again.text, again.text
    assert weights(shop, "run")["times"].unique().tolist() == [-20]


@pytest.mark.soak
def test_a_stopped_worker_is_given_up_and_comes_back(shop: Shop) -> None:
    shop.write("count.py", COUNTS)
    words = ("--update", "ps,staleness=2", "--train.timeout_seconds", "3", "--log.every", "5")
    process = shop.start(
        "train", "count.py", "--ranks", "3", "--run-dir", "run", "--train.epochs", "150", *words,
        "--watch.to", "console,jsonl", environ={"WRITTEN": str(shop.path / "written"), "DELAY": "0.03"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while (beat := read_heartbeat(shop.path / "run/logs/attempt-1/pulse-1")) is None or not beat.step:
            assert time.monotonic() < until, "it has had no share"
            time.sleep(0.05)
        pid = pid_of(shop, rank=1)
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + 60
        while "which has not responded for 3 s" not in (shop.path / "run/events.jsonl").read_text():
            assert time.monotonic() < until, "nobody gave it up"
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, out + err
    all_seen(shop, epochs=150, updates=1500)


@pytest.mark.soak
def test_one_that_hangs_is_given_up_and_the_run_ends(shop: Shop) -> None:
    words = ("--update", "ps,staleness=2", "--train.timeout_seconds", "4", "--faults", "hang rank=1 step=5")
    ended = count(shop, *words, ranks=3, epochs=40, environ={"DELAY": "0.01"})
    assert ended.code == 0 and "lost worker 1, which has not responded for 4 s" in notes(shop, "run"), ended.text
    all_seen(shop, epochs=40, updates=400)


def test_ctrl_c_saves_and_all_leave(shop: Shop) -> None:
    process = shop.start(
        "train", "job.py", "--ranks", "3", "--run-dir", "run", "--train.steps", "100000", "--update", "ps,staleness=4",
        "--watch.to", "console,jsonl",
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not list((shop.path / "run").glob("events.jsonl")) or not events(shop, "run", "StepDone"):
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 75 and "Stopped and saved" in out + err, out + err
    assert events(shop, "run", "CheckpointSaved")


@pytest.mark.parametrize("bound", ["0", pytest.param("3", marks=pytest.mark.soak)])
def test_what_is_not_finite_is_found_on_the_server(shop: Shop, bound: str) -> None:
    text = """
from dataclasses import replace
import torch
import job as other

def make_job():
    job = other.make_job()
    x, y = (tensor.clone() for tensor in job.train_data.tensors)
    x[17] = float("nan")
    return replace(job, train_data=torch.utils.data.TensorDataset(x, y), eval_data=None)
"""
    shop.write("nan.py", text)
    words = ("train", "nan.py", "--ranks", "3", "--update", f"ps,staleness={bound}", "--train.steps", "9")
    ended = shop.run(*words, "--run-dir", "run")
    assert ended.code == 1 and "loss is nan" in ended.text and "--train.on_nonfinite skip" in ended.text, ended.text
    assert "the inputs of this step contain NaN or infinity: sample 17 of train_data" in ended.text, ended.text
    ended = shop.run(*words, "--run-dir", "skips", "--train.on_nonfinite", "skip")
    assert ended.code == 0, ended.text
    assert all(value.isfinite().all() for value in weights(shop, "skips").values())


@pytest.mark.soak
def test_a_stopped_server_is_named(shop: Shop) -> None:
    process = shop.start(
        "train", "job.py", "--ranks", "3", "--run-dir", "run", "--train.steps", "100000", "--update", "ps,staleness=4",
        "--watch.to", "console,jsonl", "--train.timeout_seconds", "4", "--data.drop_last", "true",
        "--survive.restarts", "0",
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not list((shop.path / "run").glob("events.jsonl")) or not events(shop, "run", "StepDone"):
            assert time.monotonic() < until
            time.sleep(0.1)
        os.kill(pid_of(shop, rank=0), signal.SIGSTOP)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1 and "no answer from rank 0" in err and "is stopped" in err, out + err


def test_an_order_that_differs_between_workers_is_found(shop: Shop) -> None:
    text = """
from dataclasses import replace
import os
import job as other

def make_job():
    order = lambda num_samples, epoch, seed: list(range(num_samples))[:: -1 if os.environ["RANK"] == "2" else 1]
    return replace(other.make_job(), order=order)
"""
    shop.write("ordered.py", text)
    words = ("--ranks", "3", "--update", "ps,staleness=0", "--train.steps", "1000", "--run-dir", "run")
    ended = shop.run("train", "ordered.py", *words, "--data.drop_last", "true")  # one of them may come late
    assert ended.code == 1 and "order= gave workers different orders of the samples" in ended.text, ended.text


def test_an_order_is_named_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is a checksum of all of it, and each share tells it."""
    feed = RandomAccessLoader(
        data=torch.arange(6), collate=None, order=lambda num_samples, epoch, seed: [*range(num_samples)][:: 1 - 2 * epoch],
        seed=0, sample_seeds="auto", global_batch_size=2, drop_last=False,
    )  # fmt: skip
    told = {epoch: feed.order_checksum(epoch) for epoch in (0, 1)}
    assert told[0] != told[1]
    monkeypatch.setattr(SampleOrder, "checksum_or_name", lambda self, epoch: pytest.fail("counted again"))
    assert {epoch: feed.order_checksum(epoch) for epoch in (1, 0)} == told


def test_a_run_is_evaluated_and_shown_like_any_other(shop: Shop) -> None:
    trained = shop.train("run", "--update", "ps,servers=2,staleness=2", ranks=4, steps=12)
    assert trained.code == 0, trained.text
    last = events(shop, "run", "EvalDone")[-1]["metrics"]
    found = shop.run("evaluate", "run", "--json")
    assert found.code == 0 and found.json()["metrics"] == pytest.approx(last, rel=1e-5), found.text
    assert shop.run("report", "run").code == 0
    assert "Staleness of updates" in (shop.path / "run/report.html").read_text()


def pid_of(shop: Shop, *, rank: int) -> int:
    """The process that writes to that rank's log."""
    log = (shop.path / f"run/logs/attempt-1/rank-{rank}.log").resolve()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "fd" / "1").readlink() == log:
                return int(path.name)
    raise AssertionError(f"rank {rank} has no process")


TABLE = """
import torch
import paceline as pl

class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = torch.nn.Embedding(5000, 8, sparse=sparse)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))

def make_job(sparse: bool = True, kind: str = "SGD") -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, 50, (48, 5), generator=generator), torch.randint(0, 3, (48,), generator=generator)
    return pl.Job(
        model=lambda: Words(sparse),
        loss=lambda output, batch: (torch.nn.functional.cross_entropy(output, batch[-1], reduction="sum"), len(output)),
        train_data=torch.utils.data.TensorDataset(ids, labels),
        optimizer=lambda named: optimizers(kind, [p for _, p in named]),
        global_batch_size=12,
        max_grad_norm=0.3,
    )

def optimizers(kind, parameters):
    if kind == "two":
        return [torch.optim.SparseAdam(parameters[:1], lr=0.05), torch.optim.AdamW(parameters[1:], lr=0.05)]
    more = {"momentum": 0.9} if kind == "momentum" else {}
    return getattr(torch.optim, "SGD" if more else kind)(parameters, lr=0.5, **more)
"""


def test_rows_of_a_table_are_pushed_alone_and_train_it_as_whole_ones_do(shop: Shop) -> None:
    shop.write("table.py", TABLE)
    steps = ("--train.steps", "9", "--watch.to", "console,jsonl")
    one = shop.run("train", "table.py", "--ranks", "2", "--job.sparse", "false", "--run-dir", "one", *steps)
    words = ("--ranks", "3", "--update", "ps,staleness=0", "--run-dir", "other")
    other = shop.run("train", "table.py", *words, *steps)
    words = ("--ranks", "4", "--update", "ps,servers=2,staleness=3", "--run-dir", "late")
    late = shop.run("train", "table.py", *words, *steps)
    assert one.code == other.code == late.code == 0, one.text + other.text + late.text
    first, second = weights(shop, "one"), weights(shop, "other")
    for name, value in first.items():
        assert torch.allclose(value, second[name], rtol=1e-5, atol=1e-6), name
    assert not torch.allclose(first["table.weight"], weights(shop, "late")["table.weight"], atol=1e-4)


@pytest.mark.soak
def test_a_rule_that_takes_rows_alone_has_its_table_on_one_of_several_servers(shop: Shop) -> None:
    """The others' optimizers have it in their groups too, with nothing in it."""
    shop.write("table.py", TABLE)
    words = ("table.py", "--job.kind", "two", "--train.steps", "4", "--checkpoint.every", "2", "--run-dir", "run")
    for ranks, update in ((4, "ps,servers=2,staleness=0"), (3, "ps,staleness=0")):
        ended = shop.run("train", *words, "--ranks", str(ranks), "--update", update)
        assert ended.code == 0, ended.text
        words = tuple("6" if word == "4" else word for word in words)
    ended = shop.run("train", *words[:-1], "one", "--ranks", "3", "--update", "ps,staleness=0")
    assert ended.code == 0, ended.text
    for name, value in weights(shop, "run").items():
        assert torch.allclose(value, weights(shop, "one")[name], rtol=1e-5, atol=1e-6), name


def test_a_sparse_gradient_travels_as_its_rows() -> None:
    table = torch.nn.Embedding(5000, 8, sparse=True)
    table(torch.tensor([[3, 7], [7, 4999]])).sum().backward()
    assert table.weight.grad is not None
    gradients = [None, table.weight.grad.coalesce(), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor(5.0)]
    row = pack_gradients(gradients)
    assert row.numel() < 400 < table.weight.nbytes
    like = [torch.zeros(4), table.weight, torch.zeros(2, 3, dtype=torch.bfloat16), torch.tensor(0.0)]
    back = unpack_gradients(row, codes=gradient_codes(gradients), like=like)
    assert back[0] is None and back[1] is not None and back[1].is_sparse
    assert torch.equal(back[1].to_dense(), table.weight.grad.to_dense())
    assert back[2] is not None and torch.equal(back[2], gradients[2]) and back[3] == 5.0


TERMS = """
import torch
import paceline as pl

def make_job(claims: int = 0) -> pl.Job:
    def loss(output, batch):
        few = batch[:, 0] == 0
        return {"all": (output.square().sum(), len(output)), "few": (output[few].sum(), few.sum())}

    return pl.Job(
        model=lambda: torch.nn.Linear(4, 2),
        loss=loss,
        forward=lambda model, batch: model(batch),
        count=lambda batch: {"all": len(batch), "few": (batch[:, 0] == 0).sum() + claims},
        train_data=(torch.arange(48 * 4).reshape(48, 4) % 32).float() / 32,  # every eighth sample has a target of few
        order="sequential",
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
        global_batch_size=8,
    )
"""


def test_a_share_that_has_nothing_of_a_term_takes_the_others(shop: Shop) -> None:
    shop.write("terms.py", TERMS)
    ended = shop.run("verify", "terms.py", "--ranks", "3", "--update", "ps,staleness=2", "--steps", "5")
    assert ended.code == 0 and "bitwise" in ended.out, ended.text


@pytest.mark.parametrize("bound", [0, 2])
def test_a_count_that_the_loss_does_not_confirm_is_found(shop: Shop, bound: int) -> None:
    shop.write("terms.py", TERMS)
    words = ("--job.claims", "1", "--train.steps", "3", "--run-dir", "run")
    ended = shop.run("train", "terms.py", *words, "--ranks", "3", "--update", f"ps,staleness={bound}")
    assert ended.code == 2 and "for the term 'few' over the global batch, but the loss returns 1" in ended.text, (
        ended.text
    )


def test_weights_are_packed_once_for_the_shares_of_a_joint_batch() -> None:
    weight, books = torch.zeros(3), Leases(bound=0)
    state = ServerState(
        leases=books, served=ServedWeights(names=["w"], weights=[weight], fixed=[], digest=""), timeout_seconds=1
    )
    rows = [state.weights_buffer(), state.weights_buffer()]
    assert rows[0] is rows[1]
    for step in range(3):
        weight.fill_(step)  # by an update, or by hand: then it makes no version
        state.offer_shares(step, {}, [BatchShare(step=step, number=number, num_shares=2) for number in range(2)])
        found = [state.lease_share(worker, buffer=row) for worker, row in enumerate(rows)]
        assert rows[0][:12].view(torch.float32).tolist() == [step] * 3
        if step == 1:
            weight.fill_(9)
            books.release_worker(1)  # the one that takes its share over has the weights of the batch
            found[1] = state.lease_share(0, buffer=rows[0])
            assert rows[0][:12].view(torch.float32).tolist() == [step] * 3
        for one in found:
            assert one is not None
            books.record_push(one[0])
        books.record_update(books.ready_leases())
        state.version += step % 2


def test_a_worker_that_was_started_again_replaces_the_one_whose_end_nobody_has_noticed() -> None:
    """Once in 1,000 kills, gloo kept a receive open for as long as the timeout of the run."""
    weight, leases = torch.zeros(3), Leases(bound=0)
    served = ServedWeights(names=["w"], weights=[weight], fixed=[], digest="")
    state = ServerState(leases=leases, served=served, timeout_seconds=1)
    state.offer_shares(0, {}, [BatchShare(step=0, number=0, num_shares=1)])
    state.add_worker(1, rank=1, start_number=1, digest="")
    state.add_worker(2, rank=2, start_number=1, digest="")
    granted = state.lease_share(1, buffer=state.weights_buffer())
    assert granted is not None
    state.add_worker(3, rank=1, start_number=2, digest="")
    again = state.lease_share(3, buffer=state.weights_buffer())
    assert again is not None and again[0].share == granted[0].share
    with pytest.raises(ConnectionLost):  # its gradient, if it comes at all, comes twice
        state.store_push(granted[0], GradientPush(gradients=[], terms={}, divided_by=None))
    state.offer_shares(1, {}, [BatchShare(step=1, number=0, num_shares=1)])
    with pytest.raises(ConnectionLost):
        state.lease_share(1, buffer=state.weights_buffer())
    assert state.num_workers == 2 and "lost worker 1, which was replaced" in state.notes[0]
    state.remove_worker(1, reason="whose process has ended")  # its thread ends at last
    assert state.num_workers == 2 and len(state.notes) == 2


def test_the_workers_of_a_lost_node_are_given_up_and_what_they_had_not_pushed_is_counted(tmp_path: Path) -> None:
    """Of a machine that has vanished, no connection ends."""
    served = ServedWeights(names=["w"], weights=[torch.zeros(3)], fixed=[], digest="")
    state = ServerState(leases=Leases(bound=0), served=served, timeout_seconds=600)
    shares = [BatchShare(step=0, number=number, num_shares=3) for number in range(3)]
    state.offer_shares(0, {}, shares, micro_sizes=[4, 4, 4, 3])  # share 0 has the first microbatch and the last
    for rank in (1, 2, 3):
        state.add_worker(rank, rank=rank, start_number=1, digest="")
    leased = {rank: state.lease_share(rank, buffer=state.weights_buffer()) for rank in (2, 3, 1)}
    assert leased[3] is not None
    state.store_push(leased[3][0], GradientPush(gradients=[], terms={}, divided_by=None))
    state.remove_worker(3, reason="whose process has ended")
    node = LostNode(node=1, name="node 1 (host1, ranks 2-3)", first_rank=2, num_ranks=2, reason="", step=0)
    watch_lost_nodes(state, LaunchInfo(world_size=4, local_world_size=2), tmp_path)
    LOST_NODES.write(tmp_path, [node])
    wait_until(lambda: bool(LOST_WORK.read(tmp_path)), seconds=10)
    assert LOST_WORK.read(tmp_path) == [LostWork(gradients=1, samples=7)]  # the gradient of rank 3 counts
    assert state.num_workers == 1 and state.notes[-1] == (
        "node 1 (host1, ranks 2-3) is lost after step 0: 1 unpushed gradient (7 samples) is lost, and other workers "
        "compute it again; 1 worker left"
    )
    again = state.lease_share(1, buffer=state.weights_buffer())
    assert again is not None and leased[2] is not None and again[0].share == leased[2][0].share
    with pytest.raises(ConnectionLost):  # the network was only silent
        state.store_push(leased[2][0], GradientPush(gradients=[], terms={}, divided_by=None))
    LOST_NODES.write(tmp_path, [node, node])
    wait_until(lambda: len(LOST_WORK.read(tmp_path)) == 2, seconds=10)
    assert LOST_WORK.read(tmp_path)[1] == LostWork(gradients=0, samples=0)
    state.end_run()


def test_a_worker_that_comes_before_the_first_batch_hears_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation may come first, and take longer than anybody waits for a silent one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store(LaunchInfo(port=0), timeout_seconds=60)
    entrance = WorkerEndpoint(launch_info=LaunchInfo(port=store.port))
    weight, fixed = torch.zeros(3), torch.zeros(2)
    state = ServerState(
        leases=Leases(bound=1),
        served=ServedWeights(names=["w"], weights=[weight], fixed=[fixed], digest=""),
        timeout_seconds=0.2,
    )
    server_threads = ServerThreads(
        state, acceptor=ConnectionAcceptor(entrance, server=0, timeout_seconds=60), is_first_server=True
    )
    server_threads.open()
    connection = connect_to_server(entrance, server=0, timeout_seconds=60)
    connection.send(ServerMessage(kind=MessageKind.HELLO, fields={"rank": 1, "start_number": 1, "model": ""}))
    assert [connection.receive().kind for _ in range(3)] == [MessageKind.WAIT] * 3
    fixed.fill_(7)  # by hand, before the first batch
    state.offer_shares(0, {}, [BatchShare(step=0, number=0, num_shares=1)])
    while (message := connection.receive()).kind is MessageKind.WAIT:
        pass
    assert message.kind is MessageKind.FIXED and message.buffer is not None
    assert message.buffer[:8].view(torch.float32).tolist() == [7.0, 7.0]
    assert connection.receive().kind is MessageKind.LEASE
    server_threads.close()


BAD = {
    "no worker is left": ("--ranks", "1", "--update", "ps"),
    "with 2 ranks: no worker is left": ("--ranks", "2", "--update", "ps,servers=2"),
    "staleness must be an integer from 0, or none": ("--ranks", "3", "--update", "ps,staleness=-1"),
    "servers must be an integer from 1": ("--ranks", "3", "--update", "ps,servers=0"),
    "ps has no option 'bound'": ("--ranks", "3", "--update", "ps,bound=3"),
    "9 servers, but the model has 6 parameters": ("--ranks", "11", "--update", "ps,servers=9"),
    "--update ps needs ddp, not pp": ("--ranks", "3", "--layout", "pp", "--update", "ps"),
    "--update ps needs ddp, not fsdp": ("--ranks", "3", "--layout", "fsdp", "--update", "ps"),
    "--train.exact with --update ps": ("--ranks", "3", "--update", "ps", "--train.exact"),
    "fp16 with --update ps": ("--ranks", "3", "--update", "ps", "--train.precision", "fp16"),
    "sync_bn with --update ps": ("--ranks", "3", "--update", "ps", "--train.buffers", "sync_bn"),
    "--data.workers with --update ps": ("--ranks", "3", "--update", "ps", "--data.workers", "1"),
    "--log.statistics with --update ps": ("--ranks", "3", "--update", "ps", "--log.statistics"),
    "first.norm keeps running statistics": ("--ranks", "3", "--update", "ps", "--job.norm", "true"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_can_not_be_had_with_is_said(shop: Shop, said: str) -> None:
    words = ("train", "job.py", *BAD[said], "--run-dir", "run", "--train.steps", "2")
    began = time.monotonic()
    ended = shop.run(*words)
    assert ended.code == 2 and said.replace("first.", "") in ended.text, ended.text
    assert "Traceback" not in ended.text and time.monotonic() - began < 60


@pytest.mark.parametrize(("kind", "said"), [("AdamW", "AdamW"), ("momentum", "SGD with momentum")])
def test_a_sparse_push_that_the_optimizer_can_not_take_is_refused(shop: Shop, kind: str, said: str) -> None:
    shop.write("table.py", TABLE)
    words = ("--ranks", "3", "--update", "ps", "--run-dir", "run", "--train.steps", "2")
    ended = shop.run("train", "table.py", "--job.kind", kind, *words)
    assert ended.code == 2 and f"table gives sparse gradients, but {said}" in ended.text, ended.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [("loss_over='batch'", "no worker ever has the whole batch"), ("ema=0.9", "at an uncontrolled rate")],
)
def test_what_a_job_can_not_ask_for_is_said(shop: Shop, changed: str, said: str) -> None:
    text = f"from dataclasses import replace\nimport job as other\n\n\ndef make_job():\n    return replace(other.make_job(), {changed})\n"
    shop.write("changed.py", text)
    ended = shop.run("train", "changed.py", "--ranks", "3", "--update", "ps", "--run-dir", "run", "--train.steps", "2")
    assert ended.code == 2 and said in ended.text, ended.text


def test_a_stream_is_refused(shop: Shop) -> None:
    text = "from dataclasses import replace\nimport job as other\n\n\ndef make_job():\n    job = other.make_job()\n" \
           "    return replace(job, train_data=lambda: iter(job.train_data))\n"  # fmt: skip
    shop.write("stream.py", text)
    ended = shop.run("train", "stream.py", "--ranks", "3", "--update", "ps", "--run-dir", "run", "--train.steps", "2")
    assert ended.code and "train_data is a stream, but --update ps" in ended.text, ended.text


def test_verify_does_the_run_again_in_its_own_order(shop: Shop) -> None:
    words = ("--job.dropout", "0.3", "--steps", "10", "--json")
    for ranks, update in ((4, "ps,staleness=2"), (5, "ps,servers=2,staleness=none"), (3, "ps,staleness=0")):
        ended = shop.run("verify", "job.py", "--ranks", str(ranks), "--update", update, *words)
        assert ended.code == 0, ended.text
        found = ended.json()
        assert found["verdict"] in ("bitwise", "rounding") and found["reference"].startswith("serial ps")
        assert [rung["name"] for rung in found["rungs"]] == [
            "one process",
            "replayed in float64",
            "replayed in fp32",
        ]


PLANTED = {
    "weights of the version before": """
from paceline.step.parameter_server.state import ServerState
plain = ServerState.lease_share
def lease(self, worker, *, buffer):
    before = getattr(self, "before", None)
    found = plain(self, worker, buffer=buffer)
    now = buffer.clone()
    if before is not None and found is not None:
        buffer.copy_(before)
    self.before = now
    return found
ServerState.lease_share = lease
""",
    "a share divided by another count": """
from paceline.step.parameter_server import parameter_server_step as server
server.divide_all = lambda tensors, count: [tensor.div_(count + 1) for tensor in tensors]
""",
    "samples of another share": """
from paceline.data import leased_loader as leased
plain = leased.RandomAccessLoader.read_share
def read_share(self, cursor, number=0, num_shares=1, **how):
    return plain(self, cursor, number=(number + 1) % num_shares, num_shares=num_shares, **how)
leased.RandomAccessLoader.read_share = read_share
""",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_verify_sees_a_planted_mistake(shop: Shop, planted: str) -> None:
    shop.write("planted.py", f"from job import make_job\n{PLANTED[planted]}")
    ended = shop.run("verify", "planted.py", "--ranks", "4", "--update", "ps,staleness=2", "--steps", "10")
    assert ended.code == 4 and "DIFFERENT" in ended.text, ended.text


@pytest.mark.parametrize("bound", [0, 4])
def test_a_script_has_its_loop_on_the_server(shop: Shop, bound: int) -> None:
    """Within a bound above 0 a step returns before its shares are pushed, and reading its loss waits for them."""
    text = """
import paceline as pl
from job import make_job

if __name__ == "__main__":
    settings = {"train.steps": 8, "watch.to": ["jsonl"]}
    with pl.Run(make_job(), ranks=3, update="ps,staleness=BOUND", run_dir="run", settings=settings) as run:
        losses = [run.step(batch).loss for batch in run.batches()]
        print("rank", run.rank, "losses", len(losses))
"""
    shop.write("script.py", text.replace("BOUND", str(bound)))
    ended = shop.call([sys.executable, "-W", "ignore", "script.py"])
    assert ended.code == 0 and "rank 0 losses 8" in ended.text, ended.text
    if bound:
        return
    assert shop.train("other", ranks=2, steps=8).code == 0
    for name, value in weights(shop, "other").items():
        assert torch.allclose(value, weights(shop, "run")[name], rtol=1e-5, atol=1e-6), name
