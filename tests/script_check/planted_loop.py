"""Plain training loops of two ranks, each with one fault that a foreign script could have.

`main` runs the loops named in `sys.argv[2:]` one after another, each in a forked process: it records itself into a
folder of its name in `sys.argv[1]`, and the digest of its last weights is written beside the recording. A loop whose
name begins with `PLAIN` is not recorded, and one whose name begins with `SPARSE` only at every third step.
"""

import hashlib
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it, for a second in each process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from paceline.script_check.recorder.script_recorder import start_recorder
from paceline.script_check.recording import EVERY_VARIABLE, FOLDER_VARIABLE, STEPS_VARIABLE

BATCH, CLASSES = 4, 3
PLAIN, SPARSE = "plain: ", "sparse: "
FLAT = {  # strategy, use_orig_params
    "flat parameters": (ShardingStrategy.FULL_SHARD, False),
    "flat parameters, seen as original ones": (ShardingStrategy.FULL_SHARD, True),
    "flat parameters, gathered once": (ShardingStrategy.SHARD_GRAD_OP, True),
    "flat parameters without shards": (ShardingStrategy.NO_SHARD, False),
    "flat parameters, one ignored": (ShardingStrategy.FULL_SHARD, True),
    "flat parameters of each rank": (ShardingStrategy.FULL_SHARD, False),
    "flat parameters, clipped by shard": (ShardingStrategy.FULL_SHARD, True),
}
MAIN_GRADIENTS = ("main gradients", "main gradients that are not reduced")
COPIES = ("copies in float32", "copies in float32 of each rank")
TWO_PASSES = (
    *MAIN_GRADIENTS,
    "accumulation",
    "no_sync at the wrong pass",
    "zero_grad at each pass",
    "clipped at each pass",
)


class Net(nn.Module):
    def __init__(self, *, has_batch_norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if has_batch_norm else nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


class Stream(IterableDataset[Any]):
    """The samples of a rank. Each worker reads a part of them, or all of them if nobody splits them."""

    def __init__(self, data: TensorDataset, rank: int, *, is_split: bool) -> None:
        self.rows = [data[place] for place in range(rank, len(data), 2)]
        self.is_split = is_split

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(self.rows[info.id :: info.num_workers] if self.is_split else self.rows)


def load(data: TensorDataset, rank: int, fault: str) -> DataLoader[Any]:
    if "workers" in fault:
        stream = Stream(data, rank, is_split=fault == "workers that split the samples")
        return DataLoader(stream, batch_size=BATCH, num_workers=2)
    if fault == "shuffled on each rank":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))
        return DataLoader(data, batch_size=BATCH, sampler=sampler)
    world = (1, 0) if fault in SAME_SAMPLES else (2, rank)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=world[0], rank=world[1]))


UNWRAPPED = (
    "not wrapped",
    "other start weights",
    "reduced to the sum",
    "local SGD",
    "sent from one rank",
    "alone with the same samples",
    "alone at another scale",
    "split by hand",
    "averaged by hand with buffers",
    *MAIN_GRADIENTS,
    *COPIES,
)
SAME_SAMPLES = ("the same samples", "alone with the same samples", "split by hand")


