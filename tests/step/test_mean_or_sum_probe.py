"""A mean next to a count is detected from halves of a microbatch, without calling a loss that could notice."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline.step.loss.mean_or_sum_probe import gives_mean, keeps_nothing

CALLS: list[int] = []
COUNTED = 0
CRITERION = nn.CrossEntropyLoss()
SUMMED = nn.CrossEntropyLoss(reduction="sum")
TARGET = torch.tensor([0, 1, 2, 0, 1, -100, 2])
BATCH = (torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), TARGET)
OUTPUT = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)


def helper(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def through_a_helper(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return helper(output, batch[1]), len(batch[1])


def counting(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    global COUNTED
    COUNTED += 1
    return helper(output, batch[1]), len(output)


def appending(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    CALLS.append(len(output))
    return helper(output, batch[1]), len(output)


def printing(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    print(len(output))
    return helper(output, batch[1]), len(output)


def writing(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    batch[0][0] = 1.0
    return helper(output, batch[1]), len(output)


def weighted(output: Tensor, batch: Any, *, weight: float) -> tuple[Tensor, int]:
    return weight * helper(output, batch[1]), len(output)


MEANS = {
    "lambda": lambda o, b: (F.cross_entropy(o, b[1]), len(b[1])),
    "targets": lambda o, b: (F.cross_entropy(o, b[1]), (b[1] != -100).sum()),
    "module": lambda o, b: (CRITERION(o, b[1]), len(o)),
    "helper": through_a_helper,
    "partial": partial(weighted, weight=0.5),
    "by name": lambda o, b: (mse_loss(o, b[0][:, :3]), o.numel()),
}
SUMS = {
    "lambda": lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), (b[1] != -100).sum()),
    "module": lambda o, b: (SUMMED(o, b[1]), len(o)),
    "scaled": lambda o, b: (F.cross_entropy(o, b[1]) * (b[1] != -100).sum(), len(o)),
    "zero": lambda o, b: (o.sum() * 0.0, len(o)),
    "one count": lambda o, b: (F.cross_entropy(o, b[1]), 1),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_recognised(name: str) -> None:
    batch = BATCH if name == "targets" else (BATCH[0], TARGET.clamp(min=0))
    assert gives_mean(MEANS[name], OUTPUT, batch, MEANS[name](OUTPUT, batch))


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_none(name: str) -> None:
    assert keeps_nothing(SUMS[name])
    assert not gives_mean(SUMS[name], OUTPUT, BATCH, SUMS[name](OUTPUT, BATCH))


HOOKED = nn.CrossEntropyLoss()
HOOKED.register_forward_hook(lambda *_: None)
CENTER = torch.zeros(3)
UNKNOWN = {
    "an update in place": lambda o, b: ((o - CENTER.mul_(0.9).add_(o.mean(0))).square().mean(), len(o)),
    "a queue": lambda o, b: (CENTER.copy_(o[0]).sum(), len(o)),
    "a collective": lambda o, b: (torch.distributed.all_reduce(o), len(o)),
    "a file": lambda o, b: (torch.save(o, "x"), len(o)),
    "a seed": lambda o, b: (torch.manual_seed(0), len(o)),
    "a draw": lambda o, b: (F.dropout(o).sum(), len(o)),
    "a hook": lambda o, b: (HOOKED(o, b[1]), len(o)),
    "an initialiser": lambda o, b: (nn.init.zeros_(o), len(o)),
    "threads": lambda o, b: (torch.set_num_threads(1), len(o)),
    "out=": lambda o, b: (torch.sum(o, 0, out=CENTER).mean(), len(o)),
    "a tensor of its own": lambda o, b: ((o - CENTER).square().sum(), len(o)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_do_more_than_compute_is_not_asked(name: str) -> None:
    assert not keeps_nothing(UNKNOWN[name])


@pytest.mark.parametrize("loss", [counting, appending, printing, writing, nn.Linear(3, 1), [].append])
def test_a_loss_that_could_notice_is_not_asked(loss: Any) -> None:
    found = (F.cross_entropy(OUTPUT, TARGET), len(OUTPUT))
    assert not keeps_nothing(loss) and not gives_mean(loss, OUTPUT, BATCH, found)
    assert not CALLS and not COUNTED


def test_a_closure_that_counts_is_not_asked() -> None:
    calls, held = 0, nn.Linear(3, 3)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, batch[1]), len(output)

    assert not keeps_nothing(loss) and not keeps_nothing(lambda o, b: (held(o).mean(), len(o)))


def test_asking_changes_neither_the_batch_nor_the_output() -> None:
    batch = (BATCH[0], TARGET.clamp(min=0))
    before = [batch[0].clone(), batch[1].clone(), OUTPUT.detach().clone()]
    assert gives_mean(MEANS["lambda"], OUTPUT, batch, MEANS["lambda"](OUTPUT, batch))
    assert all(map(torch.equal, [*batch, OUTPUT], before)) and OUTPUT.grad is None
