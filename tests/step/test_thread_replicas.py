"""Replicas as threads: gradients and weights equal one process that runs the microbatches in sequence."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.process_group import World
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings, Train
from paceline.config.update_rule import UpdateRule
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import PacelineError, RunError
from paceline.job import Job
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.step.shared_memory.rng_turns import HostRandomness, HostRngTurns
from paceline.step.shared_memory.threads_step import ThreadsStep
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from tests.conftest import Shop

# Both sides compute each microbatch's gradient with the same kernels and differ in the order of the sum alone:
# a few units in the last place of float64 (2^-52), for the handful of summands of these jobs.
LAST_PLACES = 32 * 2.0**-52
# AdamW divides by roots of squares that may be near zero, and each step starts from the last one's weights.
MANY_STEPS = 2.0**-36


class Net(nn.Module):
    """Six inputs, four classes; with what may go wrong between replicas."""

    def __init__(
        self, *, norm: bool = False, dropout: float = 0.0, tied: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=not norm, dtype=torch.float64)  # a bias before it would only draw noise
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64) if norm else nn.LayerNorm(8, dtype=torch.float64)
        self.middle = nn.Linear(8, 8, dtype=torch.float64)
        self.again = nn.Linear(8, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 4, dtype=torch.float64)
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute
        if tied:
            self.again.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = checkpoint(self._inner, h, use_reentrant=False) if self.recompute else self._inner(h)
        return self.second(h)

    def _inner(self, h: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.again(torch.tanh(self.middle(h)))))


def masked(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    kept = batch[-1] != 3
    return F.cross_entropy(output[kept], batch[-1][kept], reduction="sum"), kept.sum()


def two(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, Any]]:
    return {"token": masked(output, batch), "size": (output.square().sum() * 0.01, len(output))}


def make(
    model: Callable[[], nn.Module],
    *,
    samples: int = 50,
    batch: int = 12,
    terms: bool = False,
    clip: float | None = None,
) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 7, (samples,), generator=generator) % 4
    return Job(
        model=model,
        loss=two if terms else masked,
        count=(lambda b: {"token": (b[-1] != 3).sum(), "size": len(b[-1])}) if terms else None,
        train_data=torch.utils.data.TensorDataset(x, y),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        global_batch_size=batch,
        max_grad_norm=clip,
    )


def built(job: Job, replicas: int, *, micro: int | None = None, **train: Any) -> TrainingSetup:
    plan = make_execution_plan(
        layout=parse_layout("threads"),
        update=UpdateRule(),
        resources=Resources(ranks=replicas, cores=1),
        facts=JobFacts(global_batch_size=job.global_batch_size, micro_batch_size=micro),
    )
    settings = Settings(train=Train(max_grad_norm=job.max_grad_norm, **train))
    return build_training_setup(job=job, settings=settings, plan=plan, world=World.alone())


def feed(made: TrainingSetup) -> Any:
    plan = made.plan
    cut = BatchPartition(global_batch_size=plan.global_batch_size, micro_batch_size=plan.micro_batch_size)
    job = made.job
    return iter(make_loader(data=job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))


def alone(made: TrainingSetup) -> Reference:
    plan = made.plan
    spec = ReferenceConfig(
        seed=0,
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        max_grad_norm=made.job.max_grad_norm,
    )
    return Reference(job=made.job, config=spec, cast=lambda x: x)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / max(float(other.norm()), 1e-300)) if other.numel() else 0.0


def follow(made: TrainingSetup, *, steps: int = 6) -> None:
    """Each step: gradients, weights and buffers; over the short last batch and into the next epoch."""
    right, given, at = alone(made), feed(made), RunPosition(steps_done=0, epoch=0, batch_start=0)
    for _ in range(steps):
        wanted = right.compute_gradient(at)
        result = made.step.run(next(given))
        assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
        found = {m.name: m.parameter.grad for m in made.named_parameters if m.parameter.grad is not None}
        assert found.keys() == wanted.total.keys()
        for name, gradient in found.items():
            assert made.job.max_grad_norm is not None or apart(gradient, wanted.total[name]) < LAST_PLACES, name
        right.update(wanted.total)
        for name, tensor in tensors(made.model).items():
            assert apart(tensor, tensors(right.model)[name]) < MANY_STEPS, name
        at = right.next_position(at, sum(map(len, wanted.samples)))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().double() for n, t in (*model.named_parameters(), *model.named_buffers())}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "plain": ({}, {}, None),
    "accumulation": ({}, {}, 2),
    "two terms": ({}, {"terms": True}, 3),
    "clipping": ({}, {"clip": 0.05}, 2),
    "dropout": ({"dropout": 0.4}, {}, 2),
    "running statistics": ({"norm": True}, {"samples": 52}, 4),
    "tied weights": ({"tied": True}, {}, 3),
    "a last batch of one sample, replicas idle": ({}, {"samples": 25}, 4),
    "fewer microbatches than replicas": ({}, {}, 12),
    "dropout that a checkpoint draws again": ({"dropout": 0.4, "recompute": True}, {}, 2),
}


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_one_process(name: str, replicas: int) -> None:
    model, job, micro = CASES[name]
    made = built(make(lambda: Net(**model), **job), replicas, micro=micro)
    assert isinstance(made.step, ThreadsStep) and len(made.models) == replicas
    follow(made)
    made.close()


def test_replicas_share_their_weights_and_nothing_else() -> None:
    made = built(make(lambda: Net(norm=True, tied=True)), 3)
    first, *others = made.models
    for other in others:
        for mine, its in zip(first.parameters(), other.parameters(), strict=True):
            assert mine is not its and mine.data_ptr() == its.data_ptr()
        for mine, its in zip(first.buffers(), other.buffers(), strict=True):
            assert mine.data_ptr() != its.data_ptr()
        assert other.again.weight is other.middle.weight
    with torch.no_grad():
        first.norm.running_mean.fill_(3.0)
        first.second.weight.data = first.second.weight.data * 2
    made.step.run(next(feed(made)))
    assert all(p.grad is None for other in others for p in other.parameters())
    for other in others:
        assert torch.equal(other.norm.running_mean, first.norm.running_mean)
        assert other.second.weight.data_ptr() == first.second.weight.data_ptr()
    assert set(made.model.state_dict()) == set(Net(norm=True, tied=True).state_dict())
    made.close()


def test_replicas_that_draw_nothing_run_at_the_same_time() -> None:
    inside = threading.Barrier(3, timeout=20)
    busy, calls = {"on": False}, []

    class Meets(Net):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            if busy["on"]:
                inside.wait()
            return super().forward(x)

    made = built(make(Meets, samples=24), 3)
    given = feed(made)
    made.step.run(next(given))
    busy["on"] = True
    made.step.run(next(given))
    assert len(calls) == 6
    assert made.step._rng_turns.host_randomness is HostRandomness.NONE  # type: ignore[attr-defined]
    made.close()


@pytest.mark.parametrize(
    ("model", "draws"),
    [({"dropout": 0.5}, HostRandomness.FORWARD), ({"dropout": 0.5, "recompute": True}, HostRandomness.BACKWARD)],
)
def test_what_draws_takes_turns(model: dict[str, Any], draws: HostRandomness) -> None:
    together = {"now": 0, "most": 0}

    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            together["now"] += 1
            together["most"] = max(together["most"], together["now"])
            found = super().forward(x)
            together["now"] -= 1
            return found

    made = built(make(lambda: Counts(**model)), 3, micro=2)
    given = feed(made)
    for _ in range(4):
        made.step.run(next(given))
    assert made.step._rng_turns.host_randomness is draws  # type: ignore[attr-defined]
    assert together["most"] == 1
    made.close()


class Late(Net):
    """Noise of torch, of Python and of NumPy that begins in the third step, and a buffer that counts."""

    def __init__(self, kind: str) -> None:
        super().__init__(norm=True)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.training and LATE["on"]:
            found = found * DRAW[self.kind]()
        return found


LATE = {"on": False}
DRAW: dict[str, Callable[[], Any]] = {
    "torch": lambda: 1.0 + torch.rand((), dtype=torch.float64),
    "python": lambda: 1.0 + random.random(),
    "numpy": lambda: 1.0 + float(np.random.rand()),
}


@pytest.mark.parametrize("kind", DRAW)
def test_a_model_that_begins_to_draw_is_run_again_in_turns(kind: str) -> None:
    made = built(make(lambda: Late(kind), samples=48), 2, micro=3)
    right, given, at = alone(made), feed(made), RunPosition(steps_done=0, epoch=0, batch_start=0)
    for number in range(4):
        LATE["on"] = number >= 2
        wanted = right.compute_gradient(at)
        made.step.run(next(given))
        right.update(wanted.total)
        at = right.next_position(at, 12)
        for name, tensor in tensors(made.model).items():
            assert apart(tensor, tensors(right.model)[name]) < MANY_STEPS, (number, name)
    LATE["on"] = False
    assert made.step._rng_turns.host_randomness is HostRandomness.FORWARD  # type: ignore[attr-defined]
    made.close()


FORGETFUL = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
import paceline as pl

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU())

    def forward(self, x):
        return self.second(checkpoint(self.block, self.first(x), use_reentrant=False, preserve_rng_state=False))

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
job = pl.Job(
    model=Net, train_data=torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), global_batch_size=24,
    loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
)
"""


