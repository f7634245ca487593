"""A forward that reads what earlier microbatches left in a BatchNorm runs in one process's order on real ranks."""

import pytest

from tests.conftest import Shop

JOB = """
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl
from torch.utils.flop_counter import FlopCounterMode

class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.2)

    def run(self, x):
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))

    def forward(self, x):
        if not self.training:
            return self.run(x)
        if self.way == "adversarial":
            self.norm.eval()
            moved = x.detach().requires_grad_()
            (push,) = torch.autograd.grad(self.run(moved).square().sum(), moved)
            self.norm.train()
            return self.run(x) + self.run(x + 0.3 * push.sign())
        if self.way == "decaying":
            self.norm.momentum *= 0.8
        if self.way == "observed":
            with FlopCounterMode(display=False):
                return self.run(x)
        if self.way == "looking":
            return self.run(x) + 0.1 * self.norm.running_mean[:4]
        return self.run(x)

def make_job(way: str) -> pl.Job:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(120, 6, generator=generator) * 2 + 1, torch.randint(0, 4, (120,), generator=generator)
    return pl.Job(
        model=lambda: Net(way),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=torch.utils.data.TensorDataset(x, y),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        global_batch_size=40,
    )
"""
MICRO = ("--train.micro_batch_size", "8")  # five: ranks have three and two


DAILY = [("adversarial", "ddp"), ("decaying", "zero1")]
LONGER = [
    (way, layout) for way in ("adversarial", "decaying", "looking") for layout in ("ddp", "zero1", "zero2", "threads")
]


@pytest.mark.parametrize(
    "way, layout", [*DAILY, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in LONGER if pair not in DAILY)]
)
def test_ranks_that_wait_train_as_one_process(shop: Shop, way: str, layout: str) -> None:
    shop.write("job.py", JOB)
    ended = shop.run("verify", "job.py", "--job.way", way, "--layout", layout, "--ranks", "2", *MICRO, "--json")
    assert (ended.code, ended.json()["verdict"]) == (0, "rounding"), ended.text[-3000:]
    assert ended.json()["max_difference"] <= ended.json()["noise_floor"]


def test_what_it_costs_is_told_and_the_weights_are_the_same_bits_on_other_ranks(shop: Shop) -> None:
    shop.write("job.py", JOB)
    words = ("train", "job.py", "--job.way", "adversarial", "--train.steps", "4", "--train.exact", "true", *MICRO)
    told = [shop.run(*words, "--ranks", ranks, "--run-dir", f"run-{ranks}") for ranks in ("1", "2", "3")]
    assert [ended.code for ended in told] == [0, 0, 0], told[-1].text[-3000:]
    assert len({shop.digest(f"run-{ranks}") for ranks in ("1", "2", "3")}) == 1
    line = "norm runs in eval mode and in training mode in one step: ranks run their forwards one after another"
    assert [ended.text.count(line) for ended in told] == [0, 1, 1], told[1].text


@pytest.mark.parametrize(("way", "layout"), [("plain", "threads"), ("observed", "ddp")])
def test_a_mode_that_watches_operations_is_no_read(shop: Shop, way: str, layout: str) -> None:
    """The user's mode, or ours that looks for random numbers: it passes each kernel its statistics."""
    shop.write("job.py", JOB)
    words = ("train", "job.py", "--job.way", way, "--train.steps", "2", "--train.exact", "true", *MICRO)
    told = [
        shop.run(*words, "--ranks", ranks, *more, "--run-dir", f"run-{ranks}")
        for ranks, more in (("1", ()), ("2", ("--layout", layout)))
    ]
    assert [ended.code for ended in told] == [0, 0], told[1].text[-3000:]
    assert "one after another" not in told[1].text
    assert shop.digest("run-1") == shop.digest("run-2")


@pytest.mark.parametrize(
    "way, layout",
    [
        ("adversarial", "fsdp"),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in (("decaying", "fsdp"), ("adversarial", "pp"))),
    ],
)
def test_where_a_forward_can_not_wait_it_is_refused_by_name(shop: Shop, way: str, layout: str) -> None:
    shop.write("job.py", JOB)
    words = ("--job.way", way, "--layout", layout, "--ranks", "2", "--run-dir", "run", "--train.steps", "4", *MICRO)
    ended = shop.run("train", "job.py", *words)
    assert ended.code not in (0, 1), ended.text[-2000:]
    if layout == "fsdp":
        assert "one after another" in ended.text and "zero2" in ended.text, ended.text[-2000:]


def test_under_a_loss_over_the_batch_the_way_out_is_one_that_works(shop: Shop) -> None:
    """Neither another layout nor sync_bn is one there."""
    shop.write("job.py", JOB.replace("global_batch_size=40", 'global_batch_size=40, loss_over="batch"'))
    ended = shop.run("train", "job.py", "--job.way", "adversarial", "--train.steps", "2", "--ranks", "2")
    assert ended.code == 2 and "--ranks 1, or a loss over the samples of a microbatch" in ended.text, ended.text[-2000:]
    assert "--layout ddp" not in ended.text and "sync_bn" not in ended.text


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_a_skipped_step_leaves_no_statistics_in_the_run_nor_in_the_one_process_beside_it(
    shop: Shop, ranks: str
) -> None:
    start = "    return pl.Job("
    shop.write("job.py", JOB.replace(start, f"    x[50] = float('inf')\n{start}\n        order='sequential',"))
    words = ("verify", "job.py", "--job.way", "plain", "--ranks", ranks, "--train.on_nonfinite", "skip", *MICRO)
    ended = shop.run(*words, "--json")
    assert (ended.code, ended.json()["verdict"]) in ((0, "bitwise"), (0, "rounding")), ended.text[-3000:]
    assert "RuntimeWarning" not in ended.text
