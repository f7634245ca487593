"""Tensor parallelism by hand: by torch's own `parallelize_module`, and by autograd functions on plain tensors."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hand_model import Batches, Block, Loop, Size, adamw, clip, full, turned
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


def tp_torch(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """`parallelize_module`: columns and rows, the vocabulary cut in embedding and head, `loss_parallel`."""
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh, plan)
    optimizer, data = adamw(model.parameters()), batches()

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad()
        with loss_parallel():
            output = model(batch[0]).flatten(0, 1)
            total = F.cross_entropy(output, batch[1].flatten(), reduction="mean")
            total.backward()
        _clip_mixed(model)
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: full(p) for n, p in model.named_parameters()})


def _clip_mixed(model: nn.Module) -> None:
    """Whole and cut gradients together: one all-reduce of the cut ones' squares."""
    cut = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    rest = [p.grad for p in model.parameters() if not isinstance(p.grad, DTensor)]
    clip(cut, rest)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _CutEntropy(torch.autograd.Function):
    """The sum of cross-entropies of logits whose vocabulary is cut (Megatron-LM)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int) -> Tensor:
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        power = (logits - top[:, None]).exp()
        own = target - first
        is_own = (own >= 0) & (own < logits.shape[1])
        own = own.clamp(0, logits.shape[1] - 1)
        both = torch.stack([power.sum(-1), (logits.gather(1, own[:, None])[:, 0] - top) * is_own])
        dist.all_reduce(both)
        ctx.save_for_backward(power.div_(both[0][:, None]), own, is_own)
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, is_own = ctx.saved_tensors
        found = softmax.clone()
        found.scatter_add_(1, own[:, None], -is_own.to(found.dtype)[:, None])
        return found * gradient, None, None


COLUMNS, ROWS = ("query", "key", "value", "gate", "up"), ("out", "down")


class _CutBlock(nn.Module):
    """The block again, on pieces: read by cut work once, summed once."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: Tensor) -> Tensor:
        block = self.inner
        y = _CopyIn.apply(block.norm1(x))
        shape = (*y.shape[:2], -1, block.head_size)
        query, key, value = (layer(y).view(shape).transpose(1, 2) for layer in (block.query, block.key, block.value))
        y = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        x = x + _ReduceOut.apply(block.out(y.transpose(1, 2).flatten(2)))
        y = _CopyIn.apply(block.norm2(x))
        return x + _ReduceOut.apply(block.down(F.silu(block.gate(y)) * block.up(y)))


def tp_functions(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """Megatron's f and g, embedding whole or cut as in `tp_torch`, and cross-entropy on cut logits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dims = {f"{n}.weight": 0 for n in ("embed", "head")}
    dims |= {f"blocks.{k}.{n}.weight": int(n in ROWS) for k in range(size.blocks) for n in COLUMNS + ROWS}
    for name, dim in dims.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.chunk(ranks, dim)[rank].clone()
    blocks = [_CutBlock(block) for block in model.blocks]
    rows = size.vocabulary // ranks
    optimizer, data = adamw(model.parameters()), batches()

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad()
        own = batch[0] - rank * rows
        is_own = (own >= 0) & (own < rows)
        x = _ReduceOut.apply(F.embedding(own.clamp(0, rows - 1), model.embed.weight) * is_own[..., None])
        for block in blocks:
            x = block(x)
        logits = model.head(_CopyIn.apply(model.norm(x))).flatten(0, 1)
        total = _CutEntropy.apply(logits, batch[1].flatten(), rank * rows)
        (total / batch[1].numel()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        clip([g for n, g in gradients.items() if n in dims], [g for n, g in gradients.items() if n not in dims])
        optimizer.step()

    def whole() -> dict[str, Tensor]:
        return {n: _joined(p.detach(), dims.get(n), ranks) for n, p in model.named_parameters()}

    return Loop(step=step, whole=whole)


def _joined(piece: Tensor, dim: int | None, ranks: int) -> Tensor:
    if dim is None:
        return piece.clone()
    pieces = [torch.empty_like(piece) for _ in range(ranks)]
    dist.all_gather(pieces, piece.contiguous())
    return torch.cat(pieces, dim)