def test_what_a_checkpoint_draws_anew_is_what_one_process_draws(shop: Shop) -> None:
    shop.write("job.py", FORGETFUL)
    words = ("--train.exact", "--train.micro_batch_size", "2")
    assert shop.train("one", *words, ranks=1, steps=8).code == 0
    assert shop.train("threads", *words, "--layout", "threads", ranks=4, steps=8).code == 0
    assert shop.digest("threads") == shop.digest("one")


def test_whoever_fails_first_is_named_and_the_others_do_not_wait_for_ever() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("one sample is too few")
            return super().forward(x)

    made = built(make(Fails, samples=25, batch=24), 3, micro=8)
    given = feed(made)
    made.step.run(next(given))
    with pytest.raises(ValueError, match="too few") as caught:
        made.step.run(next(given))
    assert caught.value.__notes__ == ["in replica 0 of 3"]
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]
    made.close()
    for thread in waiting:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_replica_that_is_stuck_ends_the_step_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.step.shared_memory.thread_pool.PATIENCE_SECONDS", 0.1)
    leave = threading.Event()

    class Stuck(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 5:
                leave.wait(300)
            return super().forward(x)

    made = built(make(Stuck, samples=17, batch=17), 2, micro=12, timeout_seconds=0.3)
    with pytest.raises(
        RunError, match=r"(only 1 of 2 replicas reached a collective|of another replica did not end) within 0.3 s"
    ):
        made.step.run(next(feed(made)))
    leave.set()
    made.close()


def test_a_turn_that_never_comes_ends_by_the_clock() -> None:
    turns = HostRngTurns(timeout_seconds=0.2)
    with (
        turns.forward_context(lambda: None),
        ThreadPoolExecutor(1) as other,
        pytest.raises(RunError, match=r"within 0.2 s"),
    ):
        other.submit(turns.forward_context(lambda: None).__enter__).result(timeout=10)


ONE = Net()
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "one model handed out twice": (lambda: ONE, {}, "returned Net twice"),
    "a part handed out twice": (lambda: nn.Sequential(ONE.first, nn.Linear(8, 4)), {}, "returned 0.weight twice"),
    "another model each time": (lambda: nn.Linear(6, 4 + next(COUNTER)), {}, "two different models"),
    "statistics over replicas": (lambda: Net(norm=True), {"buffers": "sync_bn"}, "sync_bn does not work with"),
    "compiled": (Net, {"compile": True}, "compile does not work with"),
}
COUNTER = iter(range(100))


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_in_one_process_can_not_have_is_refused_by_name(name: str) -> None:
    model, train, text = REFUSED[name]
    with pytest.raises(PacelineError, match=text) as caught:
        built(make(model), 2, **train)
    assert caught.value.hint


