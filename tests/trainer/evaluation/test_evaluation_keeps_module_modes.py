"""A layer that the user freezes in the loop is still frozen after an evaluation."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


def test_an_evaluation_leaves_each_module_in_its_mode(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,)))
    job = pl.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2)),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
        train_data=data,
        eval_data=data,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=10,
    )
    settings = {"train.steps": 4, "eval.every": 2, "watch.to": ("jsonl",)}
    with pl.Run(job, ranks=1, run_dir=tmp_path / "run", settings=settings) as run:
        norm = run.model[1]
        norm.eval()
        kept = norm.running_mean.clone()
        for batch in run.batches():
            run.step(batch)
            assert run.model.training and run.model[2].training and not norm.training
        assert torch.equal(norm.running_mean, kept)
