"""A loss that is no sum over samples shows in halves of a microbatch; a loss that could notice is not called again."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from paceline.step.loss.mean_or_sum_probe import MEAN_WITH_COUNT, NOT_ADDITIVE, find_loss_fault, has_no_side_effects

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
    fault = find_loss_fault(MEANS[name], OUTPUT, batch, MEANS[name](OUTPUT, batch))
    assert fault is not None and fault.kind == MEAN_WITH_COUNT


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_none(name: str) -> None:
    assert has_no_side_effects(SUMS[name])
    assert find_loss_fault(SUMS[name], OUTPUT, BATCH, SUMS[name](OUTPUT, BATCH)) is None


def contrastive(output: Tensor, batch: Any) -> Tensor:
    a = F.normalize(output, dim=1)
    return F.cross_entropy(a @ a.T, torch.arange(len(a), device=a.device))


SCALARS = {
    "one target each": (lambda o, b: F.cross_entropy(o, b[1].clamp(min=0)), True),
    "mean over labels": (lambda o, b: F.cross_entropy(o, b[1]), False),
    "mean over classes": (lambda o, b: (o - b[0][:, :3]).square().mean(), True),
    "root of a mean": (lambda o, b: torch.sqrt((o - b[0][:, :3]).square().mean()), False),
    "weights": (lambda o, b: F.cross_entropy(o, b[1].clamp(min=0), weight=torch.arange(1.0, 4.0)), False),
    "a sum": (lambda o, b: o.square().sum(), False),
    "contrastive": (contrastive, False),
    "no target in a half": (lambda o, b: o[b[1] == 0].square().mean() + 0 * o[: len(o) // 2 * 2].mean(), False),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_counts_as_the_mean_over_samples(name: str) -> None:
    loss, is_right = SCALARS[name]
    assert has_no_side_effects(loss)
    fault = find_loss_fault(loss, OUTPUT, BATCH, (loss(OUTPUT, BATCH) * len(OUTPUT), float(len(OUTPUT))))
    assert (fault is None) == is_right, fault
    assert fault is None or (fault.is_scalar and fault.kind == NOT_ADDITIVE)


def test_a_pair_that_is_neither_sum_nor_mean_is_not_additive() -> None:
    def dice(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        p, y = output.softmax(1)[:, 0], (batch[1] == 0).float()
        return (1 - 2 * (p * y).sum() / (p.sum() + y.sum())) * len(output), len(output)

    fault = find_loss_fault(dice, OUTPUT, BATCH, dice(OUTPUT, BATCH))
    assert fault is not None and fault.kind == NOT_ADDITIVE and not fault.is_scalar
    assert fault.full == dice(OUTPUT, BATCH)[0].item()


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
    assert not has_no_side_effects(UNKNOWN[name])


@pytest.mark.parametrize("loss", [counting, appending, printing, writing, nn.Linear(3, 1), [].append])
def test_a_loss_that_could_notice_is_not_asked(loss: Any) -> None:
    found = (F.cross_entropy(OUTPUT, TARGET), len(OUTPUT))
    assert not has_no_side_effects(loss) and find_loss_fault(loss, OUTPUT, BATCH, found) is None
    assert not CALLS and not COUNTED


def test_a_closure_that_counts_is_not_asked() -> None:
    calls, held = 0, nn.Linear(3, 3)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, batch[1]), len(output)

    assert not has_no_side_effects(loss) and not has_no_side_effects(lambda o, b: (held(o).mean(), len(o)))


def test_asking_changes_neither_the_batch_nor_the_output() -> None:
    batch = (BATCH[0], TARGET.clamp(min=0))
    before = [batch[0].clone(), batch[1].clone(), OUTPUT.detach().clone()]
    assert find_loss_fault(MEANS["lambda"], OUTPUT, batch, MEANS["lambda"](OUTPUT, batch)) is not None
    assert all(map(torch.equal, [*batch, OUTPUT], before)) and OUTPUT.grad is None
