"""The likely cause if gradients are right but weights or buffers after the update are not."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_SHAPE = 1e-3


def update_cause(*, before: Vector, found: Vector, wanted: Vector, num_bad: int, num_parameters: int) -> str:
    """Return why equal gradients gave weights `found` instead of `wanted`, both starting at `before`."""
    share = "every parameter" if num_bad == num_parameters else f"{num_bad} of {num_parameters}"
    moved, right = found - before, wanted - before
    if not np.any(moved):
        return (
            f"the optimizer does not update it: it holds parameters other than the model's (stale), or none ({share})"
        )
    if not np.any(right):
        return f"it is updated but should not be: it is in the wrong group ({share})"
    stale = _stale(moved, right)
    if stale is not None:
        return (
            f"equal gradients, but {stale:.0%} of its elements are not updated and the rest is right: stale rows that "
            f"their rank did not update, or whose new values were not gathered ({share})"
        )
    factor = float(moved @ right) / float(right @ right)
    if _left(moved - factor * right, moved - right):
        return (
            f"equal gradients, but the step is {factor:.4g} times as long: a different learning "
            f"rate or clipping ({share})"
        )
    decay = _along(moved - right, before)
    if decay is not None:
        return f"equal gradients, but weights shrink by {-decay:.3g} more: a different weight decay or group ({share})"
    both = np.stack([right, before], axis=1)
    solution = np.linalg.lstsq(both, moved, rcond=None)[0]
    if moved.size > 4 and _left(moved - both @ solution, moved - right):
        return (
            f"equal gradients, different learning rate ({solution[0]:.4g} times) and weight decay: a "
            f"different group ({share})"
        )
    return f"equal gradients, different weights: a different optimizer state (momentum), group or rule ({share})"


def _stale(moved: Vector, right: Vector) -> float | None:
    """Return the share of elements that should move and don't, if all others moved correctly."""
    still = (moved == 0.0) & (right != 0.0)
    rest = ~still
    if not np.any(still) or not np.any(moved[rest]) or moved.size < 4:
        return None
    return float(still.mean()) if _left((moved - right)[rest], (moved - right)[still]) else None


def norm_cause(norms: Sequence[float | None], wanted: float, *, shared: float | None = None) -> str | None:
    """Return why ranks with the same gradient would clip it differently: `norms` as each rank measured it.

    `shared` is the norm with every tensor counted once for each copy that ranks hold of it.
    """
    apart = [rank for rank, norm in enumerate(norms) if norm is not None and abs(norm - wanted) > _SHAPE * wanted]
    if not apart:
        return None
    first = norms[apart[0]] or 0.0
    if shared is not None and len(apart) == len(norms) and abs(first - shared) <= _SHAPE * wanted:
        return (
            f"equal gradients, but their norm is measured as {first:.4g} instead of {wanted:.4g}: "
            "tensors that several ranks "
            "hold (replicated ones) are counted once per rank, so it is too large and clips too much"
        )
    return (
        f"equal gradients, but rank {apart[0]} measures their norm as {norms[apart[0]]:.4g} instead of "
        f"{wanted:.4g}: it clips "
        f"by a part of the gradients, or by those before the reduction (on rank {', '.join(map(str, apart))})"
    )


def _left(residual: Vector, error: Vector) -> bool:
    return float(np.linalg.norm(residual)) <= _SHAPE * float(np.linalg.norm(error))


def _along(error: Vector, direction: Vector) -> float | None:
    size = float(direction @ direction)
    if size == 0.0 or error.size < 2:
        return None
    factor = float(error @ direction) / size
    return factor if _left(error - factor * direction, error) else None


def buffer_cause(*, found: Sequence[Vector], before: Vector, after: Sequence[Vector], momentum: float | None) -> str:
    """Return why a buffer is wrong: `found` on each rank; one process had `after` each microbatch in turn."""
    ranks, mine = len(found), found[0]
    if any(_close(mine, other, after[-1]) is False for other in found):
        apart = "ranks hold different values: "
    else:
        apart = ""
    if _close(mine, before, after[-1]):
        return f"buffers: {apart}not updated at all"
    if not (np.all(np.isfinite(mine)) and np.all(np.isfinite(after))):
        return f"buffers: {apart}not finite, here or in one process"
    if momentum is None or len(after) == 0:
        return (
            f"buffers: {apart}the forward changes it, and in one process it sees every microbatch; here it was updated "
            "a different number of times, or from one rank's microbatches only (rank 0's value is sent to all)"
        )
    rows = _statistics(before, after, momentum)
    local = [_fold(before, rows[rank::ranks], momentum) for rank in range(ranks)]
    for rank, value in enumerate(local):
        if _close(mine, value, after[-1]):
            return f"buffers: {apart}running statistics of rank {rank}'s microbatches only (left local)"
    if _close(mine, np.mean(local, axis=0), after[-1]):
        return f"buffers: {apart}the mean of the ranks' own running statistics"
    if _close(mine, _fold(before, rows[::-1], momentum), after[-1]):
        return f"buffers: {apart}folded in a different order"
    for twice in ([row for row in rows for _ in range(2)], [*rows, *rows]):
        if _close(mine, _fold(before, twice, momentum), after[-1]):
            return f"buffers: {apart}each microbatch was folded twice (one forward too many)"
    joint = before + momentum * (np.mean(rows, axis=0) - before)
    if _close(mine, joint, after[-1]):
        return f"buffers: {apart}updated once with the mean over the batch, not microbatch by microbatch"
    return f"buffers: {apart}running statistics of different microbatches, or updated a different number of times"


def _statistics(before: Vector, after: Sequence[Vector], momentum: float) -> list[Vector]:
    """Return each microbatch's statistics, recovered from the running values."""
    starts = [before, *after[:-1]]
    return [(end - (1.0 - momentum) * start) / momentum for start, end in zip(starts, after, strict=True)]


def _fold(before: Vector, rows: Sequence[Vector], momentum: float) -> Vector:
    value = before.copy()
    for row in rows:
        value = (1.0 - momentum) * value + momentum * row
    return value


def _close(one: Vector, other: Vector, scale: Vector) -> bool:
    return float(np.linalg.norm(one - other)) <= 1e-5 * float(np.linalg.norm(scale) + 1e-30)
