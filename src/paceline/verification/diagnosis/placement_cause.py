"""Diagnosis of a wrong gradient from its placement: parts that were not summed, moved rows, a stage without gradients.

A placement has invariants that hold for any samples: copies of one tensor along an axis are equal; partial values of
the ranks of an axis add up to the whole; rows keep their positions. Each is checked against the gradients found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.tensor_distance import euclidean_distance, to_double

_LEFT_OVER = 1e-3
_MOST_ROWS = 512
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GradientCase:
    """The gradients of one step: the right ones, every copy's, the names that differ and their noise floors."""

    places: RankNames
    right: Tensors
    copies: Sequence[Tensors]
    bad: Sequence[str]
    floors: Mapping[str, float]

    def close(self, one: Tensor, other: Tensor, name: str, error: float) -> bool:
        """Return True if the two differ by noise, or by little compared with the error to explain."""
        return euclidean_distance(one, other) <= max(self.floors.get(name, 0.0), _LEFT_OVER * error)

    def pieces(self, name: str) -> dict[int, Tensor]:
        """Return each rank's part of the gradient."""
        return self.places.pieces(name, self.copies, like=self.right[name])

    def wrong(self, name: str) -> list[int]:
        """Return the ranks whose own part is wrong."""
        right, floor = self.right[name], self.floors.get(name, 0.0)
        return [
            rank
            for rank, value in self.pieces(name).items()
            if not euclidean_distance(value, self.places.piece(name, right, rank)) <= floor
        ]


def placing_cause(case: GradientCase) -> tuple[str, str] | None:
    """Return the parameter to name and the fault that its placement shows; None if it shows nothing."""
    known = [name for name in case.bad if name in case.right]
    if not known:
        return None
    return _nothing_came(case, known) or _not_summed(case, known) or _apart(case, known) or _moved_rows(case, known)


def _nothing_came(case: GradientCase, bad: Sequence[str]) -> tuple[str, str] | None:
    """Find a block without a gradient, which was not run, or a stage without any, which received none back."""
    places = case.places
    if places.mesh.pp == 1:
        return None
    empty = [name for name in bad if not any(float(v.abs().sum()) for v in case.pieces(name).values())]
    empty = [name for name in case.right if name in empty and float(case.right[name].abs().sum())]
    if not empty or len(empty) == len(case.right):
        return None
    name, holders = empty[0], places.holders(empty[0])
    where = places.named(holders, of=range(places.mesh.ranks))
    here = [n for n in case.right if set(places.holders(n)) == set(holders)]
    if set(here) <= set(empty):
        cause = f"no parameter on {where} has a gradient: nothing, or zeros, came back over the stage border"
    else:
        block = _common(empty)
        cause = f"{block} has no gradient on {where}: the stage did not run it (skipped at its border), or detached it"
    return name, f"{cause} ({len(empty)} of {len(case.right)} parameters)"


def _not_summed(case: GradientCase, bad: Sequence[str]) -> tuple[str, str] | None:
    """Find an axis whose ranks hold partial gradients of the same elements that add up to the right gradient.

    If not all differing parameters do so, the last in the model's order may: backward is right up to there.
    """
    last = next(name for name in reversed(list(case.right)) if name in bad)
    for axis in case.places.mesh.split:
        if axis == "ep" or not all(_adds_up(case, name, axis) for name in bad):
            continue
        share = f"{len(bad)} of {len(case.right)} parameters"
        return bad[0], f"{_part_text(case, bad[0], axis)} ({share})"
    for axis in case.places.mesh.split:
        if axis != "ep" and _adds_up(case, last, axis):
            before = len(bad) - 1
            return last, (
                f"{_part_text(case, last, axis)}; {before} more differ, all earlier in the model, as a consequence"
            )
    return None


def _part_text(case: GradientCase, name: str, axis: str) -> str:
    group = case.places.alike(name, axis)[0]
    tied = ", which hold it both (tied)" if axis == "pp" else ""
    return (
        f"its gradient is a part on each of {case.places.along(axis, group)}{tied}, and the parts add up to the right "
        f"one: it was not summed over {axis if axis != 'pp' else 'the stages (pp)'}"
    )