class WithoutGradient(torch.autograd.Function):
    """A function of a parameter that gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def set_modes(model: nn.Module, x: Tensor, number: int, fault: str) -> None:
    if fault == "an evaluation with gradients":
        model.eval()
        model(x)
        model.train()
    if fault == "a saliency map on one rank" and dist.get_rank() == 0:
        model.eval()
        shown = x.clone().requires_grad_()
        torch.autograd.grad(model.module(shown).sum(), shown)
        model.train()
    if (fault == "eval mode on one rank" and number == 2 and dist.get_rank() == 0) or fault == "never in training mode":
        model.eval()


def wrap(model: nn.Module, fault: str) -> nn.Module:
    if fault.startswith("fsdp"):
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = {"mp_policy": half} if fault == "fsdp in bfloat16" else {}
        for part in (model.first, model):
            fully_shard(part, **policy)
        if fault == "fsdp without initial values":
            for p in model.parameters():
                p.detach().to_local().fill_(1e20)
        return model
    if fault in FLAT:
        strategy, sees_original = FLAT[fault]
        options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": sees_original}
        if fault == "flat parameters of each rank":
            options["process_group"] = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        model.first = FullyShardedDataParallel(model.first, device_id=torch.device("cpu"), **options)
        ignored = [model.last] if fault == "flat parameters, one ignored" else None
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), ignored_modules=ignored, **options)
    if fault in UNWRAPPED:
        return model
    if fault == "a part that is trained later":
        model.first.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        model.first.requires_grad_(True)
        return wrapped
    if fault == "an ignored parameter":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    wrapped = DistributedDataParallel(model, broadcast_buffers=fault != "buffers of each rank")
    if fault == "compressed":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def reduce_by_hand(model: nn.Module, fault: str) -> None:
    if fault == "reduced to the sum":
        for p in model.parameters():
            dist.all_reduce(p.grad)
    if fault == "divided twice":
        for p in model.parameters():
            p.grad /= dist.get_world_size()
    if fault in ("averaged by hand with buffers", "main gradients", "copies in float32"):
        for p in model.parameters():
            of = p.main_grad if fault == "main gradients" else p.grad
            dist.all_reduce(of)
            of /= dist.get_world_size()
    if fault == "flat parameters, clipped by shard":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if fault == "clipped per parameter" or (fault == "one rank clips per parameter" and dist.get_rank() == 0):
        for p in model.parameters():
            nn.utils.clip_grad_norm_([p], 0.3)
    if fault == "normalized per parameter":
        for p in model.parameters():
            p.grad /= p.grad.norm() / 10
    if fault == "clipped at each pass":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if fault == "clipped by value":
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    if fault == "clipped while scaled":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    if fault == "not finite":
        next(model.parameters()).grad.fill_(torch.nan)
    if fault == "clipped" or (fault == "clipped on one rank" and dist.get_rank() == 0):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def share_weights(model: nn.Module, number: int, fault: str) -> None:
    for p in model.parameters():
        if fault == "local SGD" and number % 2:
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        if fault == "sent from one rank":
            dist.broadcast(p.data, 0)


def closure(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def train(fault: str) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank if fault == "other start weights" else 0)
    model = Net(has_batch_norm="buffers" in fault)
    if fault == "split by hand":
        torch.manual_seed(1 + rank)
        model.last.reset_parameters()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, CLASSES, (64,)))
    wrapped = wrap(model, fault)
    trained = Net(has_batch_norm=False) if fault == "an old optimizer" else wrapped
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    if fault == "a part that does not learn":
        parts = wrapped.module
        frozen = {"params": parts.last.parameters(), "lr": 0.0}
        others = [p for name, p in parts.named_parameters() if not name.startswith("last")]
        optimizer = torch.optim.AdamW([{"params": others}, frozen], lr=1e-2)
    if fault == "a closure":
        optimizer = torch.optim.LBFGS(trained.parameters(), max_iter=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if fault in COPIES:
        wrapped.to(torch.bfloat16)
        data = TensorDataset(data.tensors[0].to(torch.bfloat16), data.tensors[1])
        copies = [p.detach().clone().float() for p in wrapped.parameters()]
        optimizer = torch.optim.AdamW(copies, lr=1e-2)
    for p in wrapped.parameters() if fault in MAIN_GRADIENTS else ():
        p.main_grad = torch.zeros_like(p)
    num_passes = 2 if fault in TWO_PASSES else 1
    unequal_scales = fault == "another loss scale"
    scaler = torch.amp.GradScaler(
        "cpu", 2.0 ** (16 - rank * unequal_scales), enabled=fault == "a loss scale" or unequal_scales
    )
    if fault == "a part of all weights on each rank":
        trained = nn.Parameter(torch.full((3,), float(rank)))
        optimizer = torch.optim.AdamW([trained], lr=1e-2)
    torch.manual_seed(0 if fault in ("the same random numbers", "alone with the same samples") else rank)
    for number, (x, y) in enumerate(load(data, rank, fault)):
        if fault == "unequal batches":
            x, y = x[: BATCH - 2 * rank], y[: BATCH - 2 * rank]
        set_modes(wrapped, x, number, fault)
        is_last = (number + 1) % num_passes == 0
        skips = is_last if fault == "no_sync at the wrong pass" else not is_last
        with wrapped.no_sync() if skips and num_passes > 1 and fault not in UNWRAPPED else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=fault in ("a loss scale", "autocast")):
                output = wrapped.module(x) if fault == "the inner module is called" else wrapped(x)
                if fault == "a parameter without a gradient":
                    output = WithoutGradient.apply(output, model.first.bias)
                loss = F.cross_entropy(output, y) / num_passes
            if fault == "alone at another scale" and rank:
                loss = loss * 1e12
            if fault == "a constant loss":
                loss = loss * 0
            if fault == "zero_grad at each pass":
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            if fault == "sharpness-aware":  # the gradient at other weights is the one that counts
                optimizer.zero_grad()
                F.cross_entropy(wrapped(x), y).backward()
        for p in wrapped.parameters() if fault in MAIN_GRADIENTS else ():
            p.main_grad += p.grad
            p.grad = None
        if fault not in MAIN_GRADIENTS or is_last:
            reduce_by_hand(wrapped, fault)
        if is_last:
            if fault == "a part of all weights on each rank":
                trained.grad = torch.ones_like(trained)
            for p in wrapped.parameters() if fault in MAIN_GRADIENTS else ():
                p.grad = p.main_grad
            for p, copy in zip(wrapped.parameters(), copies if fault in COPIES else (), strict=False):
                copy.grad = p.grad.float()
            if fault == "a closure":
                optimizer.step(lambda x=x, y=y: closure(optimizer, wrapped, x, y))
            else:
                scaler.step(optimizer)
            scaler.update()
            for _ in range(world_size if fault == "a fast schedule" else 1):
                scheduler.step()
            if fault == "another learning rate":
                optimizer.param_groups[0]["lr"] *= 1 + rank
            share_weights(wrapped, number, fault)
            for p, copy in zip(wrapped.parameters(), copies if fault in COPIES else (), strict=False):
                p.data.copy_(copy)
                p.grad = None
            for p in wrapped.parameters() if fault in MAIN_GRADIENTS else ():
                p.main_grad.zero_()
                p.grad = None
            if fault != "no zero_grad":
                optimizer.zero_grad()
    return digest_of(wrapped)


def train_two_models(fault: str) -> str:
    """Train a generator and a discriminator, each with an optimizer; the loss of each one is a line of its own."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8), DistributedDataParallel(nn.Linear(8, 1))
    if fault == "two models":
        generator = DistributedDataParallel(generator)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        x, made = torch.randn(BATCH, 8), generator(torch.randn(BATCH, 4))
        of_discriminator.zero_grad()
        (discriminator(made.detach()) - discriminator(x)).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (-discriminator(made)).mean().backward()  # the generator's
        of_generator.step()
    return digest_of(generator)


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in model.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        digest.update(whole.detach().float().numpy().tobytes())
    return digest.hexdigest()


def run_loop(name: str, folder: Path) -> None:
    """Train in a process of its own, because the recorder has hooks on all modules and optimizers."""
    folder.mkdir(parents=True, exist_ok=True)
    if not name.startswith(PLAIN):
        every = "3" if name.startswith(SPARSE) else "1"
        start_recorder({**os.environ, FOLDER_VARIABLE: str(folder), EVERY_VARIABLE: every, STEPS_VARIABLE: "0"})
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    fault = name.removeprefix(PLAIN).removeprefix(SPARSE)
    digest = train_two_models(fault) if "two models" in fault else train(fault)
    (folder / f"digest-{rank}").write_text(digest)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        pid = os.fork()
        if pid == 0:
            run_loop(name, Path(sys.argv[1]) / name)
            os._exit(0)  # an end by Python takes longer than the loop
        assert os.waitpid(pid, 0)[1] == 0, name
