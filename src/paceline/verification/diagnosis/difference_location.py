"""Descriptions of where a difference lies; empty if it is everywhere."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.verification.diagnosis.placement_cause import GradientCase
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.tensor_distance import euclidean_distance


def of_owners(microbatches: Sequence[int], *, replicas: int, places: RankNames | None) -> str:
    """Return the ranks that run these microbatches, in words; empty if all do."""
    owners = sorted({index % max(replicas, 1) for index in microbatches})
    if not owners or len(owners) == replicas:
        return ""
    if places is None or places.is_replicas:
        return f", on rank {', '.join(map(str, owners))}"
    return f", on {' and '.join(places.replica(owner) for owner in owners)}"


def of_gradients(case: GradientCase | None, *, names: Sequence[str], wrong: Sequence[int], copies: int) -> str:
    """Return the ranks whose gradients of `names` differ, in words.

    `wrong` are the copies that differ; without a case these are ranks.
    """
    if case is None or case.places.is_replicas:
        return f", on rank {', '.join(map(str, wrong))}" if len(wrong) < copies else ""
    known = [name for name in names if name in case.right]
    ranks = {rank for name in known for rank in case.wrong(name)}
    return case.places.words(ranks, of={rank for name in known for rank in case.places.holders(name)})


def of_copy(name: str, copy: int, *, places: RankNames | None) -> str:
    """Return the ranks that hold a copy of a tensor, in words."""
    if places is None:
        return f"rank {copy}"
    copies = places.holding.copies(name)
    ranks = sorted(copies[copy] if copy < len(copies) else copies[0])
    return places.named(ranks, of=places.holders(name))


def of_weights(places: RankNames, name: str, found: Tensor, wanted: Tensor, *, copy: int) -> str:
    """Return the ranks of a copy whose own part of a weight differs, in words."""
    copies = places.holding.copies(name)
    ranks = sorted(copies[copy] if copy < len(copies) else copies[0])
    wrong = [r for r in ranks if not torch.equal(places.piece(name, found, r), places.piece(name, wanted, r))]
    floor = 1e-3 * euclidean_distance(found, wanted)
    far = [r for r in wrong if euclidean_distance(places.piece(name, found, r), places.piece(name, wanted, r)) > floor]
    return places.words(far or wrong, of=range(places.mesh.ranks))


def worst_first(bad: Sequence[Sequence[str]]) -> list[str]:
    """Return every name that differs in some copy, as the first copy that has it orders them."""
    place = {name: number for names in reversed(bad) for number, name in enumerate(names)}
    order: Callable[[str], int] = place.__getitem__
    return sorted(place, key=order)
