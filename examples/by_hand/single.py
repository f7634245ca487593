"""One process in plain torch: the reference for every layout.

python examples/by_hand/single.py [--save WEIGHTS.pt]
"""

import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F

STEPS, GLOBAL_BATCH, MICRO_BATCH = 10, 24, 4


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(240, 8, generator=generator), torch.randint(-1, 4, (240,), generator=generator)


def loss_sum(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses, and the number of targets (a label of -1 is not a target)."""
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-1), (y >= 0).sum()


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, because Adam would hide a gradient that is too large by a factor of 2."""
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train() -> torch.nn.Module:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    x, y = make_data()
    for step in range(STEPS):
        optimizer.zero_grad()
        count = torch.zeros(())
        start = step * GLOBAL_BATCH
        for at in range(start, start + GLOBAL_BATCH, MICRO_BATCH):
            loss, counted = loss_sum(model, x[at : at + MICRO_BATCH], y[at : at + MICRO_BATCH])
            loss.backward()  # sums add up in .grad
            count += counted
        for parameter in model.parameters():
            parameter.grad.div_(count)  # divided once, by the global count
        optimizer.step()
    return model


def save(model: torch.nn.Module, words: list[str]) -> None:
    """Print the sum of the weights; with `--save`, save the weights."""
    print(sum(p.double().sum().item() for p in model.parameters()))
    if "--save" in words:
        torch.save(model.state_dict(), words[words.index("--save") + 1])


if __name__ == "__main__":
    save(train(), sys.argv)
