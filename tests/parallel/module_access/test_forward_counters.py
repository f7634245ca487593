"""Numbers in attributes that a forward changes are those of one process on every rank, or are reported."""

import enum
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.parallel.module_access.forward_counters import ForwardNumbers, ModuleNumbers
from tests.conftest import Shop

JOB = """
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            x = x * min(1.0, self.calls / 12)
            if self.calls > 8:
                x = x + 0.1
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))

def make_job() -> pl.Job:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(120, 6, generator=generator) * 2 + 1, torch.randint(0, 4, (120,), generator=generator)
    return pl.Job(
        model=Net,
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=torch.utils.data.TensorDataset(x, y),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        global_batch_size=40,
    )
"""
MICRO = ("--train.micro_batch_size", "8")  # five: ranks have three and two


@pytest.mark.parametrize(
    "layout", ["ddp", "fsdp", *(pytest.param(each, marks=pytest.mark.soak) for each in ("zero1", "zero2", "threads"))]
)
def test_a_count_is_that_of_one_process(shop: Shop, layout: str) -> None:
    shop.write("job.py", JOB)
    ended = shop.run("verify", "job.py", "--layout", layout, "--ranks", "2", *MICRO, "--json")
    assert (ended.code, ended.json()["verdict"]) == (0, "rounding"), ended.text[-3000:]
    assert ended.json()["max_difference"] <= ended.json()["noise_floor"]


class Counting(nn.Module):
    """A model of one number, which a forward changes by `change`; it remembers what each forward began with."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.calls, self.change = 0, change

    def forward(self, seen: list[Any]) -> None:
        seen.append(self.calls)
        self.change(self)


def stepped(change: Callable[[Any], None], *, ranks: int, steps: int, num_micro: int) -> tuple[list[Any], list[str]]:
    """The numbers that the forwards of the last attempt of each step began with, in the order of one process."""
    worlds = thread_worlds(replicas=ranks, world=World.alone(), timeout_seconds=30)
    models = [Counting(change) for _ in range(ranks)]
    numbers = [ForwardNumbers(each, world=world, always=True) for each, world in zip(models, worlds, strict=True)]
    order, notes = [], []
    for _ in range(steps):
        is_again = True
        found: dict[int, list[Any]] = {}
        attempt = 0
        while is_again:
            found = {index: [] for index in range(num_micro)}
            for rank in range(ranks):
                numbers[rank].begin(num_micro=num_micro, is_rerun=attempt > 0)
                for index in range(rank, num_micro, ranks):
                    numbers[rank].set_microbatch(index)
                    models[rank](found[index])
            settled = [each.changed_as_expected() for each in numbers]
            is_again = not (all(settled) or all(agreed(numbers)))
            attempt += 1
        notes += [note for each in numbers if (note := each.finish_step())]
        order += [found[index][0] for index in range(num_micro)]
    return order, notes


def agreed(numbers: list[ForwardNumbers]) -> list[bool]:
    """Each rank in a thread."""
    found: list[bool] = [False] * len(numbers)

    def agree(rank: int) -> None:
        found[rank] = numbers[rank].agree_on_changes()

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(len(numbers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def count(model: Any) -> None:
    model.calls += 1


def count_by_three(model: Any) -> None:
    model.calls += 3


def flag(model: Any) -> None:
    model.calls = 1


def cycle(model: Any) -> None:
    model.calls = (model.calls + 1) % 7


def decay(model: Any) -> None:
    model.calls = (model.calls or 1.0) * 0.5


def flip(model: Any) -> None:
    model.calls = not model.calls


def lengthen(model: Any) -> None:
    model.seen = [*getattr(model, "seen", []), 1]


def draw(model: Any) -> None:
    model.seen = getattr(model, "seen", None) or torch.Generator()
    torch.rand((), generator=model.seen)


def average(model: Any) -> None:
    model.seen = 0.9 * getattr(model, "seen", torch.ones(3))


class Mode(enum.IntEnum):
    FIRST, SECOND = range(2)


def switch(model: Any) -> None:
    model.seen = Mode(1 - getattr(model, "seen", Mode.FIRST))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("change", [count, count_by_three, flag])
def test_each_forward_begins_with_the_number_of_one_process(change: Callable[[Any], None], ranks: int) -> None:
    order, notes = stepped(change, ranks=ranks, steps=4, num_micro=5)
    alone, _ = stepped(change, ranks=1, steps=4, num_micro=5)
    if change is flag:  # each rank sets its own
        assert [value for value in order if value != 1] == [0] * ranks and notes == []
    else:
        assert order == alone and notes == []


@pytest.mark.parametrize("change", [cycle, decay, flip, lengthen, draw, average, switch])
def test_what_no_rank_can_compute_alone_is_reported_by_name(change: Callable[[Any], None]) -> None:
    _, notes = stepped(change, ranks=2, steps=4, num_micro=4)
    name = "calls" if change in (cycle, decay, flip) else "seen"
    assert notes and all(note.startswith(f"the forward changes {name}, and each rank has its own") for note in notes)


def test_a_tensor_of_one_number_and_an_attribute_that_is_made_later_are_put_back() -> None:
    model = nn.Linear(2, 2)
    model.scale = torch.tensor(0.5)
    numbers = ForwardNumbers(model, world=World.alone(), always=False).numbers
    model.scale.mul_(3)
    model.made = 4
    assert sorted(numbers.changed_names()) == ["made", "scale"]
    other = nn.Linear(2, 2)
    ForwardNumbers(other, world=World.alone(), always=False).numbers.decode(
        ["made", "scale"], numbers.encode(["made", "scale"])
    )
    assert (other.made, other.scale) == (4, 1.5)
    numbers.restore()
    assert float(model.scale) == 0.5 and not hasattr(model, "made")


class InstallsOnce(nn.Module):
    """A model whose first forward installs hooks and an object, and sets flags; it is wrong with one and not the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.weight = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "installed", False):
            self.layer.register_forward_hook(lambda module, inputs, output: output * 2)
            self.layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
            self.weight.register_hook(lambda gradient: gradient * 3)
            self.scale = {"by": torch.ones(2)}
            self.installed = True
        assert self.scale["by"].sum() == 2
        return self.layer(x) * self.weight