COMMON = ("--train.exact", "--train.micro_batch_size", "5", "--job.norm", "true", "--job.dropout", "0.2",
          "--eval.every", "100")  # fmt: skip


def test_a_world_of_several_processes_is_not_nested(shop: Shop) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    ended = shop.run("train", "job.py", "--layout", "threads", "--ranks", "2", environ=world)
    assert ended.code == 2 and "layout threads is one process, but torchrun started 4" in ended.err


PYTHON = """
from job import make_job
import paceline as pl
settings = {"train.steps": 12, "train.exact": True, "train.micro_batch_size": 5, "eval.every": 100}
with pl.Run(make_job(norm=True, dropout=0.2), layout="threads", ranks=2, run_dir="python", settings=settings) as run:
    for batch in run.batches():
        run.step(batch)
"""


@pytest.mark.soak
def test_exact_mode_has_the_digest_of_one_process_from_python_and_through_a_kill_and_another_layout(shop: Shop) -> None:
    assert shop.train("one", *COMMON, ranks=1).code == 0
    killed = shop.train(
        "cut",
        *COMMON,
        "--checkpoint.every",
        "4",
        "--survive.restarts",
        "0",
        "--faults",
        "kill rank=1 step=7 attempt=1",
        ranks=2,
    )
    assert killed.code == 1
    assert shop.train("cut", *COMMON, "--layout", "threads=3", ranks=3).code == 0
    assert shop.digest("cut") == shop.digest("one")
    command = [sys.executable, "-W", "ignore", str(shop.write("mine.py", PYTHON))]
    environ = shop.environ()
    done = subprocess.run(command, cwd=shop.path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert shop.digest("python") == shop.digest("one")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("--job.dropout", "0.3", "--train.micro_batch_size", "2")),
        (3, ("--job.norm", "true", "--data.workers", "1")),
    ],
)
def test_verify_calls_it_the_same_training(shop: Shop, ranks: int, words: tuple[str, ...]) -> None:
    ended = shop.run("verify", "job.py", "--layout", f"threads={ranks}", "--json", "--steps", "2", *words)
    assert ended.code == 0, ended.text
    found = ended.json()
    assert found["verdict"] in ("bitwise", "rounding")
    assert (found["layout"], found["ranks"], found["first_difference"]) == ("threads", ranks, None)


