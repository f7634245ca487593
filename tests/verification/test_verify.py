"""verify raises no false alarm on correct runs and names planted faults correctly."""

import json
import math

import pytest

from tests.conftest import SMALL_JOB, Shop

SOUND = [
    (2, ()),
    (3, ("--job.norm", "true")),
    pytest.param(2, ("--job.dropout", "0.3"), marks=pytest.mark.soak),
    (4, ("--job.samples", "25")),
    pytest.param(2, ("--train.micro_batch_size", "2"), marks=pytest.mark.soak),
    (3, ("--job.two_terms", "true", "--train.micro_batch_size", "3")),
    (2, ("--train.buffers", "sync_bn", "--job.norm", "true")),
    pytest.param(2, ("--data.workers", "1"), marks=pytest.mark.soak),
    (2, ("--train.exact", "--job.norm", "true")),
    (2, ("--train.precision", "bf16")),
    (3, ("--train.precision", "fp16", "--job.two_terms", "true")),
]

FACTORY = "\nfrom paceline.parallel.data_parallel import reducer as _r\n"
FAULTS = {
    "reduced twice": (
        FACTORY
        + """
_launch = _r._AllReduceBucket.finish
def land(self, divisor):
    _launch(self, divisor)
    for p in self.parameters:
        p.grad.mul_(2)
_r._AllReduceBucket.finish = land
""",
        "factor of 2",
        None,
    ),
    "one gradient not reduced": (
        FACTORY
        + """
from torch import Tensor
_hook = _r.BucketReducer.finish
def finish(self, *, divisor):
    own = {m.name: m.parameter.grad.clone() for m in self._named_parameters if m.name == "second.weight" and m.parameter.grad is not None}
    done = _hook(self, divisor=divisor)
    for m in self._named_parameters:
        if m.name == "second.weight":
            m.parameter.grad = KEPT[0] / divisor
    return done
KEPT = []
_before = _r.BucketReducer._make_hook
def hook(self, unit, member):
    ready = _before(self, unit, member)
    def wrapped(p):
        if member.name == "second.weight":
            KEPT[:] = [p.grad.clone()]
        ready(p)
    return wrapped
_r.BucketReducer._make_hook = hook
_r.BucketReducer.finish = finish
""",
        "not reduced",
        "second.weight",
    ),
    "a layer frozen on one rank": (
        """
import os
_forward = Net.forward
def forward(self, x):
    if os.environ.get("RANK") == "1" and REAL.get("on"):
        h = torch.tanh(self.norm(self.first(x))).detach()
        return self.second(h)
    return _forward(self, x)
REAL = {"on": True}
Net.forward = forward
""",
        "missing on rank 1",
        ("first", "norm"),
    ),
}


MOE_JOB = """
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, tokens, expert_index, expert_weight):
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(expert_index == number)
            out = out.index_add(0, token, expert(tokens[token]) * expert_weight[token, choice, None])
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.experts = nn.Linear(16, 5), Experts(5, 16)

    def forward(self, x):
        heads = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norm(x).flatten(0, 1)
        weight, index = self.gate(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, index, weight).view_as(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def job():
    draw = torch.Generator().manual_seed(0)
    rows = [tuple(torch.randint(32, (2, 8), generator=draw)) for _ in range(17)]
    return pl.Job(model=Net, loss=loss, train_data=rows, global_batch_size=8, sequence={"0": 1, "1": 1},
                  optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01))
"""


@pytest.mark.parametrize(("ranks", "words"), SOUND)
def test_sound_layouts_are_called_equal(shop: Shop, ranks: int, words: tuple[str, ...]) -> None:
    ended = shop.run("verify", "job.py", "--ranks", str(ranks), "--json", *words)
    assert ended.code == 0, ended.text
    answer = ended.json()
    assert answer["verdict"] in ("bitwise", "rounding")
    assert answer["first_difference"] is None
    assert all(rung["max_difference"] <= max(rung["noise_floor"], 0.0) for rung in answer["rungs"])
    in_double = next((r for r in answer["rungs"] if "float64" in r["name"]), None)
    assert in_double is None or in_double["max_difference"] < 1e-11
    assert {"reference", "layout", "update", "ranks", "steps", "noise_floor", "rungs"} <= set(answer)


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "ranks"), [("ep", 2), ("dp=2,ep=2,tp=2", 4), ("dp=2,ep=2,cp=2", 4)])
def test_experts_in_a_list_are_called_equal(shop: Shop, layout: str, ranks: int) -> None:
    shop.write("job.py", MOE_JOB)
    ended = shop.run("verify", "job.py", "--layout", layout, "--ranks", str(ranks), "--steps", "2", "--json")
    assert ended.code == 0, ended.text
    assert ended.json()["verdict"] == "rounding"


