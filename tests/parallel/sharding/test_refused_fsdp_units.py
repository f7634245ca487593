"""An FSDP unit that would differ from the same block in one process is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.config.merge_settings import read_requested_settings
from paceline.config.task import Task
from paceline.launch.failures.failure_record import annotate_progress, failure_from_exception
from paceline.launch.failures.stuck_rank import mutual_wait_failure
from paceline.parallel.sharding.execution_order_check import UnitOrderCheck
from tests.end_to_end.forked_job_ranks import Told, try_pair
from tests.matrix.matrix_page import patterns, stands

pytestmark = pytest.mark.one_worker
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Net(nn.Module):
    """Four blocks; what the others do is between them or inside of them."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block, x)
        return self.last(x)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Adding(Block):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x.mean())
        return super().forward(x)


class Appends(Net):
    def __init__(self) -> None:
        super().__init__(Adding)

    def forward(self, x: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        return super().forward(x) + sum(self.kept)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self.kept)


class Storing(Block):
    def forward(self, x: Tensor, *, seen: dict[str, dict[str, Tensor]]) -> Tensor:
        seen["of"]["x"] = x.mean()
        return super().forward(x)


class Stores(Net):
    def __init__(self) -> None:
        super().__init__(Storing)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        seen = {"of": {"x": x.sum()}}
        return block(x, seen=seen) + seen["of"]["x"]