def test_hooks_that_a_forward_installs_once_go_with_their_flag() -> None:
    """A step that is repeated installs them again: with the old ones, everything would be done twice."""
    model, x = InstallsOnce(), torch.ones(1, 2)
    numbers = ModuleNumbers(model)
    handle = model.norm.register_forward_hook(lambda *_: None)
    numbers.snapshot()
    right = model(x)
    right.sum().backward()
    gradient = model.weight.grad
    for _ in range(3):
        numbers.restore()
        assert not hasattr(model, "installed") and not model.layer._forward_hooks
        model.weight.grad = None
        again = model(x)
        again.sum().backward()
        assert torch.equal(again, right) and torch.equal(model.weight.grad, gradient)
    assert handle.id in model.norm._forward_hooks
    later = ModuleNumbers(model)
    numbers.restore()
    model(x)
    later.restore()  # the flag is as it was, so the hooks that were installed in between stay
    assert model.installed and torch.equal(model(x), right)


def test_a_flag_of_what_a_forward_installs_is_not_another_rank_s() -> None:
    worlds = thread_worlds(replicas=2)
    models = [InstallsOnce() for _ in worlds]
    numbers = [ForwardNumbers(model, world=world, always=True) for model, world in zip(models, worlds, strict=True)]
    for each in numbers:
        each.begin(num_micro=2, is_rerun=False)
    for number, (each, model) in enumerate(zip(numbers, models, strict=True)):
        each.set_microbatch(number)
        model(torch.ones(1, 2))
    assert all(each.changed_as_expected() for each in numbers)
    assert all(each.names == [] for each in numbers)


class TiedAndHooked(nn.Module):
    """Its first forward hooks a tied weight; it is built in eval mode, as pretrained models are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.handle, self.ready, self.flip, self.last_input = None, False, False, None
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.handle is None:
            self.handle = self.first.register_forward_hook(lambda module, inputs, output: output * 2)
        if not self.ready:
            self.first.weight.register_hook(lambda gradient: gradient * 3)
            self.ready = True
        self.flip = not self.flip
        self.last_input = x
        return self.last(self.first(x))


def test_hooks_of_tied_weights_and_behind_handles_are_installed_again_once() -> None:
    model, x = TiedAndHooked(), torch.ones(1, 2)
    numbers = ModuleNumbers(model)
    model.train()
    right = model(x)
    right.sum().backward()
    gradient = model.first.weight.grad
    for _ in range(2):
        numbers.restore()
        assert model.handle is None and not model.ready
        model.train()
        model.first.weight.grad = None
        again = model(x)
        again.sum().backward()
        assert torch.equal(again, right) and torch.equal(model.first.weight.grad, gradient)


def test_a_mode_is_no_flag_that_takes_hooks_with_it() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)).eval(), torch.ones(1, 2)
    numbers = ModuleNumbers(model)
    model.train()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)  # behind a guard that is no attribute
    right = model(x)
    numbers.restore()
    assert not model.training and torch.equal(model(x), right)


def test_a_toggle_in_a_module_that_remembers_something_is_still_found() -> None:
    model, world = TiedAndHooked(), thread_worlds(replicas=2)[0]
    model.ready, model.handle = True, model.first.register_forward_hook(lambda *_: None)
    numbers = ForwardNumbers(model, world=world, always=True)
    numbers.begin(num_micro=2, is_rerun=False)
    numbers.set_microbatch(0)
    model(torch.ones(1, 2))
    assert not numbers.changed_as_expected() and "flip" in numbers._new_increments
