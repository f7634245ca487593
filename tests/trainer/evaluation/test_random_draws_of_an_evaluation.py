"""A model that draws in eval mode gets other numbers in each microbatch, and the same in each evaluation."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

DRAWN: list[float] = []


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            DRAWN.append(float(torch.rand((), dtype=torch.float64)))
        return super().forward(x)


def test_each_microbatch_of_an_evaluation_draws_other_numbers(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,)))
    job = pl.Job(
        model=lambda: Drawing(4, 2),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
        train_data=data,
        eval_data=data,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=10,
    )
    settings = {"train.steps": 4, "eval.every": 2, "eval.batch_size": 4, "watch.to": ("jsonl",)}
    with pl.Run(job, ranks=1, run_dir=tmp_path / "run", settings=settings) as run:
        DRAWN.clear()
        for batch in run.batches():
            run.step(batch)
    assert len(DRAWN) == 10 and len(set(DRAWN)) == 5 and DRAWN[:5] == DRAWN[5:], DRAWN
