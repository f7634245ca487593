"""Copies of a weight that differ between ranks, and the search for the wrong one.

If three or more ranks have a copy, the majority shows which one is wrong. With two ranks, the run stores one element
whose copies differ, restarts from a checkpoint in which the copies were equal, and computes the step again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.trainer.setup.build_training_setup import TrainingSetup

_CLEAR_FACTOR = 2.0
_MAX_ELEMENTS = 1 << 26  # of the copies of a tensor that every rank receives


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
    if max(torch.Size(spec.shape).numel() for spec in specs) * world.world_size > _MAX_ELEMENTS:
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
        first = gathered[ranks[0]].view(torch.int64)  # the bits, because NaN differs from itself
        for rank in ranks[1:]:
            different = torch.nonzero(gathered[rank].view(torch.int64) != first).reshape(-1)
            if len(different):
                index = int(different[0])
                values = {str(other): float(gathered[other][index]) for other in ranks}
                return DifferingCopies(step=step, name=name, index=index, values=values)
    return None


def name_wrong_copy(setup: TrainingSetup, copies: DifferingCopies) -> str:
    """Return a line that names the rank whose copy was wrong, after the step was computed again.

    The wrong copy is the one that is much further from the new value than the others: the gradients of a wrong copy
    change the others too. Every rank must call this.
    """
    local_tensor = setup.weights.local_tensors.get(copies.name)
    value = None
    if str(setup.site.rank) in copies.values and local_tensor is not None and local_tensor.tensor is not None:
        value = float(local_tensor.tensor.detach().reshape(-1)[copies.index])
    recomputed = next((v for v in setup.site.gather_json(value) if v is not None), None)
    if recomputed is None:
        return ""
    values = ", ".join(f"{copy:.9g} on rank {rank}" for rank, copy in copies.values.items())
    element = f"an element was {values}, and is {recomputed:.9g} now"
    wrong_rank = find_wrong_copy(copies.values, recomputed)
    if wrong_rank is None:
        return f"step {copies.step} was computed again: the copies of {copies.name} are equal now ({element})"
    return (
        f"step {copies.step} was computed again: rank {wrong_rank} had a wrong copy of {copies.name} ({element}). "
        "If this happens again on the same machine, test its memory"
    )


def find_wrong_copy(values: Mapping[str, float], recomputed: float) -> str | None:
    """Return the rank whose value is at least twice as far from `recomputed` as any other, or None."""
    distances = {rank: abs(value - recomputed) for rank, value in values.items()}
    distances = {rank: math.inf if math.isnan(distance) else distance for rank, distance in distances.items()}
    *_, second, largest = sorted(distances, key=lambda rank: distances[rank])
    is_clear = distances[largest] > _CLEAR_FACTOR * distances[second] and distances[second] < math.inf
    return largest if is_clear else None
