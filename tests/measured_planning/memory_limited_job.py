"""A job whose ranks may allocate only a given amount of memory after training starts."""

import os
import resource
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline as pl


class Short(Dataset):
    """Data whose first reader in a rank of a run is given its limit: a real one, at which allocations fail."""

    def __init__(self, data: TensorDataset, room: int) -> None:
        self.data, self.room, self.reads = data, room, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.reads += 1
        folder = os.environ.get("PACELINE_ATTEMPT_FOLDER")
        if (
            self.room
            and self.reads == 10
            and folder
            and '"verb": "plan"' not in (Path(folder) / "request.json").read_text()
        ):
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
            resource.setrlimit(resource.RLIMIT_DATA, (now + (self.room << 20),) * 2)
        return self.data[index]


class Block(nn.Module):
    """Keeps much for backward and computes little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.inner(F.gelu(self.norm(x))))


def make_job(room: int = 0, length: int = 512, depth: int = 8) -> pl.Job:
    """`room` is in MiB."""
    torch.manual_seed(1)
    x = torch.randn(64, length, 64)
    return pl.Job(
        model=lambda: nn.Sequential(*[Block(64) for _ in range(depth)]),
        loss=lambda output, batch: (F.mse_loss(output, batch[1], reduction="sum"), output.numel()),
        train_data=Short(TensorDataset(x, x), room),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        global_batch_size=64,
    )
