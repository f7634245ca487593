"""A small language model as a job for faults in layouts: every kind of layer that a layout must handle.

Read as text: the job file of a fault is this file and the fault's own lines. `TIED` and `DROPOUT` are the fault's to
set; `DROPOUT` is between the last block and the head, where a stage border has to hand the random stream on.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl

WIDTH, HEADS, DEPTH, VOCAB, LENGTH, BATCH = 16, 4, 4, 65, 12, 8
TIED, DROPOUT, BLOCK_DROPOUT = False, 0.0, 0.0


class Block(nn.Module):
    """Pre-norm attention over fused heads, and an MLP; every linear layer has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(BLOCK_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class Net(nn.Module):
    """Embeddings, blocks, a norm and a head that may be the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.dropout = nn.Dropout(DROPOUT)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if TIED:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position_embed(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(self.dropout(x)))
        return found


class Rows(Dataset[Any]):
    """Ids from a generator that the index seeds, and the ids after them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def summed(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The sum over all targets."""
    targets = batch[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Of all parameters."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, weight_decay=0.01)


def make_job() -> pl.Job:
    """Gradients are clipped: a norm that is wrong shows in the update."""
    return pl.Job(
        model=Net,
        train_data=Rows(),
        loss=summed,
        optimizer=adamw,
        global_batch_size=BATCH,
        max_grad_norm=0.5,
        sequence={"0": 1, "1": 1},
        settings={"train.steps": 2},
    )
