"""Are the replicas still equal? A cheap check every K steps that names the first parameter that differs."""

import torch
from torch import Tensor, nn

from paceline.errors import DesyncError
from paceline.world import World


def check_replicas(model: nn.Module, *, world: World, step: int) -> None:
    """Compare a checksum of every parameter's bits over the ranks.

    Raises:
        DesyncError: a parameter differs; the first one is named, with the ranks that hold the other value.
    """
    if world.world_size == 1:
        return
    named = list(model.named_parameters())
    mine = torch.stack([_checksum(p.detach()) for _, p in named])
    highest, lowest = mine.clone(), mine.clone()
    world.all_reduce(highest, op="max")
    world.all_reduce(lowest, op="min")
    differing = torch.nonzero(highest != lowest).reshape(-1).tolist()
    if not differing:
        return
    first = differing[0]
    values = world.gather_json(int(mine[first]))
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    raise DesyncError(
        f"at step {step} the replicas are no longer equal: {named[first][0]} differs on rank "
        f"{', '.join(map(str, others))} from rank 0 ({len(differing)} of {len(named)} parameters differ).",
        cause="code that changes weights on some ranks only, or an optimizer whose options or draws are a rank's own",
        hint="look for `if rank == 0:` around anything that writes to the model",
    )


def _checksum(tensor: Tensor) -> Tensor:
    """A sum of the raw bits modulo 2^64: equal for equal bits, cheap, in the tensor's own memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = flat[:whole].view(torch.int64).sum() if whole else torch.zeros((), dtype=torch.int64, device=tensor.device)
    return total + flat[whole:].to(torch.int64).sum()
