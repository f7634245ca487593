"""A loss over the whole batch (contrastive): the layout's gradient is that of one process on all samples at once."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.nested import leaves, rebuilt
from paceline.step.whole import gather
from paceline.world import World
from tests.conftest import Shop

JOB = """
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Pairs(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Sequential(nn.Linear(5, 8), nn.Dropout(dropout))
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, a, b):
        return {"left": F.normalize(self.left(a)), "right": F.normalize(self.right(b)), "scale": self.scale.exp()}

def loss(out, batch):
    logits = out["scale"] * out["left"] @ out["right"].T
    target = torch.arange(len(logits))
    both = F.cross_entropy(logits, target, reduction="sum") + F.cross_entropy(logits.T, target, reduction="sum")
    terms = {"pairs": (both, len(logits)), "size": (out["left"].square().mean(0).sum(), 1)}
    return terms if TERMS else terms["pairs"]

def make_job(samples: int = 31, batch: int = 12, dropout: float = 0.0):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(samples, 6, generator=g).double(), torch.randn(samples, 5, generator=g).double()
    data = torch.utils.data.TensorDataset(a, b, torch.arange(samples))
    return pl.Job(
        model=lambda: Pairs(dropout).double(), loss=loss, loss_over="batch", train_data=data, eval_data=data, order="sequential",
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.3), global_batch_size=batch,
    )
"""


def by_hand(folder: Path, terms: bool, steps: int, samples: int = 31, batch: int = 12) -> dict[str, torch.Tensor]:
    """The plain loop of one process."""
    space: dict[str, object] = {"TERMS": terms}
    exec(JOB, space)
    job = space["make_job"](samples, batch)  # type: ignore[operator]
    from paceline.train.built import build_model

    model = build_model(job, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows, position = job.train_data.tensors, 0
    for _ in range(steps):
        position = 0 if position >= samples else position
        a, b, _ = (t[position : position + batch] for t in rows)
        position += batch
        out = model(a, b)
        logits = out["scale"] * out["left"] @ out["right"].T
        target = torch.arange(len(logits))
        total = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) + (
            out["left"].square().mean(0).sum() if terms else 0.0
        )
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("ranks", "layout", "terms"),
    [
        pytest.param(1, "single", True, marks=pytest.mark.soak),
        pytest.param(2, "ddp", False, marks=pytest.mark.soak),
        (5, "ddp", True),
        (3, "threads", True),
    ],
)
def test_weights_are_those_of_a_plain_loop_over_whole_batches(shop: Shop, ranks: int, layout: str, terms: bool) -> None:
    """31 samples in batches of 12: the last batch has 7, which leaves replicas without a sample at 5 ranks."""
    from safetensors.torch import load_file

    shop.write("job.py", f"TERMS = {terms}\n" + JOB)
    ended = shop.train("run", "--layout", layout, "--eval.every", "100", ranks=ranks, steps=6)
    assert ended.code == 0, ended.text
    found = load_file(shop.path / "run" / "consolidated" / "model.safetensors")
    for name, value in by_hand(shop.path, terms, 6).items():  # float64, six steps of a smooth loss
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "3", "--job.dropout", "0.2"),
        pytest.param(("--ranks", "2", "--layout", "threads"), marks=pytest.mark.soak),
    ],
)
def test_verify_finds_the_same_training(shop: Shop, words: tuple[str, ...]) -> None:
    shop.write("job.py", "TERMS = True\n" + JOB)
    ended = shop.run("verify", "job.py", *words, "--json", timeout=200)
    assert ended.code == 0 and ended.json()["verdict"] in ("bitwise", "rounding"), ended.text


def test_a_wrong_one_is_found(shop: Shop) -> None:
    planted = "\nfrom paceline.step import passes, whole\npasses.gather = lambda mine, **_: mine  # only its own samples are negatives\n"
    shop.write("job.py", "TERMS = False\n" + JOB + planted)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json", timeout=200)
    assert ended.code == 4 and ended.json()["verdict"] == "different", ended.text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--train.micro_batch_size", "3"), "refuses accumulation: 4 microbatches for 2 replicas"),
        (("--train.exact", "true"), "--train.exact is not proved"),
    ],
)
def test_what_can_not_be_is_refused(shop: Shop, words: tuple[str, ...], text: str) -> None:
    shop.write("job.py", "TERMS = False\n" + JOB)
    ended = shop.train("run", *words, steps=2)
    assert ended.code == 2 and text in ended.err, ended.text


def test_structures_are_rebuilt() -> None:
    value = {"a": torch.ones(2), "b": (torch.zeros(3), [torch.ones(1)], "text", None)}
    parts = list(leaves(value))
    assert len(parts) == 3
    again = rebuilt(value, iter([part + 1 for part in parts]))
    assert again["b"][1][0].item() == 2.0 and again["b"][2:] == ("text", None)
    with pytest.raises(Exception, match="first dimension"):
        gather(torch.ones(3, 2), world=World.alone(), num_samples=4)
