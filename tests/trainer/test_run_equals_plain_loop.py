"""The loader, the random streams and the step against a plain loop that shares no code with them.

Dropout in repeated blocks and outside of them, an augmentation, a collation that draws, an order of the user's own, two
epochs with a short last batch: every key is written again here, from its definition in docs/data.md.
"""

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.data.order.cursor import Cursor
from paceline.trainer.setup.build_training_setup import build_training_setup
from paceline.trainer.setup.prepare import prepare
from paceline.verification.compare_in_lockstep import build_layout_loader

SAMPLES, BATCH, MICRO, EPOCHS, SEED, WIDTH = 21, 8, 3, 2, 7, 6
# One sum of three microbatches in another grouping, and six steps of momentum: some units of float64's last place.
APART = 64 * 2.0**-52


class Block(nn.Module):
    """A repeated block that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return found


class Net(nn.Module):
    """Dropout outside of the blocks too; the second block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.dropout(x)))
        found: Tensor = self.head(self.blocks[1](x))
        return found


class Rows(Dataset[Any]):
    """A row and its class; `augments` draws with all three generators at each reading."""

    def __init__(self, augments: bool) -> None:
        made = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=made, dtype=torch.float64)
        self.y = torch.randint(3, (SAMPLES,), generator=made)
        self.augments = augments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        row = self.x[index]
        if self.augments:
            row = row + torch.rand(WIDTH, dtype=torch.float64) + random.random() + float(np.random.rand())
        return row, self.y[index]


def stack(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    return torch.stack(x), torch.stack(y)


def stack_and_draw(rows: list[Any]) -> Any:
    x, y = stack(rows)
    return x * torch.rand(()), y


def order_of(num_samples: int, epoch: int, seed: int) -> list[int]:
    return [(5 * place + 3 * epoch + seed) % num_samples for place in range(num_samples)]


def summed(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def job_of(augments: bool, collate: Any) -> pl.Job:
    return pl.Job(
        model=Net,
        loss=summed,
        train_data=Rows(augments),
        collate=collate,
        order=order_of,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        global_batch_size=BATCH,
    )


def number(*parts: Any) -> int:
    """The key of what these parts name."""
    words = [f"{'str' if isinstance(part, str) else 'int'}:{part}" for part in parts]
    digest = hashlib.blake2b(chr(31).join(words).encode(), digest_size=8).digest()
    return sum(byte << (8 * place) for place, byte in enumerate(digest)) // 2


def start(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def by_hand(augments: bool, collate: Any) -> dict[str, Tensor]:
    """The loop of a person who has read the definitions."""
    start(number(SEED, "build"))
    model, data = Net(), Rows(augments)
    stream, calls = 0, [0, 0]

    def seeded(place: int) -> Any:
        def hook(*_: Any) -> None:
            mixed = (stream ^ (0x9E3779B97F4A7C15 * (place + 1))) + 0xD1B54A32D192ED03 * calls[place]
            torch.manual_seed(mixed % 2**63)
            calls[place] += 1

        return hook

    for place, block in enumerate(model.blocks):
        block.register_forward_pre_hook(seeded(place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    for epoch in range(EPOCHS):
        samples = order_of(SAMPLES, epoch, SEED)
        for first in range(0, SAMPLES, BATCH):
            batch = samples[first : first + BATCH]
            optimizer.zero_grad()
            for micro, at in enumerate(range(0, len(batch), MICRO)):
                part, rows = batch[at : at + MICRO], []
                if not augments:
                    start(number(SEED, "microbatch", epoch, part[0]))
                for index in part:
                    if augments:
                        start(number(SEED, "sample", epoch, index))
                    rows.append(data[index])
                x, y = collate(rows)
                stream, calls[:] = number(SEED, step, micro), [0, 0]
                start(stream)
                F.cross_entropy(model(x), y, reduction="sum").backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(batch)
            optimizer.step()
            step += 1
    return {name: p.detach() for name, p in model.named_parameters()}


def by_paceline(augments: bool, collate: Any, layout: str, ranks: int, workers: int) -> dict[str, Tensor]:
    job = job_of(augments, collate)
    settings = {"seed": SEED, "train.micro_batch_size": MICRO, "data.workers": workers}
    ready = prepare(Task(verb="train", job="job.py", layout=layout, ranks=ranks, settings=settings), job=job)
    built = build_training_setup(job=job, settings=ready.settings, plan=ready.plan, world=World.alone())
    feed = build_layout_loader(built, Cursor())
    try:
        for given, _ in zip(feed, range(EPOCHS * -(-SAMPLES // BATCH)), strict=False):
            built.step.run(given)
    finally:
        feed.close()
        built.close()
    return {name: p.detach() for name, p in built.model.named_parameters()}


@pytest.mark.parametrize(("layout", "ranks", "workers"), [("single", 1, 0), ("threads", 2, 0), ("single", 1, 1)])
@pytest.mark.parametrize(("augments", "collate"), [(True, stack), (False, stack_and_draw)])
def test_a_run_is_the_plain_loop(augments: bool, collate: Any, layout: str, ranks: int, workers: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        right, found = by_hand(augments, collate), by_paceline(augments, collate, layout, ranks, workers)
    finally:
        torch.set_num_threads(threads)
    assert found.keys() == right.keys()
    for name, weight in right.items():
        assert float((found[name] - weight).norm()) <= APART * float(weight.norm()), name
