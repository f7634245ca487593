"""Differences that verify once missed or crashed on, and jobs that were not exact."""

import pytest

from tests.conftest import Shop

JOB = """
import os, torch, torch.nn as nn, torch.nn.functional as F, paceline as pl
from torch.utils.checkpoint import checkpoint

class Ties(nn.Module):
    "A fixed quantizer whose inputs lie on ties: the smallest nudge flips them. Rank 1 does not train a layer."
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5), requires_grad=SCALE)
        self.h, self.o = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x):
        h = torch.tanh(self.h((x * self.scale).round()))
        if os.environ.get("RANK") == "1" and not os.environ.get("SOUND"):
            h = h.detach()
        return self.o(h)

class Reentrant(nn.Module):
    def __init__(self):
        super().__init__(); self.i, self.h, self.o = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
    def forward(self, x):
        h = checkpoint(lambda t: torch.tanh(self.h(t)), self.i(x), use_reentrant=True)
        if os.environ.get("RANK") == "1" and not os.environ.get("SOUND"):
            h = h * 1.5 + torch.sin(h)
        return self.o(h)

class Instances(nn.Module):
    def __init__(self):
        super().__init__(); self.norm, self.o = nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(8, 3)
        self.still = nn.InstanceNorm1d(2, track_running_stats=True, momentum=None)
    def forward(self, x): return self.o(self.still(self.norm(x.view(-1, 2, 4))).flatten(1))

class Normed(nn.Module):
    def __init__(self):
        super().__init__(); self.a, self.norm, self.o = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
    def forward(self, x): return self.o(torch.tanh(self.norm(self.a(x))))

class Empty(nn.Module):
    def __init__(self):
        super().__init__(); self.none, self.o = nn.Parameter(torch.zeros(0)), nn.Linear(8, 3)
    def forward(self, x): return self.o(x) + self.none.sum()

class Renormed(nn.Module):
    def __init__(self):
        super().__init__(); self.e, self.o = nn.Embedding(7, 8, max_norm=0.5), nn.Linear(8, 3)
    def forward(self, x): return self.o(self.e(x[:, 0].long() + 3))

def make_job():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (64, 8), generator=g).float(); y = (x.sum(1) > 0).long()
    return pl.Job(
        model=MODEL, loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), len(b[1])),
        train_data=torch.utils.data.TensorDataset(x, y), global_batch_size=8, micro_batch_size=2,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
"""


def write(shop: Shop, model: str, *, scale: bool = False) -> None:
    shop.write("job.py", JOB.replace("SCALE", str(scale)).replace("MODEL", model))


@pytest.mark.parametrize(
    ("model", "scale", "layer"),
    [pytest.param("Ties", False, "h.", marks=pytest.mark.soak), ("Ties", True, "h."), ("Reentrant", False, "")],
)
def test_a_difference_is_found(shop: Shop, model: str, scale: bool, layer: str) -> None:
    write(shop, model, scale=scale)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 4, ended.text
    first = ended.json()["first_difference"]
    assert first["step"] == 1 and layer in first["parameter"], first


@pytest.mark.parametrize(
    ("model", "scale"),
    [
        ("Ties", False),
        pytest.param("Ties", True, marks=pytest.mark.soak),
        pytest.param("Reentrant", False, marks=pytest.mark.soak),
        ("Instances", False),
        pytest.param("lambda: torch.compile(Normed())", False, marks=pytest.mark.soak),
    ],
)
def test_what_is_the_same_is_called_so(shop: Shop, model: str, scale: bool) -> None:
    write(shop, model, scale=scale)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json", environ={"SOUND": "1"}, timeout=240)
    assert ended.code == 0, ended.text


def test_an_empty_parameter_is_exact_too(shop: Shop) -> None:
    write(shop, "Empty")
    for ranks in (1, 2):
        ended = shop.train(f"run{ranks}", "--train.exact", ranks=ranks, steps=3)
        assert ended.code == 0, ended.text
    assert shop.digest("run1") == shop.digest("run2")


def test_exact_mode_refuses_weights_that_a_forward_writes_in_one_process_too(shop: Shop) -> None:
    write(shop, "Renormed")
    ended = shop.train("run", "--train.exact", ranks=1, steps=3)
    assert ended.code == 2 and "writes to the parameter e.weight" in ended.err, ended.text
    assert shop.train("plain", ranks=1, steps=3).code == 0
