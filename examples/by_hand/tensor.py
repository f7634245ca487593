"""Tensor parallelism by hand: an MLP whose two weights are cut, the first by columns, the second by rows.

    python examples/by_hand/tensor.py

The MLP is `gelu(x @ A) @ B`. Cut A by columns: each rank computes some of the hidden features completely, so that
gelu needs no message. Cut B by rows to match: each rank multiplies its hidden features with its rows of
B, and the product is a term of the sum. One all-reduce adds the terms:

    gelu(x @ A) @ B  =  gelu(x @ A0) @ B0  +  gelu(x @ A1) @ B1  +  ...

Backward is the mirror image. Each rank knows the gradient of x only through its columns of A, so one all-reduce
adds these terms too. Two autograd functions call the all-reduces (f and g in Megatron-LM): each communicates in one
direction and passes values through in the other.

Messages: one activation in forward and its gradient in backward, for each MLP and microbatch. Memory: 1/ranks of the
MLP's weights and hidden features. Waiting: for both all-reduces.
"""

import sys

import torch
import torch.distributed as dist
from harness import choose_device, compare, flatten, run_ranks
from torch import Tensor, nn

RANKS, WIDTH, HIDDEN, STEPS, BATCH = 2, 32, 128, 5, 16
SENT = {"forward": 0, "backward": 0}  # all-reduces of this rank


class CopyToRanks(torch.autograd.Function):
    """The function before the column-parallel layer: forward changes nothing, backward adds the ranks' gradients."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        SENT["backward"] += 1
        return total


class SumOverRanks(torch.autograd.Function):
    """The function after the row-parallel layer: forward adds the ranks' terms, backward changes nothing."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, term: Tensor) -> Tensor:
        total = term.clone()
        dist.all_reduce(total)
        SENT["forward"] += 1
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class Block(nn.Module):
    """A linear layer that is not split, then an MLP with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)  # on every rank; its gradient needs the sum of `CopyToRanks`
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + self.down(nn.functional.gelu(self.up(x)))


class ParallelBlock(nn.Module):
    """This rank's part of the block. PyTorch keeps a weight as (outputs, inputs): the columns of A are its rows."""

    def __init__(self, block: Block, rank: int, ranks: int) -> None:
        super().__init__()
        self.before = block.before
        self.up_weight = nn.Parameter(block.up.weight.detach().chunk(ranks, dim=0)[rank].clone())
        self.up_bias = nn.Parameter(block.up.bias.detach().chunk(ranks)[rank].clone())
        self.down_weight = nn.Parameter(block.down.weight.detach().chunk(ranks, dim=1)[rank].clone())
        self.down_bias = block.down.bias  # whole

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        hidden = nn.functional.gelu(nn.functional.linear(CopyToRanks.apply(x), self.up_weight, self.up_bias))
        term = nn.functional.linear(hidden, self.down_weight)
        return x + SumOverRanks.apply(term) + self.down_bias  # the bias is added once, after the sum, not once per rank


def train(model: nn.Module, device: torch.device) -> Tensor:
    """Train a `Block` or a `ParallelBlock` with SGD, and return the losses.

    Every rank of a tensor-parallel group gets the same samples.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def make_block() -> Block:
    torch.manual_seed(0)
    return Block()


def train_part(rank: int, ranks: int) -> dict[str, object]:
    device = choose_device(rank, ranks)
    model = ParallelBlock(make_block(), rank, ranks).to(device)
    losses = train(model, device)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    gradients = {name: tensor.grad.cpu() for name, tensor in model.named_parameters()}
    return {"losses": losses, "weights": tensors, "gradients": gradients, "sent": SENT}


def join(parts: list[dict[str, Tensor]], rank: int) -> Tensor:
    """Join the parts in the order of `Block.parameters()`. Parameters that are not split come from `rank`."""
    whole = parts[rank]
    up = torch.cat([p["up_weight"] for p in parts], 0), torch.cat([p["up_bias"] for p in parts])
    down = torch.cat([p["down_weight"] for p in parts], 1), whole["down_bias"]
    return flatten([whole["before.weight"], whole["before.bias"], *up, *down])


if __name__ == "__main__":
    found = run_ranks(train_part, RANKS)
    for rank, result in enumerate(found):
        held = ", ".join(f"{n} {tuple(t.shape)}" for n, t in result["weights"].items() if t.dim() == 2)
        sent = ", ".join(f"{count / STEPS:g} {direction}" for direction, count in result["sent"].items())
        print(f"rank {rank}: {held}; all-reduces a step: {sent}")
    alone = make_block()
    rows = {"losses": (train(alone, torch.device("cpu")), found[0]["losses"])}
    gradients = flatten(p.grad for p in alone.parameters())
    for rank in range(RANKS):
        rows[f"weights {rank}"] = flatten(alone.parameters()), join([result["weights"] for result in found], rank)
        rows[f"last gradients {rank}"] = gradients, join([result["gradients"] for result in found], rank)
    sys.exit(compare(rows))
