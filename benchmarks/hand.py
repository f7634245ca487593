"""The hand-written loops that `layouts.py` holds Paceline against: fsdp, tp twice, pp, in plain torch on one model.

Each keeps the same contract: the loss of the whole batch divided by its count, clipping by the whole gradient's norm,
a finite check, AdamW. `whole()` gives the weights put together, by the model's own names.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from hand_model import Batches, Loop, Size, adamw, clip, divided, finite, full, loss
from hand_tensor import tp_functions, tp_torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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
        divided(model, joint[1].item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finite(norm.full_tensor())
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: full(p) for n, p in model.named_parameters()})


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
        clip([p.grad for p in module.parameters()], [])
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
        finite(full(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)))
        optimizer.step()

    return Loop(step=step, whole=lambda: {n: full(p) for n, p in prepared.named_parameters()})


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
