"""Fully sharded data parallelism by hand: no rank keeps a whole layer; a layer is gathered when it is used.

    python examples/by_hand/fsdp.py

Each layer is one flat vector, cut into as many shards as there are ranks. A rank keeps its shard of the weights, of
the gradients and of the optimizer state. Every rank has its own samples, as in `ddp.py`.
- forward: all-gather the layer's shards, compute, free the whole layer;
- backward: all-gather them again, compute, and reduce-scatter the gradient: each rank gets its shard of the sum;
- optimizer: each rank updates its shard. This needs no message: the update of a number needs only its own gradient.

Messages: every weight twice and every gradient once a step. Memory: 1/ranks of weights, gradients and optimizer
state, and one whole layer while it is used. Waiting: for each gather. Real FSDP gathers the next layer while the
current one computes.
"""

import sys

import torch
import torch.distributed as dist
from harness import choose_device, compare, flatten, run_ranks
from torch import Tensor, nn

RANKS, LAYERS, WIDTH, STEPS, GLOBAL_BATCH = 4, 6, 90, 5, 32


def make_layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1).sin()


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, because Adam would hide a gradient that is too large by a factor."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def cut(layer: nn.Linear, rank: int, ranks: int, device: torch.device) -> nn.Parameter:
    """Return this rank's shard of the layer. Zeros pad the flat vector, so that all shards have the same size."""
    flat = flatten(layer.parameters())
    size = -(-flat.numel() // ranks)
    flat = nn.functional.pad(flat, (0, size * ranks - flat.numel()))
    return nn.Parameter(flat[rank * size :][:size].clone().to(device))


def gather(shard: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole layer's weight and bias, put together from all ranks' shards."""
    whole = shard.new_empty(shard.numel() * dist.get_world_size())
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)  # into the parts of `whole`
    return whole[: WIDTH * WIDTH].view(WIDTH, WIDTH), whole[WIDTH * WIDTH :][:WIDTH]


class ShardedLinear(torch.autograd.Function):
    """A linear layer of which each rank keeps a shard."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, shard: Tensor) -> Tensor:
        weight, bias = gather(shard)
        ctx.save_for_backward(x, shard)  # not the weight: keeping it would keep every layer whole until backward
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = ctx.saved_tensors
        weight, _ = gather(shard)  # the same weights: no rank has updated them yet
        whole = shard.new_zeros(shard.numel() * dist.get_world_size())
        whole[: WIDTH * WIDTH] = (gradient.T @ x).flatten()
        whole[WIDTH * WIDTH :][:WIDTH] = gradient.sum(0)
        mine = torch.empty_like(shard)
        # Each rank gets its shard of the sum over ranks.
        dist.reduce_scatter(mine, list(whole.chunk(dist.get_world_size())))
        return gradient @ weight, mine


def train(rank: int, ranks: int) -> dict[str, object]:
    device = choose_device(rank, ranks)
    # The layers are built whole first, so that the initial values are those of one process.
    shards = [cut(layer, rank, ranks, device) for layer in make_layers()]
    optimizer = make_optimizer(shards)
    losses = []
    for step in range(STEPS):
        x, y = (tensor[rank::ranks].to(device) for tensor in make_batch(step))  # samples of its own
        optimizer.zero_grad()
        for shard in shards:
            x = torch.tanh(ShardedLinear.apply(x, shard))
        loss = (x - y).square().sum() / (GLOBAL_BATCH * WIDTH)  # a sum, divided by the global count
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)  # only for the output: the training does not need the other ranks' losses
    kept = [*shards, *(s.grad for s in shards), *(optimizer.state[s]["momentum_buffer"] for s in shards)]
    return {"losses": total.cpu(), "shards": [s.detach().cpu() for s in shards], "bytes": sum(t.nbytes for t in kept)}


def train_alone() -> tuple[Tensor, list[nn.Linear], int]:
    layers = make_layers()
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = make_optimizer(parameters)
    losses = []
    for step in range(STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        for layer in layers:
            x = torch.tanh(layer(x))
        loss = (x - y).square().sum() / (GLOBAL_BATCH * WIDTH)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    kept = [*parameters, *(p.grad for p in parameters), *(optimizer.state[p]["momentum_buffer"] for p in parameters)]
    return torch.stack(losses), layers, sum(tensor.nbytes for tensor in kept)


if __name__ == "__main__":
    found = run_ranks(train, RANKS)
    losses, layers, replica = train_alone()
    layer = sum(p.nbytes for p in layers[0].parameters())
    size = sum(p.numel() for p in layers[0].parameters())
    print("weights, gradients and momentum, in bytes")
    print(f"a full replica    {replica:9,}")
    for rank, result in enumerate(found):
        share = f"1/{replica / result['bytes']:.2f} of a replica"
        print(f"rank {rank}            {result['bytes']:9,}   {share}")
    print(f"temporarily       {2 * layer:9,}   one full layer; in backward, also its full gradient")
    shards = zip(*(result["shards"] for result in found), strict=True)
    ours = flatten(flatten(parts)[:size] for parts in shards)  # without the zeros at the end
    alone = flatten(p for one in layers for p in one.parameters())
    sys.exit(compare({"losses": (losses, found[0]["losses"]), "weights": (alone, ours)}))
