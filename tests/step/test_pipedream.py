"""PipeDream equals one process that keeps every weight version, after many updates."""

import json
from typing import Any

import pytest

from tests.conftest import Shop

JOB = """
from dataclasses import replace

import torch
import paceline as pl
from paceline.examples import text
from paceline.step.pipedream.weight_versions import WeightVersions
from transformers import LlamaConfig


class Rows(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.ids = torch.randint(0, 64, (samples, 12), generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


RULES = {
    "sgd": lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
    "momentum": lambda named: torch.optim.SGD([p for _, p in named], lr=0.03, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
}


def newest(self, number):  # no stash: whatever is there when the forward comes
    return plain_get(self, self.newest)


def swapped(self, weights):  # no stash: the backward meets the weights of its own time
    for name, tensor in (weights or {}).items():
        tensor.data = self._parameters[name].detach().clone()
    plain_prepare(self, weights)


plain_get, plain_prepare = WeightVersions.get, WeightVersions.prepare_backward


def make_job(kind: str = "text", rule: str = "adamw", depth: int = 4, samples: int = 4000, dropout: float = 0.0,
             clip: float = 0.0, tied: bool = False, batch: int = 8, plant: str = "", ema: bool = False) -> pl.Job:
    if plant == "newest":
        WeightVersions.get = newest
    if plant == "swapped":
        WeightVersions.prepare_backward = swapped
    if kind == "llama":
        config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=depth,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                             tie_word_embeddings=tied)
        return pl.hf.job(config, train_data=lambda: Rows(samples), optimizer=RULES[rule], global_batch_size=batch,
                         max_grad_norm=clip or None)
    job = text.make_job(width=16, depth=depth, context=12, dropout=dropout)
    return replace(job, optimizer=RULES[rule], global_batch_size=batch, max_grad_norm=clip or None, on_eval=None,
                   eval_data=torch.utils.data.Subset(job.train_data(), range(9)), ema=0.9 if ema else None,
                   lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.7), best=None, settings=None)
"""
SMALL = ("--train.micro_batch_size", "8")


@pytest.fixture
def bench(shop: Shop) -> Shop:
    shop.write("stash.py", JOB)
    return shop


def verified(shop: Shop, ranks: int, *words: str, steps: int = 12) -> dict[str, Any]:
    ended = shop.run("verify", "stash.py", "--ranks", str(ranks), "--steps", str(steps), "--json", *words, timeout=400)
    assert ended.code in (0, 4), ended.text
    found: dict[str, Any] = ended.json()
    return found


def assert_same(found: dict[str, Any], *, rungs: int = 3) -> None:
    assert found["verdict"] in ("bitwise", "rounding"), json.dumps(found["lines"], indent=1)
    assert found["reference"].startswith("serial ")
    assert len(found["rungs"]) == rungs
    assert all(rung["compared"].get("weights", 0) > 5 for rung in found["rungs"][1:])


def test_pipedream_in_three_stages_is_its_serial_reference(bench: Shop) -> None:
    found = verified(bench, 3, "--layout", "pp", "--update", "pipedream", *SMALL, "--job.dropout", "0.2")
    assert_same(found)


@pytest.mark.soak
def test_2bw_over_replicas_and_with_accumulation_is_its_serial_reference(bench: Shop) -> None:
    words = ("--layout", "pp=2,dp=2", "--update", "2bw", "--train.micro_batch_size", "2", "--job.kind", "llama")
    assert_same(verified(bench, 4, *words, "--job.clip", "0.5"))


@pytest.mark.parametrize(
    ("plant", "update"),
    [pytest.param("newest", "pipedream,vertical", marks=pytest.mark.soak), ("swapped", "pipedream")],
)
def test_without_stashing_it_is_another_training(bench: Shop, plant: str, update: str) -> None:
    words = ("--layout", "pp", "--update", update, *SMALL, "--job.rule", "sgd", "--job.plant", plant)
    assert verified(bench, 3, *words)["verdict"] == "different"


