"""Copies of a weight that differ between ranks, and the search for the wrong one.

If three or more ranks have a copy, the majority shows which one is wrong. With two ranks, the run stores one element
whose copies differ, restarts from a checkpoint in which the copies were equal, and computes the step again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.trainer.setup.build_training_setup import TrainingSetup

_MAX_ELEMENTS = 1 << 24  # of a tensor that every rank sends to every other rank


@dataclass(frozen=True, kw_only=True)
class DifferingCopies:
    """An element of a weight that has different values on different ranks.

    `index` is its place in the flat local tensor. `values` are the copies by rank; the keys are text, as in JSON.
    """

    step: int
    name: str
    index: int
    values: Mapping[str, float]

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> "DifferingCopies | None":
        """Return the copies from their JSON form, or None."""
        return None if value is None else DifferingCopies(**value)


def read_differing_copies(setup: TrainingSetup, name: str, *, step: int) -> DifferingCopies | None:
    """Return the first element of a weight whose copies differ between ranks. Every rank must call this.

    Return None if the tensor is so large that its copies should not be sent.
    """
    world, specs = setup.site, setup.weights.shard_specs(name)
    if max(torch.Size(spec.shape).numel() for spec in specs) > _MAX_ELEMENTS:
        return None
    local_tensor = setup.weights.local_tensors[name].tensor if name in setup.weights.local_tensors else None
    local = torch.zeros(0) if local_tensor is None else local_tensor.detach()
    flat = local.to(world.device, torch.float64).reshape(-1)
    sizes = world.gather_json(flat.numel())
    gathered = world.all_gather(flat, shapes=[(size,) for size in sizes])
    ranks_by_shard: dict[object, list[int]] = {}
    for rank, spec in enumerate(specs):
        if sizes[rank]:
            ranks_by_shard.setdefault(spec.boxes, []).append(rank)
    for ranks in ranks_by_shard.values():
        first = gathered[ranks[0]]
        for rank in ranks[1:]:
            different = torch.nonzero(gathered[rank] != first).reshape(-1)
            if len(different):
                index = int(different[0])
                values = {str(other): float(gathered[other][index]) for other in ranks}
                return DifferingCopies(step=step, name=name, index=index, values=values)
    return None


def name_wrong_copy(setup: TrainingSetup, copies: DifferingCopies) -> str:
    """Return a line that names the rank whose copy was wrong, after the step was computed again.

    The wrong copy is the one with the largest distance from the new value. Every rank must call this.
    """
    local_tensor = setup.weights.local_tensors.get(copies.name)
    value = None
    if str(setup.site.rank) in copies.values and local_tensor is not None and local_tensor.tensor is not None:
        value = float(local_tensor.tensor.detach().reshape(-1)[copies.index])
    recomputed = next((v for v in setup.site.gather_json(value) if v is not None), None)
    if recomputed is None:
        return ""
    distances = {rank: abs(copy - recomputed) for rank, copy in copies.values.items()}
    wrong_rank = max(distances, key=lambda rank: distances[rank])
    others = ", ".join(f"{copy:.9g} on rank {rank}" for rank, copy in copies.values.items() if rank != wrong_rank)
    return (
        f"step {copies.step} was computed again: rank {wrong_rank} had a wrong copy of {copies.name} "
        f"(an element was {copies.values[wrong_rank]:.9g} on rank {wrong_rank} and {others}; it is {recomputed:.9g}). "
        "If this happens again on the same machine, test its memory."
    )
