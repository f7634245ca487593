"""BatchNorm that runs in some microbatches only takes its statistics from those."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Shop

JOB = """
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.sometimes = nn.BatchNorm1d(6)
        self.counted = nn.BatchNorm1d(6, momentum=None)
        self.out = nn.Linear(6, 2)
    def forward(self, x):
        h = self.inner(x)
        for _ in range(int(x[0, 3])):
            h = self.sometimes(h)
        if x[0, 3] != 1:
            h = self.counted(h)
        return self.out(h)

def make_job():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(72, 4, generator=g), torch.randint(0, 2, (72,), generator=g)
    x[:, 3] = torch.arange(72) // 3 % 3
    return pl.Job(
        model=Net, loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), len(o)), order=lambda data, seed, epoch: range(72),
        train_data=torch.utils.data.TensorDataset(x, y), global_batch_size=24, micro_batch_size=3,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05))
job = make_job()
"""


@pytest.mark.parametrize("layout", ["ddp", pytest.param("threads", marks=pytest.mark.soak)])
def test_statistics_are_those_of_the_microbatches_that_ran(shop: Shop, layout: str) -> None:
    shop.write("job.py", JOB)
    found = []
    for ranks in (1, 2, 3):
        extra = ["--layout", layout] if ranks > 1 else []
        ended = shop.train(f"run{ranks}", *extra, ranks=ranks, steps=5)
        assert ended.code == 0, ended.text
        found.append(load_file(shop.path / f"run{ranks}" / "consolidated" / "model.safetensors"))
    one = found[0]
    assert one["sometimes.num_batches_tracked"] == 13 + 2 * 13  # of 40 microbatches 13 run it once and 13 twice
    assert one["counted.num_batches_tracked"] == 14 + 13
    for other in found[1:]:
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.soak
def test_verify_finds_it_sound(shop: Shop) -> None:
    shop.write("job.py", JOB)
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 0, ended.text
    assert json.loads(ended.out)["verdict"] in ("bitwise", "rounding")


def test_a_norm_of_the_users_own_is_told_and_equal_everywhere(shop: Shop) -> None:
    own = """
class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width)); self.register_buffer("var", torch.ones(width))
    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)

class Net"""
    shop.write("job.py", JOB.replace("class Net", own, 1).replace("nn.BatchNorm1d(6, momentum=None)", "Own(6)"))
    ended = shop.train("run", "--log.every", "1", steps=5)
    assert ended.code == 0 and "the forward changes counted.mean, counted.var; every rank gets rank 0's" in ended.out
    refused = shop.train("exact", "--train.exact", steps=5)
    assert refused.code == 2 and "the buffer counted.mean, which exact mode can't" in refused.text


def test_statistics_written_past_the_layer_are_one_process_s_or_refused_by_name(shop: Shop) -> None:
    past = "F.batch_norm(h, self.counted.running_mean, self.counted.running_var, training=True)"
    shop.write("job.py", JOB.replace("h = self.counted(h)", past))
    refused = shop.train("run", "--layout", "fsdp", steps=5)
    assert refused.code != 0 and "running statistics of counted were written by other code" in refused.err
    found = []
    for ranks in (1, 2):
        ended = shop.train(f"run{ranks}", ranks=ranks, steps=5)
        assert ended.code == 0, ended.text
        found.append(load_file(shop.path / f"run{ranks}" / "consolidated" / "model.safetensors"))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)
    assert shop.train("other", "--train.buffers", "broadcast", steps=5).code == 0