@pytest.mark.soak
def test_saving_evaluating_and_going_on_change_no_bit(bench: Shop) -> None:
    words = ("--layout", "pp", "--update", "pipedream", *SMALL)
    straight = bench.run(*train("straight", 11), *words)
    often = bench.run(*train("often", 11), *words, "--checkpoint.every", "3", "--eval.every", "4")
    first = bench.run(*train("parts", 5), *words)
    then = bench.run(*train("parts", 11), *words)
    assert not any(run.code for run in (straight, often, first, then)), then.text
    assert "resumed: step-00000005" in then.text
    assert len({bench.digest(run) for run in ("straight", "often", "parts")}) == 1
    assert not bench.run("ckpt", "verify", "parts").code
    assert "held at once" in _page(bench, "straight")
    steps = _events(bench, "straight")
    assert [e["step"] for e in steps if e["event"] == "StepDone"] == [1, 10, 11]
    assert [(e["samples"], round(e["lr"], 6)) for e in steps if e["event"] == "StepDone"] == [
        (8, 0.003),
        (80, 0.00147),
        (88, 0.00147),
    ]
    evaluated = [e["step"] for e in _events(bench, "often") if e["event"] == "EvalDone"]
    assert evaluated == [4, 8, 11]
    told = next(e for e in reversed(steps) if e["event"] == "Staleness")["told"]
    assert [one["late"] for one in told] == [[[0, 1], [1, 1], [2, 9]], [[0, 1], [1, 10]], [[0, 11]]]
    assert [one["versions"] for one in told] == [3, 2, 1]
    assert all(one["sent_bytes"] > 11 * 8 * 12 * 16 * 4 for one in told)


def _events(bench: Shop, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bench.path / run / "events.jsonl").read_text().splitlines()]


def train(run: str, steps: int) -> list[str]:
    return ["train", "stash.py", "--ranks", "3", "--run-dir", run, "--train.steps", str(steps)]


@pytest.mark.soak
def test_another_rule_or_number_of_stages_is_refused_unless_it_is_allowed(bench: Shop) -> None:
    assert not bench.run(*train("run", 4), "--update", "pipedream", *SMALL).code
    for words in (("--update", "sync"), ("--update", "pipedream,vertical")):
        ended = bench.run(*train("run", 6), "--layout", "pp", *words, *SMALL)
        assert ended.code == 2 and "update: was pipedream in 3 stages of 2-1-1 blocks" in ended.text, ended.text
    moved = bench.run(*train("run", 6), "--update", "pipedream", "--place.stages", "1,2,1", *SMALL)
    assert moved.code == 2 and "is pipedream in 3 stages of 1-2-1 blocks" in moved.text, moved.text
    ended = bench.run(*train("run", 6), "--update", "2bw", "--allow", "update", *SMALL)
    assert ended.code == 0, ended.text
    told = next(e for e in reversed(_events(bench, "run")) if e["event"] == "Staleness")["told"]
    assert [one["late"] for one in told] == [[[0, 1], [1, 1]]] * 3, "from the newest weights"


@pytest.mark.soak
def test_2bw_goes_on_in_another_number_of_stages_with_the_same_bits(bench: Shop) -> None:
    words = ("--update", "2bw", "--train.micro_batch_size", "2")
    runs = [bench.run(*train(*run), *words) for run in (("straight", 9), ("moved", 4))]
    runs.append(bench.run("train", "stash.py", "--ranks", "2", "--run-dir", "moved", "--train.steps", "9", *words))
    assert not any(run.code for run in runs), runs[-1].text
    assert bench.digest("moved") == bench.digest("straight")


