"""A byte-level GPT on the source text of Python's standard library, which needs no download.

paceline train text.py --ranks 2
"""

import hashlib
import math
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl

MAX_BYTES = 4_000_000  # bytes of training text


@cache
def read_text(held_out: bool) -> Tensor:
    """Return the library's files as one text. One file in sixteen, chosen by the hash of its name, is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        is_eval_file = hashlib.sha256(name.encode()).digest()[0] % 16 == 0
        if is_eval_file == held_out and "site-packages" not in name and "test" not in name and size < MAX_BYTES:
            parts.append(path.read_bytes())
            size += len(parts[-1])
    return torch.from_numpy(np.frombuffer(b"".join(parts)[:MAX_BYTES], dtype=np.uint8).copy())


class Windows(Dataset):
    """Windows of `length` bytes. The targets of a window are the same bytes shifted by one position."""

    def __init__(self, text: Tensor, length: int, max_windows: int | None = None):
        self.text, self.length = text, length
        self.count = min((len(text) - 1) // length, max_windows or len(text))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, context: int, dropout: float):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.near = nn.Conv1d(width, width, 4)  # mixes the last four bytes
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 if name == "token.weight" else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        x = x + F.gelu(self.near(F.pad(x.transpose(1, 2), (3, 0)))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits, batch):
    targets = batch[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def bits_per_byte(logits, batch):
    total, count = loss(logits, batch)
    return total / math.log(2), count


def make_job(
    lr: float = 4e-3, width: int = 128, depth: int = 3, context: int = 64, dropout: float = 0.0, steps: int = 500
) -> pl.Job:
    def optimizer(named):
        decay = {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1}
        rest = {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}
        return torch.optim.AdamW([decay, rest], lr=lr, betas=(0.9, 0.95))

    def schedule(optimizer):
        def factor(step):
            return min((step + 1) / 30, 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / steps))))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def sample(run):
        prompt = torch.tensor([list(b"def main(")])
        ids = run.generate(prompt, num_tokens=120, temperature=0.7, context=context)
        text = bytes(ids[0].tolist()).decode(errors="replace")
        return {"sample": "".join(c if (c.isprintable() and c != "\ufffd") or c == "\n" else "·" for c in text)}

    return pl.Job(
        model=lambda: GPT(width, depth, 4, context, dropout),
        loss=loss,
        train_data=lambda: Windows(read_text(held_out=False), context),
        eval_data=lambda: Windows(read_text(held_out=True), context, max_windows=1024),
        optimizer=optimizer,
        lr_schedule=schedule,
        metrics={"bits_per_byte": bits_per_byte},
        global_batch_size=32,
        sequence={"0": 1},  # for --layout cp: in entry 0 of a batch, dimension 1 is the sequence
        max_grad_norm=1.0,
        best="bits_per_byte:min",
        on_eval=sample,
        settings={"train.steps": steps, "eval.every": max(1, steps // 2)},
    )
