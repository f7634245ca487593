"""Zero-bubble schedules where a stage's backward cannot be split: sharded stages, or recomputation."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_resume_in_another_layout import played, weights

LAYOUTS = {"fsdp": "pp=2,dp_shard=2,schedule=zb_h1", "remat": "pp=2,dp=2,schedule=zb_h1,remat=full"}
JOB = """
import torch, torch.nn as nn
import paceline as pl

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    def forward(self, x):
        return x + self.inner(self.norm(x))

def make_job():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=g)
    return pl.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 3)),
        loss=lambda output, batch: ((output - batch[0][:, :3]).square().sum(), len(output)),
        train_data=torch.utils.data.TensorDataset(x, x), global_batch_size=8,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )
"""


@pytest.mark.soak
def test_stages_whose_backward_is_whole_train_as_one_process(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    played(tmp_path, 1, [["single", "single", "", str(job)]])
    played(tmp_path, 4, [[name, layout, "", str(job)] for name, layout in LAYOUTS.items()])
    right = consolidated(tmp_path / "single")
    for name in LAYOUTS:
        far = torch.linalg.vector_norm(consolidated(tmp_path / name) - right) / torch.linalg.vector_norm(right)
        assert float(far) == pytest.approx(0.0, abs=1e-6), name


def consolidated(run: Path) -> torch.Tensor:
    return weights(run / "consolidated")
