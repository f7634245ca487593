"""Are the replicas still equal? A cheap check every K steps that names the first parameter that differs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import DesyncError
from paceline.step.update import Ema
from paceline.world import World

_AVERAGE = "the average (ema) of "


@dataclass(frozen=True, kw_only=True)
class Apart:
    """What differs: the first of `num` tensors of `total`, on these ranks from rank 0."""

    name: str
    ranks: list[int]
    num: int
    total: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name} differs on rank {ranks} from rank 0 ({self.num} of {self.total} tensors differ)"


def check_replicas(model: nn.Module, *, world: World, step: int, ema: Ema | None = None) -> None:
    """Compare a checksum of the bits of every parameter, and of its average, over the ranks.

    Raises:
        DesyncError: one differs; the first one is named, with the ranks that hold the other value.
    """
    apart = first_apart(model, world=world, ema=ema)
    if apart is None:
        return
    average = ema is not None and apart.name.startswith(_AVERAGE)
    raise DesyncError(
        f"at step {step} the replicas are no longer equal: {apart}.",
        cause="an ema= that depends on the rank"
        if average
        else "code that changes weights on some ranks only, or an optimizer whose options or draws are a rank's own",
        hint="ema=the same number on every rank"
        if average
        else "look for `if rank == 0:` around anything that writes to the model",
    )


def first_apart(model: nn.Module, *, world: World, ema: Ema | None = None) -> Apart | None:
    """What is not the same on every rank; every rank calls this and has the same answer."""
    if world.world_size == 1:
        return None
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    if ema is not None:
        named += list(zip(averaged(ema.names), ema.averages, strict=True))
    mine = torch.stack([_checksum(tensor) for _, tensor in named])
    highest, lowest = mine.clone(), mine.clone()
    world.all_reduce(highest, op="max")
    world.all_reduce(lowest, op="min")
    differing = torch.nonzero(highest != lowest).reshape(-1).tolist()
    if not differing:
        return None
    values = world.gather_json(int(mine[differing[0]]))
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    return Apart(name=named[differing[0]][0], ranks=others, num=len(differing), total=len(named))


def averaged(names: list[str]) -> list[str]:
    """What the averages of these parameters are called."""
    return [f"{_AVERAGE}{name}" for name in names]


def _checksum(tensor: Tensor) -> Tensor:
    """A sum of the raw bits modulo 2^64: equal for equal bits, cheap, in the tensor's own memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = flat[:whole].view(torch.int64).sum() if whole else torch.zeros((), dtype=torch.int64, device=tensor.device)
    return total + flat[whole:].to(torch.int64).sum()