def test_verify_finds_a_replica_whose_gradient_is_lost(shop: Shop) -> None:
    fault = """
from paceline.parallel.data_parallel import thread_replicas as _t
_add_gradients = _t.ThreadReducer._add_gradients
def add(self, totals, gradients):
    _add_gradients(self, totals, {} if totals else gradients)
_t.ThreadReducer._add_gradients = add
"""
    shop.write("job.py", (shop.path / "job.py").read_text() + fault)
    ended = shop.run("verify", "job.py", "--layout", "threads", "--ranks", "2", "--json")
    assert ended.code == 4, ended.text
    assert ended.json()["first_difference"]["step"] == 1


def test_an_exception_in_a_thread_names_the_replica_and_the_line(shop: Shop) -> None:
    text = (shop.path / "job.py").read_text()
    text = text.replace("kept = batch[-1] != 3\n    return", "kept = batch[-1] != 3\n    check(batch)\n    return")
    text += """
import threading
def check(batch):
    if threading.current_thread().name == "replica-1":
        raise ValueError("bad batch")
"""
    shop.write("job.py", text)
    ended = shop.train("run", "--layout", "threads")
    assert ended.code == 1
    line = text.splitlines().index('        raise ValueError("bad batch")') + 1
    assert f"job.py:{line}, ValueError: bad batch (in replica 1 of 2)" in ended.text


def test_one_process_is_started_and_a_signal_saves_and_stops_it(shop: Shop) -> None:
    words = ("train", "job.py", "--layout", "threads", "--ranks", "2", "--run-dir", "run", "--train.steps", "100000")
    started = shop.start(*words, "--watch.to", "console", "--eval.every", "100000", "--checkpoint.every", "100000")
    assert started.stdout is not None
    seen = [next(started.stdout) for _ in range(2)]
    for text in started.stdout:
        seen.append(text)
        if text.startswith("step 10 "):
            break
    started.send_signal(signal.SIGINT)
    text = "".join([*seen, *started.communicate(timeout=60)])
    assert started.returncode == 75, text
    assert "starting 1 process;" in text and "layout: threads, 2 replicas in one process" in text
    assert "--ranks 2 --layout threads" in text