@pytest.mark.parametrize("name", list(FAULTS))
def test_planted_faults_are_named(shop: Shop, name: str) -> None:
    code, cause, parameter = FAULTS[name]
    shop.write("job.py", SMALL_JOB + code)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 4, ended.text
    first = ended.json()["first_difference"]
    assert first["step"] == 1 and ended.json()["lines"][-1].startswith("DIFFERENT at step 1, "), first
    assert cause in first["cause"], first
    assert parameter is None or first["parameter"].startswith(parameter), first


def test_a_wrong_count_is_named_as_train_names_it(shop: Shop) -> None:
    count = "count=lambda batch: (batch[-1] != 3).sum() + int(os.environ.get('RANK', 0)),"
    shop.write("job.py", SMALL_JOB.replace("count=counts if two_terms else None,", count))
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 4, ended.text
    first = ended.json()["first_difference"]
    assert first["step"] == 1 and first["cause"].startswith("count= gives ") and "the loss returns" in first["cause"]


BY_WORKER = """
class Odd(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        worker = torch.utils.data.get_worker_info()
        return x + 0.01 * (worker.id if worker else 0), y
"""


def test_samples_that_depend_on_the_data_worker_are_named_as_data(shop: Shop) -> None:
    data = "train_data=torch.utils.data.TensorDataset(x, y)"
    shop.write("job.py", SMALL_JOB.replace(data, "train_data=Odd(x, y)") + BY_WORKER)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--data.workers", "2", "--json")
    assert ended.code == 4, ended.text
    first = ended.json()["first_difference"]
    assert (first["step"], first["parameter"]) == (1, "(data)") and "depends on the data worker" in first["cause"], (
        first
    )


BY_RANK = """
class Odd(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + (0.01 if index == 30 and os.environ.get("RANK") == "1" else 0.0), y
"""


def test_a_sample_of_one_rank_that_no_compared_step_reads_is_found(shop: Shop) -> None:
    data = "train_data=torch.utils.data.TensorDataset(x, y)"
    shop.write("job.py", SMALL_JOB.replace(data, "train_data=Odd(x, y)") + BY_RANK)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 4, ended.text
    assert [rung["verdict"] for rung in ended.json()["rungs"]][:-1] == ["bitwise"] * 3
    cause = ended.json()["first_difference"]["cause"]
    assert "sample 30 differs between rank 1 and rank 0" in cause and "did not read" in cause, cause


def test_metrics_have_the_precision_of_the_loss(shop: Shop) -> None:
    shop.write("bits.py", """
import math
from dataclasses import replace
from paceline.examples import text

def bits(output, batch):
    assert str(output.dtype) == "torch.bfloat16"
    total, count = text.loss(output, batch)
    return total / math.log(2), count

def make_job():
    return replace(text.make_job(width=16, depth=1, context=16), metrics={"bits": bits}, best=None)
""")  # fmt: skip
    words = ("bits.py", "--ranks", "2", "--train.precision", "bf16", "--eval.batch_size", "512")
    ended = shop.run("train", *words, "--train.steps", "2", "--eval.every", "2", "--run-dir", "run")
    assert ended.code == 0, ended.text
    events = [json.loads(line) for line in (shop.path / "run/events.jsonl").read_text().splitlines()]
    found = next(event["metrics"] for event in events if event["event"] == "EvalDone")
    assert found["bits"] * math.log(2) == pytest.approx(found["loss"], rel=1e-6), "summed up in 8 bits"
