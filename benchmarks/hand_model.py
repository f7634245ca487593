"""The model, its loss and optimizer, and what all hand-written loops share."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Batches = Callable[[], Iterator[list[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and of the global batch."""

    width: int
    blocks: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int
    micro: int


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One step, and the weights after it."""

    step: Callable[[], object]
    whole: Callable[[], dict[str, Tensor]]


class Block(nn.Module):
    """RMS norm, rotary attention, and a gated product, as in Llama."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.head_size = width // size.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        shape = (*y.shape[:2], -1, self.head_size)
        query, key, value = (layer(y).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., RoFormer)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * rate
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Llama(nn.Module):
    """A small one, head and embedding apart."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The sum over all tokens, and how many there are."""
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def finite(norm: Tensor) -> Tensor:
    if not math.isfinite(norm.item()):
        raise RuntimeError("not finite")
    return norm


def divided(model: nn.Module, by: float) -> None:
    torch._foreach_div_([p.grad for p in model.parameters()], by)


def full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def clip(cut: list[Tensor], whole: list[Tensor]) -> None:
    squares = nn.utils.get_total_norm(cut).square()
    dist.all_reduce(squares)
    if whole:
        squares += nn.utils.get_total_norm(whole).square()
    norm = finite(squares.sqrt())
    torch._foreach_mul_([*cut, *whole], torch.clamp(1.0 / (norm + 1e-6), max=1.0))
