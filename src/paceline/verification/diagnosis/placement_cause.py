"""Find placement faults in a wrong gradient: partial sums, unequal copies, moved rows, a stage without gradients.

A placement has invariants that hold for any samples: copies of one tensor along an axis are equal; partial sums on the
ranks of an axis add up to the full sum; rows keep their positions. Each invariant is checked on the observed gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.tensor_distance import euclidean_distance, to_double

_RESIDUAL_SHARE = 1e-3  # an explanation may leave this share of the error
_MAX_ROWS = 512  # moved rows are looked for in tensors with at most this many
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GradientCase:
    """The gradients of one step in one process (`expected`) and in each copy of the model, with their noise floors."""

    rank_names: RankNames
    expected: Tensors
    copies: Sequence[Tensors]
    differing_names: Sequence[str]
    floors: Mapping[str, float]

    def is_close(self, one: Tensor, other: Tensor, name: str, error: float) -> bool:
        """Return True if two tensors differ by noise, or by little compared with the error to explain (a norm)."""
        return euclidean_distance(one, other) <= max(self.floors.get(name, 0.0), _RESIDUAL_SHARE * error)

    def rank_shards(self, name: str) -> dict[int, Tensor]:
        """Return each rank's shard of the gradient."""
        return self.rank_names.rank_shards(name, self.copies, like=self.expected[name])

    def wrong_ranks(self, name: str) -> list[int]:
        """Return the ranks whose shard is wrong."""
        expected, floor = self.expected[name], self.floors.get(name, 0.0)
        return [
            rank
            for rank, value in self.rank_shards(name).items()
            if not euclidean_distance(value, self.rank_names.rank_shard(name, expected, rank)) <= floor
        ]


def placement_cause(case: GradientCase) -> tuple[str, str] | None:
    """Return a parameter and the fault that the placement of its gradient shows; None if no fault is found."""
    names = [name for name in case.differing_names if name in case.expected]
    if not names:
        return None
    return (
        _find_missing_gradient(case, names)
        or _find_unsummed_axis(case, names)
        or _find_unequal_copies(case, names)
        or _find_moved_rows(case, names)
    )


def _find_missing_gradient(case: GradientCase, differing: Sequence[str]) -> tuple[str, str] | None:
    """Find a block without a gradient, because it did not run, or a stage without gradients, because none came back."""
    rank_names = case.rank_names
    if rank_names.mesh.pp == 1:
        return None
    empty = [name for name in differing if not any(float(v.abs().sum()) for v in case.rank_shards(name).values())]
    empty = [name for name in case.expected if name in empty and float(case.expected[name].abs().sum())]
    if not empty or len(empty) == len(case.expected):
        return None
    name, holders = empty[0], rank_names.holders(empty[0])
    location = rank_names.name_ranks(holders, all_ranks=range(rank_names.mesh.ranks))
    stage_names = [n for n in case.expected if set(rank_names.holders(n)) == set(holders)]
    if set(stage_names) <= set(empty):
        cause = f"no parameter on {location} has a gradient: nothing, or zeros, came back over the stage border"
    else:
        block = _common_module(empty)
        cause = (
            f"{block} has no gradient on {location}: the stage did not run it (skipped at its border), or detached it"
        )
    return name, f"{cause} ({len(empty)} of {len(case.expected)} parameters)"


def _find_unsummed_axis(case: GradientCase, differing: Sequence[str]) -> tuple[str, str] | None:
    """Find an axis whose ranks hold partial gradients of the same elements, which add up to the correct gradient.

    An axis that explains all differing parameters is preferred. If there is none, the axis must explain the last
    differing parameter in the model's order, because this is the first wrong gradient that backward computes.
    """
    last = next(name for name in reversed(list(case.expected)) if name in differing)
    for axis in case.rank_names.mesh.split_axes:
        if axis == "ep" or not all(_adds_up(case, name, axis) for name in differing):
            continue
        share = f"{len(differing)} of {len(case.expected)} parameters"
        return differing[0], f"{_describe_partial(case, differing[0], axis)} ({share})"
    for axis in case.rank_names.mesh.split_axes:
        if axis != "ep" and _adds_up(case, last, axis):
            num_earlier = len(differing) - 1
            return last, (
                f"{_describe_partial(case, last, axis)}; {num_earlier} more differ, all earlier in the model, as a "
                "consequence"
            )
    return None


def _describe_partial(case: GradientCase, name: str, axis: str) -> str:
    group = case.rank_names.equal_shard_groups(name, axis)[0]
    tied = ", which both hold it (tied)" if axis == "pp" else ""
    return (
        f"only a part of its gradient is on each of {case.rank_names.describe_axis_group(axis, group)}{tied}, and the "
        f"parts add up to the right one: it was not summed over {axis if axis != 'pp' else 'the stages (pp)'}"
    )