def _adds_up(case: GradientCase, name: str, axis: str) -> bool:
    groups = case.places.alike(name, axis)
    if not groups:
        return False
    pieces = case.pieces(name)
    for group in groups:
        wanted = case.places.piece(name, case.right[name], group[0])
        total = torch.stack([to_double(pieces[rank]) for rank in group]).sum(0)
        error = max(euclidean_distance(pieces[rank], wanted) for rank in group)
        if not case.close(total, wanted, name, error):
            return False
    return True


def _apart(case: GradientCase, bad: Sequence[str]) -> tuple[str, str] | None:
    """Find copies of one tensor that are not equal, and the axis along which they differ."""
    for name in bad:
        pieces, wrong = case.pieces(name), set(case.wrong(name))
        for axis in case.places.mesh.split:
            for group in case.places.alike(name, axis) if axis != "ep" else ():
                right = [rank for rank in group if rank not in wrong]
                odd = [rank for rank in group if rank in wrong]
                if right and odd:
                    of = case.places.holders(name)
                    cause = (
                        f"right on {case.places.named(right, of=of)} but not on {case.places.named(odd, of=of)}, which "
                        f"hold the same tensor{' (tied)' if axis == 'pp' else ''}: copies along {axis} must be equal; "
                        "there its gradient was not summed, or not distributed"
                    )
                    return name, f"{cause} ({len(bad)} of {len(case.right)} parameters)"
                if any(not torch.equal(pieces[rank], pieces[group[0]]) for rank in group) and not right:
                    spread = max(euclidean_distance(pieces[rank], pieces[group[0]]) for rank in group)
                    if spread <= case.floors.get(name, 0.0):
                        continue
                    last = next(n for n in reversed(list(case.right)) if n in bad)
                    return last, (
                        f"{case.places.along(axis, group)} hold the same tensors with gradients that differ: something "
                        f"that is a part on each is not summed over {axis}; {last} is the last in the model's order "
                        f"that differs, so backward is right up to there ({len(bad)} of {len(case.right)} parameters)"
                    )
    return None


def _moved_rows(case: GradientCase, bad: Sequence[str]) -> tuple[str, str] | None:
    """Find rows of a rank's part that are its right rows in other places."""
    name, right = bad[0], case.right[bad[0]]
    wrong = case.wrong(name)
    if not wrong or len(bad) == len(case.right) or right.dim() == 0:
        return None
    found = case.pieces(name)[wrong[0]]
    wanted = case.places.piece(name, right, wrong[0])
    rows = len(wanted)
    if rows < 2 or rows > _MOST_ROWS or found.shape != wanted.shape:
        return None
    error, where = euclidean_distance(found, wanted), case.places.words(wrong, of=case.places.holders(name))
    for by in [sign * size for size in range(1, min(4, rows)) for sign in (1, -1)]:
        if case.close(found.roll(-by, 0), wanted, name, error):
            text = f"its rows are the right ones shifted by {by}: off by {'one' if abs(by) == 1 else abs(by)}"
            return name, f"{text}{where} ({len(bad)} of {len(case.right)}: {', '.join(bad[:3])})"
    flat, target = to_double(found).reshape(rows, -1), to_double(wanted).reshape(rows, -1)
    nearest = torch.cdist(flat, target).argmin(1)
    if len(set(nearest.tolist())) == rows and case.close(target[nearest], flat, name, error):
        odd = [row for row, other in enumerate(nearest.tolist()) if row != other]
        text = f"its rows are permuted (row {odd[0]} holds what row {int(nearest[odd[0]])} should)"
        return name, f"{text}{where} ({len(bad)} of {len(case.right)}: {', '.join(bad[:3])})"
    return None


def _common(names: Sequence[str]) -> str:
    """Return the innermost module that contains all of these parameters."""
    parts = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or names[0]
