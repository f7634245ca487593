"""The hand-written loops that `layouts.py` holds Paceline against: fsdp, tp twice, pp, in plain torch on one model.

Each keeps the same contract: the loss of the whole batch divided by its count, clipping by the whole gradient's norm,
a finite check, AdamW. `whole()` gives the weights put together, by the model's own names.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

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


def _finite(norm: Tensor) -> Tensor:
    if not math.isfinite(norm.item()):
        raise RuntimeError("not finite")
    return norm


def _divided(model: nn.Module, by: float) -> None:
    torch._foreach_div_([p.grad for p in model.parameters()], by)


# -- fsdp


def fsdp(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """`fully_shard` on every block and on the model."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, data, ranks = adamw(model.parameters()), batches(), dist.get_world_size()

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad()
        total, count = loss(model(batch[0]), batch)
        joint = torch.tensor([float(total.detach()), count], dtype=torch.float64)
        work = dist.all_reduce(joint, async_op=True)
        (total * ranks).backward()  # fully_shard averages; the contract wants a sum
        work.wait()
        _divided(model, joint[1].item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _finite(norm.full_tensor())
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: _full(p) for n, p in model.named_parameters()})


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


# -- tp by torch


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

    return Loop(step=step, whole=lambda: {n: _full(p) for n, p in model.named_parameters()})


def _clip_mixed(model: nn.Module) -> None:
    """Whole and cut gradients together: one all-reduce of the cut ones' squares."""
    cut = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    rest = [p.grad for p in model.parameters() if not isinstance(p.grad, DTensor)]
    _clip(cut, rest)


def _clip(cut: list[Tensor], whole: list[Tensor]) -> None:
    squares = nn.utils.get_total_norm(cut).square()
    dist.all_reduce(squares)
    if whole:
        squares += nn.utils.get_total_norm(whole).square()
    norm = _finite(squares.sqrt())
    torch._foreach_mul_([*cut, *whole], torch.clamp(1.0 / (norm + 1e-6), max=1.0))


# -- tp by autograd functions


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
        _clip([g for n, g in gradients.items() if n in dims], [g for n, g in gradients.items() if n not in dims])
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


# -- pp


class _Stage(nn.Module):
    """A cut made by hand: half of the blocks, and what stands at this end."""

    def __init__(self, model: Any, *, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(model.blocks) // ranks
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in range(rank * each, (rank + 1) * each)})
        if rank == 0:
            self.embed = model.embed
        if rank == ranks - 1:
            self.norm, self.head = model.norm, model.head
        self.is_first, self.is_last = rank == 0, rank == ranks - 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.is_first else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def pp(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """torch's own 1F1B over stages cut by hand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = _Stage(model, rank=rank, ranks=ranks)
    count = size.batch * size.length
    entropy = lambda output, target: loss(output, [output, target])[0] / count  # noqa: E731
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=size.batch // size.micro, loss_fn=entropy, scale_grads=False)
    optimizer, data = adamw(module.parameters()), batches()

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad()
        if module.is_first:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1])
        _clip([p.grad for p in module.parameters()], [])
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: p.detach() for n, p in module.named_parameters()})


# -- others' frameworks


class Absent(Exception):
    """A framework that can't do this here, and why."""


def accelerate(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """Accelerate's FSDP2. On CPU it leaves the plugin aside without a word and wraps the model in DDP (1.15)."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type is not DistributedType.FSDP:
        raise Absent(f"here it runs as {accelerator.distributed_type.value}, with the plugin left aside")
    prepared, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    data, ranks = batches(), dist.get_world_size()

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad()
        total, count = loss(prepared(batch[0]), batch)
        accelerator.backward(total * ranks / accelerator.reduce(torch.tensor(float(count)), reduction="sum"))
        _finite(_full(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)))
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: _full(p) for n, p in prepared.named_parameters()})


def deepspeed(model: nn.Module, batches: Batches, size: Size) -> Loop:
    """DeepSpeed's ZeRO-3."""
    import deepspeed

    ranks = dist.get_world_size()
    config = {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": size.batch // ranks,
        "zero_optimization": {"stage": 3},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    data = batches()

    def step() -> None:
        batch = next(data)
        total, count = loss(engine(batch[0]), batch)
        engine.backward(total / count)  # every rank has as many tokens
        engine.step()

    def whole() -> dict[str, Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {n: p.detach().clone() for n, p in model.named_parameters()}

    return Loop(step=step, whole=whole)


LOOPS: dict[str, dict[str, Callable[[nn.Module, Batches, Size], Loop]]] = {
    "fsdp": {"by hand": fsdp},
    "tp": {"parallelize_module": tp_torch, "autograd functions": tp_functions},
    "pp": {"by hand": pp},
}
OTHERS = {"fsdp": {"accelerate FSDP2": accelerate, "deepspeed ZeRO-3": deepspeed}}


def installed(make: Callable[[nn.Module, Batches, Size], Loop], *given: Any) -> Loop | str:
    """The loop, or why there is none."""
    try:
        return make(*given)
    except ImportError:
        return "not installed"
    except Absent as reason:
        return str(reason)
