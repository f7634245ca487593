"""Training loops that split a model over two ranks by hand, each recorded by two ranks and by one process that is fed.

A loop is `KIND` or `KIND: FAULT`. `main` runs those named in `sys.argv[2:]` one after another, each in forked processes,
and records them into `LOOP/many` and `LOOP/one` in the folder `sys.argv[1]`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the optimizers import it, for a second in each process
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.script_check.recorder.script_recorder import start_recorder
from paceline.script_check.recording import (
    FEED_VARIABLE,
    FOLDER_VARIABLE,
    KEEP_VARIABLE,
    STEPS_VARIABLE,
    ScriptRecording,
    write_origin,
)

BATCH, WORDS, WIDTH, LENGTH, EXPERTS, STEPS = 8, 12, 6, 4, 4, 5


def added(x: Tensor) -> Tensor:
    total = x.clone().contiguous()
    dist.all_reduce(total)
    return total


def joined(x: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def part_of(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


class Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient every rank has already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return added(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Copy(torch.autograd.Function):
    """An input that each rank uses for its part, so that its gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return added(gradient)


class Join(torch.autograd.Function):
    """The parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, is_reduced: bool) -> Tensor:
        ctx.dim, ctx.is_reduced = dim, is_reduced
        return joined(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return part_of(added(gradient) if ctx.is_reduced else gradient, ctx.dim), None, None


class SumOfParts(torch.autograd.Function):
    """The part of the sum over the ranks that belongs to this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return part_of(added(x), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return joined(gradient, 0)


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.draw = torch.Generator().manual_seed(1)

    def weight(self, *shape: int, cut: int | None = None) -> nn.Parameter:
        if self.fault == "equal shards" and cut is not None:
            shape = tuple(size // dist.get_world_size() if dim == cut else size for dim, size in enumerate(shape))
            return nn.Parameter(torch.randn(shape, generator=self.draw) / 2)
        whole = torch.randn(shape, generator=self.draw) / 2
        return nn.Parameter(whole if cut is None else part_of(whole, cut))


class Columns(Model):
    """A block whose hidden units are split; `pair` joins two weights, and each rank has the rows of a part of both."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.embed = self.weight(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        pair = torch.randn(2, 2 * WIDTH, WIDTH, generator=self.draw) / 2
        self.pair = nn.Parameter(part_of(pair, 1).flatten(0, 1))
        if fault == "equal shards":
            self.pair.data = pair[:, : self.pair.size(0) // 2].flatten(0, 1).clone()
        self.pair_bias = nn.Parameter(torch.zeros(self.pair.size(0)))
        self.down = self.weight(WIDTH, 2 * WIDTH, cut=1)
        self.bias = self.weight(WIDTH)
        self.sink = self.weight(2 * WIDTH, cut=0)
        self.head = self.weight(WORDS, WIDTH)
        self.slopes = part_of(torch.linspace(0.5, 1.5, 2 * WIDTH), 0)
        self.cut = (self.pair, self.pair_bias, self.down, self.sink)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed) * self.scale
        h = x if self.fault == "not added" else Copy.apply(x)
        h = F.dropout(h, 0.2) if "dropout" in self.fault else h
        gate, value = (h @ self.pair.T + self.pair_bias).chunk(2, -1)
        y = (torch.sigmoid(gate) * torch.tanh(value * self.slopes) + self.sink) @ self.down.T
        if self.fault == "a bias on each rank":
            y = Sum.apply(y + self.bias)
        elif self.fault == "a divided bias":
            y = Sum.apply(y + self.bias / dist.get_world_size())
        else:
            y = Sum.apply(y) + self.bias
        return (x + y) @ self.head.T


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x * self.norm @ self.weight)


class Stage(Model):
    """The layers of a stage, counted from 0 on each one; the first and the last one have the same embedding."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.embed = self.weight(WORDS, WIDTH)
        weights = [self.weight(WIDTH, WIDTH) for _ in range(4)]
        count = len(weights) // dist.get_world_size()
        own = weights[dist.get_rank() * count :][:count]
        self.layers = nn.ModuleList(Layer(each) for each in own)

    def forward(self, x: Tensor) -> Tensor:
        x = F.embedding(x, self.embed) if dist.get_rank() == 0 else x
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.T if dist.get_rank() == dist.get_world_size() - 1 else x


class Experts(Model):
    """Experts on the ranks, to which all ranks send their tokens."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.embed, self.router = self.weight(WORDS, WIDTH), self.weight(EXPERTS, WIDTH)
        self.experts = self.weight(EXPERTS, WIDTH, WIDTH, cut=0)
        self.head = self.weight(WORDS, WIDTH)
        self.cut = (self.experts,)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed)
        chances = (x @ self.router.T).softmax(-1)
        first = dist.get_rank() * len(self.experts)
        tokens = Join.apply(x, 0, self.fault != "a gather without gradient")
        own = Join.apply(chances, 0, True)[..., first : first + len(self.experts)]
        sent = sum(own[..., i : i + 1] * torch.tanh(tokens @ each) for i, each in enumerate(self.experts))
        return (x + SumOfParts.apply(sent)) @ self.head.T


class Sequences(Model):
    """A model whose ranks have parts of each sequence, and attend to the whole one."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.embed, self.places = self.weight(WORDS, WIDTH), self.weight(LENGTH, WIDTH)
        self.key, self.value, self.head = (
            self.weight(WIDTH, WIDTH),
            self.weight(WIDTH, WIDTH),
            self.weight(WORDS, WIDTH),
        )
        self.cut = ()

    def forward(self, ids: Tensor) -> Tensor:
        first = 0 if self.fault == "positions from zero" else dist.get_rank() * ids.size(1)
        x = F.embedding(ids, self.embed) + self.places[first : first + ids.size(1)]
        is_reduced = self.fault != "a gather without gradient"
        keys, values = (Join.apply(x @ each, 1, is_reduced) for each in (self.key, self.value))
        return (x + (x @ keys.transpose(1, 2)).softmax(-1) @ values) @ self.head.T


def clip(model: Model, fault: str) -> None:
    if fault == "clipped alone":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if fault in ("clipped", "replicas in the norm", "left out of the norm"):
        counted = [p for p in model.parameters() if fault != "left out of the norm" or p is not model.sink]
        cut = {id(p) for p in model.cut}
        own = [p for p in counted if id(p) in cut or fault == "replicas in the norm" or dist.get_rank() == 0]
        if dist.get_world_size() == 1:
            own = list(model.parameters())
        norm = added(torch.stack([p.grad.square().sum() for p in own]).sum()).sqrt()
        for p in model.parameters():
            p.grad *= 0.1 / norm


def reduce(model: Model, kind: str, fault: str) -> None:
    world_size = dist.get_world_size()
    if kind == "stages" and fault != "a tied embedding alone" and world_size > 1:
        dist.all_reduce(model.embed.grad)
    if kind in ("experts", "sequences"):
        for p in model.parameters():
            if not any(p is each for each in model.cut):
                dist.all_reduce(p.grad)
                p.grad /= world_size
            elif fault != "experts not divided":
                p.grad /= world_size


def run_stages(model: Model, inputs: Tensor, targets: Tensor) -> None:
    """Send the activations to the next stage, and their gradients back."""
    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    if not is_first:
        inputs = torch.empty(len(inputs), LENGTH, WIDTH)
        dist.recv(inputs, dist.get_rank() - 1)
        inputs.requires_grad_()
    output = model(inputs)
    if is_last:
        F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    else:
        dist.send(output.detach(), dist.get_rank() + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, dist.get_rank() + 1)
        output.backward(gradient)
    if not is_first:
        dist.send(inputs.grad, dist.get_rank() - 1)


def train(kind: str, fault: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = {"columns": Columns, "stages": Stage, "experts": Experts, "sequences": Sequences}[kind](fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, weights = torch.randint(WORDS, (BATCH * STEPS, LENGTH + 1)), torch.rand(BATCH * STEPS, LENGTH).round()
    data = TensorDataset(ids, weights)
    is_dealt = kind == "experts" or fault == "other samples"
    sampler = DistributedSampler(data, world_size, rank) if is_dealt else None
    torch.manual_seed(rank if fault == "dropout of each rank" else 0)
    for batch, used in DataLoader(data, BATCH // (world_size if is_dealt else 1), sampler=sampler):
        optimizer.zero_grad()
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if kind == "stages":
            run_stages(model, inputs, targets)
        elif kind == "sequences":
            inputs, targets, used = (part_of(each, 1) for each in (inputs, targets, used))
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none") * used.flatten()
            count = used.sum() if fault == "local counts" else added(used.sum()) / world_size
            (losses.sum() / count).backward()
        else:
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        reduce(model, kind, fault)
        clip(model, fault)
        optimizer.step()


def run_loop(loop: str, folder: Path, *, name: str) -> None:
    """Train in a process of its own, because the recorder has hooks on all modules and optimizers."""
    world_size = 1 if name == "one" else 2
    write_origin(folder / name, ScriptRecording(command=(name,), steps=0, fed="" if name == "many" else "many"))
    exchange = {KEEP_VARIABLE: "1"} if name == "many" else {FEED_VARIABLE: str(folder / "many")}
    start_recorder({**os.environ, FOLDER_VARIABLE: str(folder / name), STEPS_VARIABLE: "0", **exchange})
    store = dist.FileStore(str(folder / f"store-{name}"), world_size)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    kind, _, fault = loop.partition(": ")
    train(kind, fault)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for loop in sys.argv[2:]:
        for name in ("many", "one"):
            if os.environ["RANK"] == "0" or name != "one":
                pid = os.fork()
                if pid == 0:
                    folder = Path(sys.argv[1]) / loop
                    folder.mkdir(parents=True, exist_ok=True)
                    run_loop(loop, folder, name=name)
                    os._exit(0)  # an end by Python takes longer than the loop
                assert os.waitpid(pid, 0)[1] == 0, (loop, name)
