"""`pl.check` in one process: it leaves no hook, changes no weight, reads tensors of any kind, and sees the loaders."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, dataloader

import paceline as pl
from paceline.script_check.judge.script_run import read_script_run
from tests.forked_ranks import run_forked


def train(model: nn.Module, batches: Any, *, zero: bool = True) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        if zero:
            optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def data(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator))


def names(report: Any) -> list[str]:
    return [finding.name for finding in report.findings]


def hooks() -> list[Any]:
    return [
        dict(_global_optimizer_pre_hooks),
        dict(_global_optimizer_post_hooks),
        dict(nn.modules.module._global_forward_pre_hooks),
        dataloader._BaseDataLoaderIter.__next__,
        DistributedSampler.set_epoch,
    ]


def test_a_sound_loop_keeps_its_weights_and_no_hook_stays() -> None:
    before, model = hooks(), linear()
    loader = DataLoader(data(), 4)
    with pl.check(steps=3) as report:
        digest = train(model, loader)
    assert digest == train(linear(), loader)
    assert (report.verdict.exit_code, report.verdict.steps, report.findings) == (0, 3, []), report
    assert "one rank: nothing was reduced, and no rank can differ" in str(report)
    assert hooks() == before and not model._forward_pre_hooks and not any(p._backward_hooks for p in model.parameters())


def test_a_fault_is_named_with_the_line_and_what_to_do() -> None:
    with pl.check() as report:
        train(linear(), DataLoader(data(), 4), zero=False)
    assert names(report) == ["gradients-stale"] and report.verdict.exit_code == 4
    assert "test_loop_check.py:" in str(report) and "to do: optimizer.zero_grad() once in each step" in str(report)


def test_what_can_not_be_judged_says_why(tmp_path: Path) -> None:
    with pl.check() as report:
        pass
    assert "CAN'T BE JUDGED: no optimizer made a step" in str(report)
    before = hooks()
    with pytest.raises(ValueError, match="mine"), pl.check() as report:
        raise ValueError("mine")
    assert "left by ValueError" in str(report) and hooks() == before
    with pl.check(out=tmp_path) as report:
        train(linear(), DataLoader(data(), 4))
    with pytest.raises(pl.UsageError, match="has a recording already"), pl.check(out=tmp_path):
        pass
    with pytest.raises(pl.UsageError, match="can't be negative"):
        pl.check(steps=-1)


class Kinds(nn.Module):
    """A model with a sparse gradient, a complex weight, one without data, and one that no function gives a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.planned = nn.Parameter(torch.empty(3, device="meta"))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_nested:
            rows = torch.stack([self.rows(each).sum(dim=0) for each in x.unbind()])
        elif x.layout != torch.strided:
            rows = x.to_dense() @ self.rows.weight
        else:
            rows = self.rows(x).sum(dim=1)
        return self.last((rows * self.turn).real)


def inputs(kind: str) -> Any:
    torch.manual_seed(2)
    for _ in range(4):
        tokens = torch.randint(0, 10, (4, 3))
        if kind == "nested":
            tokens = torch.nested.nested_tensor(list(tokens))
        if kind == "jagged":
            tokens = torch.nested.nested_tensor(list(tokens), layout=torch.jagged)
        if kind == "sparse":
            tokens = F.one_hot(tokens, 10).sum(dim=1).float().to_sparse()
        yield tokens, torch.randn(4, 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dense", "nested", "jagged", "sparse"])
def test_tensors_of_any_kind_are_read(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = Kinds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.check(out=tmp_path) as report:
        for x, y in inputs(kind):
            optimizer.zero_grad()
            for _ in range(2):  # the second pass asks whether the first gradient, which may be sparse, is zero
                F.mse_loss(model(x), y).backward()
            optimizer.step()
    run = read_script_run(tmp_path)
    assert report.verdict.exit_code == 0 and not run.ranks[0].fault, report
    assert len(run.steps) == 4 and not any(step.ranks[0].unreadable for step in run.steps)
    keys = [key for step in run.steps for call in step.ranks[0].calls[:1] for key in call.samples]
    assert len(set(keys)) > 8, "samples are told apart"
    assert {"rows.weight", "turn", "last.weight"} <= set(run.steps[0].gradients[0])


class Noise(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Any:
        values = torch.from_numpy(np.random.standard_normal(6).astype(np.float32))
        return values[:4], values[4:]


def seed_alike(worker: int) -> None:
    np.random.seed(1)


def seed_each(worker: int) -> None:
    np.random.seed(worker)


@pytest.mark.parametrize(("seed", "found"), [(seed_alike, ["workers-read-the-same"]), (seed_each, [])])
def test_workers_with_equal_random_numbers(seed: Any, found: list[str]) -> None:
    with pl.check() as report:
        train(linear(), DataLoader(Noise(), 4, num_workers=2, worker_init_fn=seed))
    assert names(report) == found, report


def test_a_batch_that_is_used_twice_on_purpose_is_no_fault_of_the_workers() -> None:
    with pl.check() as report:
        train(linear(), (batch for batch in DataLoader(data(), 4, num_workers=2) for _ in range(2)))
    assert report.findings == [], report


def test_few_batches_of_many_workers_are_no_proof() -> None:
    with pl.check(steps=2) as report:
        train(linear(), DataLoader(data(), 4, num_workers=2))
    assert any(
        "2 of them gave 3 batches in all" in line or "2 batches" in line for line in report.verdict.not_exercised
    )


@pytest.mark.parametrize("is_set", [False, True])
def test_an_epoch_in_the_order_of_the_first_one(is_set: bool) -> None:
    sampler = DistributedSampler(data(20), num_replicas=1, rank=0)
    loader = DataLoader(data(20), 4, sampler=sampler)

    def epochs() -> Any:
        for epoch in range(2):
            if is_set:
                sampler.set_epoch(epoch)
            yield from loader

    with pl.check(steps=6) as report:
        train(linear(), epochs())
    assert names(report) == ([] if is_set else ["same-order"]), report
    assert is_set or "set_epoch() of the sampler was not called" in str(report)


@pytest.mark.parametrize(("skipped", "found"), [(0, ["replayed-samples"]), (3, [])])
def test_an_epoch_that_starts_again_before_its_end(skipped: int, found: list[str]) -> None:
    loader = DataLoader(data(), 4)

    def batches() -> Any:
        yield from (batch for number, batch in zip(range(3), loader, strict=False) if number < 3)
        yield from (batch for number, batch in enumerate(loader) if number >= skipped)

    with pl.check(steps=7) as report:
        train(linear(), batches())
    assert names(report) == found, report
    assert not found or "samples of steps 1 to 3 again at steps 4 to 6" in str(report)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(linear())
    for number in range(2):
        with pl.check(steps=3) as report:
            train(model, DataLoader(data(), 4, sampler=DistributedSampler(data()) if number else None))
        print(rank, report.verdict.ranks, names(report))
    torch.distributed.destroy_process_group()


def test_all_ranks_have_the_verdict_on_all(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    environ = {"TMPDIR": str(tmp_path / "shared"), "OMP_NUM_THREADS": "1"}
    said = run_forked("tests.script_check.test_loop_check", [], ranks=2, folder=tmp_path, environ=environ, timeout=120)
    assert said == [f"{rank} 2 ['same-samples']\n{rank} 2 []\n" for rank in range(2)]
    assert list((tmp_path / "shared").iterdir()) == [], "the recordings are removed"
