"""Jobs for `layout_run_ranks`: losses that overflow in fp16 at torch's first scale, and evaluations that draw."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from tests import zoo

_FACTOR, _RATE = 3000.0, 1e-6
_X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
_Y = (_X[:, 0] > 0).long()


class Block(nn.Module):
    """`drops`: dropout that evaluation leaves on."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.drops = nn.Linear(8, 16), nn.Linear(16, 8), drops

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.two(torch.tanh(self.one(x))), 0.3, training=self.drops)


def _sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=_RATE)


def mlp() -> pl.Job:
    """Blocks of two products, with biases."""
    return pl.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))),
        loss=lambda output, batch: (10 * (output - 1).square().sum(), output.numel()),
        count=lambda batch: batch[0].numel(),
        train_data=TensorDataset(_X, _X),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3),
        global_batch_size=8,
    )


def text() -> pl.Job:
    """The text example's model, for sequences in parts."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        logits, targets = output.flatten(0, -2), batch[-1].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") * _FACTOR, targets.numel()

    return replace(zoo.text(), loss=loss, count=lambda batch: batch[-1].numel(), optimizer=_sgd, max_grad_norm=None)


def mixtral() -> pl.Job:
    """Experts, whose gradients are on their own ranks alone."""

    def count(batch: Any) -> Tensor:
        found: Tensor = (batch["labels"][:, 1:] != -100).sum()
        return found

    return replace(
        zoo.mixtral(),
        forward=lambda model, batch: model(**batch),
        loss=lambda output, batch: (output.loss.float() * count(batch) * _FACTOR, count(batch)),
        count=count,
        optimizer=_sgd,
        max_grad_norm=None,
    )


class Noised(torch.utils.data.Dataset[Any]):
    """Augmentation that evaluation leaves on."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _X[index] + 0.1 * torch.randn(8), _Y[index]


def sampled() -> pl.Job:
    """Random numbers in the evaluation's data and in its forward; 13 samples, which no two ranks share evenly."""
    return pl.Job(
        model=lambda: nn.Sequential(*(Block(drops=True) for _ in range(4))),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=TensorDataset(_X, _Y),
        eval_data=Noised(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
        metrics={"right": lambda output, batch: ((output.argmax(-1) == batch[1]).sum(), len(batch[1]))},
        global_batch_size=8,
    )


def alone() -> pl.Job:
    """One sample to evaluate: all ranks but one have nothing."""
    return replace(sampled(), eval_data=TensorDataset(_X[:1], _Y[:1]))