class Shuffled(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in torch.randperm(4).tolist():
            x = self.blocks[place](x)
        return self.last(x)


class OneOfTwo(Net):
    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.blocks[int(1e4 * x[0, 0]) % 2](x) if block is self.blocks[3] else block(x)


class Swapped(Net):
    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        zeros = {name: torch.zeros(WIDTH) for name, _ in block.named_parameters() if name.endswith("bias")}
        return torch.func.functional_call(block, zeros, (x,), strict=False)


class Clamped(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamping(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Penalty(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square().sum(-1, keepdim=True)


class Reads(Net):
    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * block.up.weight.norm()


class ReadsNumber(Net):
    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * float(block.up.weight.detach().norm())


class Parts(Net):
    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.up(block.norm(x))


class Summing(Block):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        y = super().forward(x)
        total.add_(y)
        return y


class Sums(Net):
    def __init__(self) -> None:
        super().__init__(Summing)

    def forward(self, x: Tensor) -> Tensor:
        self.total = torch.zeros(len(x), WIDTH)
        return super().forward(x)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self.total) + self.total


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight.register_hook(lambda gradient: gradient * 0.5)


class HookedLater(Net):
    def __init__(self) -> None:
        super().__init__()

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        self.first.weight.register_post_accumulate_grad_hook(halve)


class Handed(Block):
    """Writes only to what it made itself, and hands lists on."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept = [*kept, x.mean()]
        kept.append(x.sum() * 0.0)
        return super().forward(x), kept


class Hands(Net):
    def __init__(self) -> None:
        super().__init__(Handed)

    def forward(self, x: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        return super().forward(x) + sum(self.kept)

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        x, self.kept = block(x, self.kept)
        return x


CASES: dict[str, tuple[Any, str, str, str]] = {
    "a list written to": (Appends, "fsdp", "refused", "blocks.1 writes to a list that it gets"),
    "a dict in a dict": (Stores, "fsdp", "refused", "blocks.0 writes to a dict that it gets"),
    "another order": (Shuffled, "fsdp", "failed", "fsdp gathered different units on different ranks"),
    "a choice by samples": (OneOfTwo, "fsdp", "failed", "fsdp gathered different units on different ranks"),
    "other parameters": (Swapped, "fsdp", "refused", "instead of its parameter blocks.0.norm.bias"),
    "a write to the model's own": (Clamped, "fsdp", "refused", "the forward writes to the parameter last.weight"),
    "a write in a stage": (Clamped, "pp,schedule=zb_h1", "refused", "the forward writes to the parameter last.weight"),
    "a write in a block": (lambda: Net(Clamping), "fsdp", "refused", "writes to the parameter blocks.0.up.weight"),
    "a gradient in the forward": (Penalty, "fsdp", "refused", "the forward or the loss runs its own backward"),
    "a weight read elsewhere": (Reads, "fsdp", "refused", "blocks.0.up.weight is used outside its fsdp"),
    "a number read elsewhere": (ReadsNumber, "fsdp", "refused", "blocks.0.up.weight is used outside its "),
    "a number read in a stage": (ReadsNumber, "pp=2,dp_shard=2", "refused", "blocks.0.up.weight is used outside its"),
    "a block's parts": (Parts, "fsdp", "refused", "blocks.0.norm.weight is used outside its fsdp"),
    "an argument written to": (Sums, "fsdp", "refused", "a block writes in place to its argument"),
    "a hook under fsdp": (Hooked, "fsdp", "refused", "fsdp replaces blocks.1.up.weight by a new tensor"),
    "a later hook under fsdp": (HookedLater, "fsdp", "refused", "fsdp replaces first.weight by a new tensor"),
    "a hook above init.limit": (Hooked, "ddp --init.limit=10", "refused", "meta device, 'blocks.1.up"),
    "a hook under zero2": (Hooked, "zero2", "done", ""),
    "a hook under ddp": (HookedLater, "ddp", "done", ""),
    "lists handed on": (Hands, "fsdp", "done", ""),
    "the net": (Net, "fsdp,remat=full", "done", ""),
}  # fmt: skip
_QUICK = ("a list written to", "another order", "other parameters", "a gradient in the forward", "a hook under fsdp")


def _told(make: Any, words: str, folder: Path, **other: Any) -> Told:
    def job() -> pl.Job:
        torch.manual_seed(1)
        rows = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
        return pl.Job(
            model=make, train_data=rows, global_batch_size=8,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
            **{"loss": lambda out, b: (out - b[1]).square().sum(), **other},
        )  # fmt: skip

    layout, *rest = words.split()
    asked = read_requested_settings(file=None, overrides=["--train.micro_batch_size=2", *rest])
    ranks = 2 ** max(1, layout.count("=2"))
    task = Task(verb="train", job="job.py", layout=layout, ranks=ranks, settings=asked.values, origins=asked.origins)
    return try_pair(task, make=job, folder=folder)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.soak]) for name in CASES
])  # fmt: skip
def test_a_unit_is_right_or_refused(name: str, tmp_path: Path) -> None:
    make, words, state, says = CASES[name]
    told = _told(make, words, tmp_path)
    assert (told.state, says in told.text) == (state, True), told
    assert state == "done" or "to do:" in told.text, told
    assert state == "done" or stands(told.text.splitlines()[0], patterns()), "docs/refusals.md does not have it"


def _steep(given: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    x, out = given
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - batch[1]).square().sum() + slope.square().sum()


@pytest.mark.parametrize(("layout", "says"), [
    ("zero2", ""),
    pytest.param("fsdp", "the forward or the loss runs its own backward", marks=pytest.mark.soak),
    pytest.param("pp", "the forward or the loss takes a gradient", marks=pytest.mark.soak),
    ("tp", "the forward or the loss takes a gradient"),
])  # fmt: skip
def test_a_gradient_in_the_loss_is_right_or_refused(layout: str, says: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        x = batch[0].requires_grad_()
        return x, model(x)

    told = _told(Net, layout, tmp_path, loss=_steep, forward=forward)
    assert (told.state, says in told.text) == ("refused" if says else "done", True), told
    assert not says or stands(told.text.splitlines()[0], patterns()), "docs/refusals.md does not have it"


def test_ranks_that_wait_for_each_other_are_told_how_far_each_was(tmp_path: Path) -> None:
    order = UnitOrderCheck(["blocks.0", "blocks.1"], world=World.alone())
    failures = []
    for rank, said in enumerate(("Application timeout caused pair closure", "Connection closed by peer")):
        order.record_gather(rank, backward=bool(rank))
        error = RuntimeError(f"gloo: {said}")
        annotate_progress(error, order.describe_progress())
        failures.append(
            replace(failure_from_exception(error, rank=rank, step=3), is_users_own=False)
        )  # gloo has raised it
    found = mutual_wait_failure(failures, folder=tmp_path)
    assert found.screen.startswith(
        "the ranks waited for each other in different places: rank 0 has gathered units 1 times"
    )
    assert "rank 1 has gathered units 2 times in this step, the last blocks.1 in backward." in found.screen
    assert "to do: --layout zero2 or ddp" in found.screen and found.step == 3
