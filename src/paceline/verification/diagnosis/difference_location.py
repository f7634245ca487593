"""Describe, at the end of a message, on which ranks a difference was found; an empty text means all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.verification.diagnosis.placement_cause import GradientCase
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.tensor_distance import euclidean_distance


def describe_owners(microbatches: Sequence[int], *, replicas: int, rank_names: RankNames | None) -> str:
    """Return text that names the ranks that run these microbatches; empty if they are all ranks."""
    owners = sorted({index % max(replicas, 1) for index in microbatches})
    if not owners or len(owners) == replicas:
        return ""
    if rank_names is None or rank_names.has_only_replicas:
        return f", on rank {', '.join(map(str, owners))}"
    return f", on {' and '.join(rank_names.replica_name(owner) for owner in owners)}"


def describe_gradient_ranks(
    case: GradientCase | None, *, names: Sequence[str], wrong_copies: Sequence[int], copies: int
) -> str:
    """Return text that names the ranks whose gradients of `names` differ.

    `wrong_copies` are the indices of the model's copies that differ, out of `copies`. If `case` is None, each rank has
    its own copy.
    """
    if case is None or case.rank_names.has_only_replicas:
        return f", on rank {', '.join(map(str, wrong_copies))}" if len(wrong_copies) < copies else ""
    names_in_reference = [name for name in names if name in case.expected]
    ranks = {rank for name in names_in_reference for rank in case.wrong_ranks(name)}
    return case.rank_names.describe(
        ranks, all_ranks={rank for name in names_in_reference for rank in case.rank_names.holders(name)}
    )


def describe_copy(name: str, copy: int, *, rank_names: RankNames | None) -> str:
    """Return text that names the ranks that hold one copy of a tensor."""
    if rank_names is None:
        return f"rank {copy}"
    copies = rank_names.sharded.copy_ranks(name)
    ranks = sorted(copies[copy] if copy < len(copies) else copies[0])
    return rank_names.name_ranks(ranks, all_ranks=rank_names.holders(name))


def describe_weight_ranks(rank_names: RankNames, name: str, weight: Tensor, expected: Tensor, *, copy: int) -> str:
    """Return text that names the ranks of one copy whose shard of a weight differs."""
    copies = rank_names.sharded.copy_ranks(name)
    ranks = sorted(copies[copy] if copy < len(copies) else copies[0])
    differing = [
        r
        for r in ranks
        if not torch.equal(rank_names.rank_shard(name, weight, r), rank_names.rank_shard(name, expected, r))
    ]
    # a rank with a tiny part of the difference is named only if no rank has more
    floor = 1e-3 * euclidean_distance(weight, expected)
    beyond_floor = [
        r
        for r in differing
        if euclidean_distance(rank_names.rank_shard(name, weight, r), rank_names.rank_shard(name, expected, r)) > floor
    ]
    return rank_names.describe(beyond_floor or differing, all_ranks=range(rank_names.mesh.ranks))


def sort_by_severity(names_by_copy: Sequence[Sequence[str]]) -> list[str]:
    """Merge the lists of differing names of all copies, each sorted worst first, into one list.

    A name is sorted by its position in the list of the first copy that has it.
    """
    position_by_name = {name: number for names in reversed(names_by_copy) for number, name in enumerate(names)}
    order: Callable[[str], int] = position_by_name.__getitem__
    return sorted(position_by_name, key=order)
