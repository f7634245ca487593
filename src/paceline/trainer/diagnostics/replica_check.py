"""A cheap check every K steps that replicas are still equal; it names the first parameter that differs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import DesyncError
from paceline.parallel.module_access.tensor_access import bits_checksum
from paceline.trainer.local_sgd_state import sites_of
from paceline.trainer.setup.build_training_setup import TrainingSetup

_AVERAGE = "the average (ema) of "
_NOTHING = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """The first of `num_differing` tensors out of `num_tensors`, and the ranks where it differs from rank 0."""

    name: str
    ranks: list[int]
    num: int
    total: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name} differs on rank {ranks} from rank 0 ({self.num} of {self.total} tensors differ)"


def check_replicas(built: TrainingSetup, *, step: int) -> None:
    """Compare a checksum of the bits of every parameter, and of its average, over the ranks.

    Raises:
        DesyncError: a tensor differs; the error names the first one and the ranks that differ from rank 0.
    """
    sites = sites_of(built)
    outer = None if sites is None else sites.differing()
    if outer is not None:
        raise DesyncError(
            f"at step {step} the sites have agreed on different weights: {outer} differs between them.",
            cause="code that changes weights on some sites only, or damaged messages",
            hint="--update sync, which reports what differs where",
        )
    apart = first_apart(built)
    if apart is None:
        return
    average = apart.name.startswith(_AVERAGE)
    raise DesyncError(
        f"at step {step} the replicas are no longer equal: {apart}.",
        cause="an ema= that depends on the rank"
        if average
        else "code that changes weights on some ranks only, or an optimizer whose options or random "
        "numbers depend on the rank",
        hint="ema=the same number on every rank"
        if average
        else "look for `if rank == 0:` around anything that writes to the model",
    )


def first_apart(built: TrainingSetup) -> ReplicaMismatch | None:
    """Return the first tensor that differs between ranks that hold it. Every rank must call this; results are equal."""
    world, ema = built.site, built.update.ema
    if world.world_size == 1:
        return None
    weights = built.weights
    named = [(name, held.tensor) for name, held in weights.mine.items() if name in weights.parameters]
    if ema is not None:
        averages = dict(zip(ema.names, ema.averages, strict=True))
        named += [(f"{_AVERAGE}{name}", averages.get(name)) for name, _ in named]
    mine = torch.stack([bits_checksum(tensor) if tensor is not None else _NOTHING for _, tensor in named])
    if not weights.is_whole:
        return _apart_in_parts(built, [name for name, _ in named], mine)
    highest, lowest = mine.clone(), mine.clone()
    world.all_reduce(highest, op="max")
    world.all_reduce(lowest, op="min")
    differing = torch.nonzero(highest != lowest).reshape(-1).tolist()
    if not differing:
        return None
    values = world.gather_json(int(mine[differing[0]]))
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    return ReplicaMismatch(name=named[differing[0]][0], ranks=others, num=len(differing), total=len(named))


def _apart_in_parts(built: TrainingSetup, names: list[str], mine: Tensor) -> ReplicaMismatch | None:
    """Compare shards: ranks that hold the same boxes of a tensor must hold the same values."""
    everybody = built.site.gather_json(mine.tolist())
    found: list[tuple[str, list[int]]] = []
    for place, name in enumerate(names):
        first: dict[object, int] = {}
        others = []
        for rank, part in enumerate(built.weights.parts(name.removeprefix(_AVERAGE))):
            value = everybody[rank][place]
            if part.boxes and first.setdefault(part.boxes, value) != value:
                others.append(rank)
        if others:
            found.append((name, others))
    return ReplicaMismatch(name=found[0][0], ranks=found[0][1], num=len(found), total=len(names)) if found else None


def averaged_names(names: list[str]) -> list[str]:
    """Return the names that the averages of these parameters have."""
    return [f"{_AVERAGE}{name}" for name in names]
