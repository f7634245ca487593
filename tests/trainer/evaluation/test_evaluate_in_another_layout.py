"""`evaluate` in another layout than the training layout: each sample once, the same metrics."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Shop

JOB = """
import torch, torch.nn as nn
import paceline as pl

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16)                                 # its statistics come from the checkpoint
    def forward(self, x):
        return x + self.two(torch.tanh(self.norm(self.one(x))))

x = torch.randn(45, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.roll(1, 1))
job = pl.Job(
    model=lambda: nn.Sequential(*(Block() for _ in range(4))),
    loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
    metrics={"large": lambda output, batch: ((output > 0.5).sum(), output.numel())},
    train_data=data,
    eval_data=data,
    optimizer=lambda named: torch.optim.Adafactor(named, lr=1e-2),     # looks at whole tensors: fsdp and tp refuse it
    global_batch_size=8,
    ema=0.5,
)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def trained(shop: Shop) -> Shop:
    shop.write("job.py", JOB)
    ended = shop.train("run", "--train.micro_batch_size", "4", ranks=1, steps=3)
    assert ended.code == 0, ended.text
    return shop


def metrics(shop: Shop, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = shop.run("evaluate", "run", "--json", *words).json()
    assert found["samples"] == 45
    return dict(found["metrics"])


def test_a_model_is_evaluated_in_any_layout_as_in_one_process(trained: Shop) -> None:
    one = metrics(trained)
    for layout in ("ddp", "fsdp", "pp"):
        assert metrics(trained, "--layout", layout, "--ranks", "2") == one, layout
    ended = trained.run("evaluate", "run", "--layout", "pp=3,tp=2", "--ranks", "4")
    assert ended.code == 2 and "needs 6 ranks" in ended.err


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "ranks"), [("tp", 2), ("zero2", 3), ("pp=2,dp_shard=2", 4), ("hsdp", 4), ("threads=2", 2)]
)
def test_more_layouts_evaluate_as_one_process_does(trained: Shop, layout: str, ranks: int) -> None:
    found = metrics(trained, "--layout", layout, "--ranks", str(ranks))
    assert found == pytest.approx(metrics(trained), rel=2e-7)  # a product in parts rounds in its last place


def test_an_evaluation_that_is_refused_changes_nothing_of_the_run(trained: Shop) -> None:
    metrics(trained)
    before = content(trained.path / "run")
    ended = trained.run("evaluate", "run", "--split", "test")
    assert ended.code and "the job has no test_data" in ended.text
    assert trained.run("evaluate", "run", "--split", "dev").code == 2
    assert content(trained.path / "run") == before


LARGE = """
import torch, torch.nn as nn
import paceline as pl

def note(phase):
    size = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    with open("peaks.txt", "a") as file:
        file.write(f"{phase} {int(size) * 1024}\\n")

def model():
    made = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(16)))
    note("built")
    return made

def loss(output, batch):
    note("loss")
    return (output - batch[1]).square().sum(), len(output)

x = torch.randn(12, 2000, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x)
job = pl.Job(
    model=model, loss=loss, train_data=data, eval_data=data, optimizer=lambda named: torch.optim.SGD(named, lr=1e-9),
    global_batch_size=4, settings={"init.limit": 1_000_000, "place.units": "Linear"},
)
"""


@pytest.mark.soak
@pytest.mark.cold
def test_a_rank_that_evaluates_shards_never_holds_the_whole_model(shop: Shop) -> None:
    shop.write("job.py", LARGE)
    assert shop.train("run", "--layout", "fsdp", ranks=2, steps=1, timeout=300).code == 0
    (shop.path / "peaks.txt").unlink()
    exact = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}  # what is freed is given back
    shop.run("evaluate", "run", "--layout", "fsdp", "--ranks", "3", "--json", environ=exact, timeout=300).json()
    peaks = [line.split() for line in (shop.path / "peaks.txt").read_text().splitlines()]
    built, highest = (max(int(row[1]) for row in peaks if row[0] == name) for name in ("built", "loss"))
    assert 0 < highest - built < 0.8 * 16 * 2000 * 2001 * 4