def _adds_up(case: GradientCase, name: str, axis: str) -> bool:
    """Return True if the gradients on the ranks along this axis add up to the correct gradient of the parameter."""
    groups = case.rank_names.equal_shard_groups(name, axis)
    if not groups:
        return False
    rank_shards = case.rank_shards(name)
    for group in groups:
        expected = case.rank_names.rank_shard(name, case.expected[name], group[0])
        total = torch.stack([to_double(rank_shards[rank]) for rank in group]).sum(0)
        error = max(euclidean_distance(rank_shards[rank], expected) for rank in group)
        if not case.is_close(total, expected, name, error):
            return False
    return True


def _find_unequal_copies(case: GradientCase, differing: Sequence[str]) -> tuple[str, str] | None:
    """Find copies of one tensor that are not equal, and the axis along which they differ."""
    for name in differing:
        rank_shards, wrong = case.rank_shards(name), set(case.wrong_ranks(name))
        for axis in case.rank_names.mesh.split_axes:
            for group in case.rank_names.equal_shard_groups(name, axis) if axis != "ep" else ():
                correct_ranks = [rank for rank in group if rank not in wrong]
                wrong_ranks = [rank for rank in group if rank in wrong]
                if correct_ranks and wrong_ranks:
                    holders = case.rank_names.holders(name)
                    cause = (
                        f"right on {case.rank_names.name_ranks(correct_ranks, all_ranks=holders)} but not on "
                        f"{case.rank_names.name_ranks(wrong_ranks, all_ranks=holders)}, which "
                        f"hold the same tensor{' (tied)' if axis == 'pp' else ''}: copies along {axis} must be equal; "
                        "on the wrong ranks, the gradient was not summed, or not distributed"
                    )
                    return name, f"{cause} ({len(differing)} of {len(case.expected)} parameters)"
                if (
                    any(not torch.equal(rank_shards[rank], rank_shards[group[0]]) for rank in group)
                    and not correct_ranks
                ):
                    spread = max(euclidean_distance(rank_shards[rank], rank_shards[group[0]]) for rank in group)
                    if spread <= case.floors.get(name, 0.0):
                        continue
                    last = next(n for n in reversed(list(case.expected)) if n in differing)
                    return last, (
                        f"{case.rank_names.describe_axis_group(axis, group)} hold the same tensors with gradients that "
                        f"differ: a value that is partial on each is not summed over {axis}; backward, "
                        f"which starts at the last parameter, is wrong from {last} on ({len(differing)} of "
                        f"{len(case.expected)} parameters)"
                    )
    return None


def _find_moved_rows(case: GradientCase, differing: Sequence[str]) -> tuple[str, str] | None:
    """Find a rank's shard that has the correct rows in a different order."""
    name, expected = differing[0], case.expected[differing[0]]
    wrong = case.wrong_ranks(name)
    if not wrong or len(differing) == len(case.expected) or expected.dim() == 0:
        return None
    shard = case.rank_shards(name)[wrong[0]]
    expected_shard = case.rank_names.rank_shard(name, expected, wrong[0])
    rows = len(expected_shard)
    if rows < 2 or rows > _MAX_ROWS or shard.shape != expected_shard.shape:
        return None
    error, location = (
        euclidean_distance(shard, expected_shard),
        case.rank_names.describe(wrong, all_ranks=case.rank_names.holders(name)),
    )
    for shift in [sign * size for size in range(1, min(4, rows)) for sign in (1, -1)]:
        if case.is_close(shard.roll(-shift, 0), expected_shard, name, error):
            text = f"its rows are the right ones shifted by {shift}: off by {'one' if abs(shift) == 1 else abs(shift)}"
            return name, f"{text}{location} ({len(differing)} of {len(case.expected)}: {', '.join(differing[:3])})"
    flat, target = to_double(shard).reshape(rows, -1), to_double(expected_shard).reshape(rows, -1)
    nearest = torch.cdist(flat, target).argmin(1)
    if len(set(nearest.tolist())) == rows and case.is_close(target[nearest], flat, name, error):
        moved = [row for row, other in enumerate(nearest.tolist()) if row != other]
        text = f"its rows are permuted (row {moved[0]} holds what row {int(nearest[moved[0]])} should)"
        return name, f"{text}{location} ({len(differing)} of {len(case.expected)}: {', '.join(differing[:3])})"
    return None


def _common_module(names: Sequence[str]) -> str:
    """Return the innermost module that contains all of these parameters."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or names[0]