BAD = {
    "needs a pipeline, but layout ddp has none": ("--layout", "ddp"),
    "not dp_shard": ("--layout", "pp=2,dp_shard=2", "--ranks", "4"),
    "has its own schedule": ("--layout", "pp,schedule=gpipe"),
    "--train.exact with --update pipedream": ("--layout", "pp", "--train.exact"),
    "on_nonfinite skip with --update pipedream": ("--layout", "pp", "--train.on_nonfinite", "skip"),
    "has no option 'sideways'": ("--layout", "pp", "--update", "pipedream,sideways"),
    "is used in the stages of ranks 0, 1": ("--layout", "pp", "--job.kind", "llama", "--job.tied", "true"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_can_not_be_had_with_is_said(bench: Shop, said: str) -> None:
    words = ["--ranks", "2", "--update", "pipedream", *BAD[said]]
    ended = bench.run("train", "stash.py", *words, "--run-dir", "run", "--train.steps", "2", *SMALL)
    assert ended.code == 2 and said in ended.text, ended.text
    assert "Traceback" not in ended.text


@pytest.mark.soak
def test_killed_it_goes_on_with_the_bits_that_it_would_have_had(bench: Shop) -> None:
    words = ("--layout", "pp", "--update", "2bw", "--train.micro_batch_size", "2", "--checkpoint.every", "3")
    assert not bench.run(*train("straight", 9), *words).code
    killed = bench.run(*train("killed", 9), *words, "--survive.restarts", "0", "--faults", "kill rank=1 step=8")
    assert killed.code == 1 and "rank 1" in killed.text
    again = bench.run(*train("killed", 9), *words)
    assert again.code == 0 and "resumed: step-00000006" in again.text, again.text
    assert bench.digest("killed") == bench.digest("straight")


NAN = """
import torch, paceline as pl


def make_job() -> pl.Job:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    x[37] = float("nan")
    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    return pl.Job(
        model=lambda: torch.nn.Sequential(*(block() for _ in range(4))),
        loss=lambda output, batch: (output.square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, x),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
        global_batch_size=4,
    )
"""


def test_what_is_not_finite_is_told_by_its_own_step_and_ends_all(bench: Shop) -> None:
    bench.write("nan.py", NAN)
    words = ("--ranks", "3", "--update", "pipedream", "--train.steps", "24", "--run-dir", "run")
    ended = bench.run("train", "nan.py", *words)
    assert ended.code == 1 and "NaN or infinity: sample 37 of train_data" in ended.text, ended.text


WRONG = """
import torch, torch.nn as nn, paceline as pl


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind
        self.also = [self.layer.weight]
        if kind == "buffer":
            self.register_buffer("seen", torch.zeros(()))
        if kind == "hook":
            self.layer.weight.register_hook(lambda gradient: gradient * 0)

    def forward(self, x):
        if self.kind == "buffer" and self.training:
            self.seen += 1
        if self.kind == "list":
            return torch.tanh(x @ self.also[0] + self.layer.bias)
        if self.kind == "write":
            with torch.no_grad():
                self.layer.weight.mul_(0.99)
        return torch.tanh(self.layer(x))


def make_job(kind: str = "") -> pl.Job:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=lambda: nn.Sequential(*(Block(kind) for _ in range(4))),
        loss=lambda output, batch: (output.square().sum(), output.numel()),
        train_data=torch.utils.data.TensorDataset(x, x),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
        global_batch_size=4,
    )
"""
KINDS = {
    "buffer": "writes to the buffer",
    "hook": "the hook on it would never be called",
    "list": "through the attribute of its module",
    "write": "the forward writes to the parameter",
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_weights_can_not_change_places_are_refused(bench: Shop, kind: str) -> None:
    bench.write("wrong.py", WRONG)
    words = ("--ranks", "2", "--update", "pipedream", "--job.kind", kind, "--train.steps", "4", "--run-dir", "run")
    ended = bench.run("train", "wrong.py", *words)
    assert ended.code and KINDS[kind] in ended.text, ended.text


@pytest.mark.parametrize(
    "words",
    [
        ("--layout", "pp=2,dp=2", "--train.micro_batch_size", "3", "--job.samples", "43", "--job.kind", "llama"),
        pytest.param(("--layout", "pp=2,remat=full", *SMALL, "--job.ema", "true"), marks=pytest.mark.soak),
        pytest.param(("--layout", "pp=2", "--train.precision", "bf16", *SMALL), marks=pytest.mark.soak),
        pytest.param(("--layout", "pp=2", "--place.cut", "export", *SMALL), marks=pytest.mark.soak),
        pytest.param(
            ("--layout", "pp=2,dp=2", "--train.micro_batch_size", "2", "--job.clip", "0.1"), marks=pytest.mark.soak
        ),
    ],
    ids=lambda words: words[1] + words[3],
)
def test_it_goes_with(bench: Shop, words: tuple[str, ...]) -> None:
    ranks = 4 if "dp=2" in words[1] else 2
    assert_same(verified(bench, ranks, *words, "--update", "pipedream", steps=14))


@pytest.mark.soak
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("kind", ["text", "llama"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("update", ["pipedream", "pipedream,vertical", "2bw"])
def test_fifty_updates(bench: Shop, update: str, stages: int, kind: str, rule: str) -> None:
    micro = "2" if update == "2bw" else "8"
    words = ("--layout", "pp", "--update", update, "--train.micro_batch_size", micro)
    assert_same(verified(bench, stages, *words, "--job.kind", kind, "--job.rule", rule, steps=50))


def _page(bench: Shop, run: str) -> str:
    assert not bench.run("report", run).code
    return (bench.path / run / "report.html").read_text()
