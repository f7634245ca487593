"""Find the likely cause if gradients are right but weights or buffers after the update are not."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_TOLERANCE = 1e-3  # an explanation may leave this share of the error


def update_cause(*, before: Vector, actual: Vector, expected: Vector, num_differing: int, num_parameters: int) -> str:
    """Return why equal gradients gave weights `actual` instead of `expected`, both starting at `before`."""
    share = "every parameter" if num_differing == num_parameters else f"{num_differing} of {num_parameters}"
    actual_step, expected_step = actual - before, expected - before
    if not np.any(actual_step):
        return f"the optimizer does not update it: its groups hold stale parameters, not the model's, or none ({share})"
    if not np.any(expected_step):
        return f"it is updated but should not be: it is in the wrong group ({share})"
    stale_share = _stale_share(actual_step, expected_step)
    if stale_share is not None:
        return (
            f"equal gradients, but {stale_share:.0%} of its elements are not updated and the rest is right: stale rows "
            f"that their rank did not update, or whose new values were not gathered ({share})"
        )
    factor = float(actual_step @ expected_step) / float(expected_step @ expected_step)
    if _is_explained(actual_step - factor * expected_step, actual_step - expected_step):
        return (
            f"equal gradients, but the step is {factor:.4g} times as long: a different learning "
            f"rate or clipping ({share})"
        )
    decay = _fit_multiple(actual_step - expected_step, before)
    if decay is not None:
        return f"equal gradients, but weights shrink by {-decay:.3g} more: a different weight decay or group ({share})"
    directions = np.stack([expected_step, before], axis=1)
    solution = np.linalg.lstsq(directions, actual_step, rcond=None)[0]
    if actual_step.size > 4 and _is_explained(actual_step - directions @ solution, actual_step - expected_step):
        return (
            f"equal gradients, different learning rate ({solution[0]:.4g} times) and weight decay: a "
            f"different group ({share})"
        )
    return f"equal gradients, different weights: a different optimizer state (momentum), group or rule ({share})"


def _stale_share(actual_step: Vector, expected_step: Vector) -> float | None:
    """Return the share of elements that should move but don't; None if other elements are wrong too, or none moved."""
    unmoved = (actual_step == 0.0) & (expected_step != 0.0)
    unaffected = ~unmoved
    if not np.any(unmoved) or not np.any(actual_step[unaffected]) or actual_step.size < 4:
        return None
    return (
        float(unmoved.mean())
        if _is_explained((actual_step - expected_step)[unaffected], (actual_step - expected_step)[unmoved])
        else None
    )


def norm_cause(norms: Sequence[float | None], expected: float, *, norm_over_copies: float | None = None) -> str | None:
    """Return why a rank measured a wrong gradient norm for clipping; None if all norms are right.

    `norms` has the norm that each rank measured, or None. `norm_over_copies` is the norm that results if a tensor is
    counted once for each copy.
    """
    differing = [
        rank for rank, norm in enumerate(norms) if norm is not None and abs(norm - expected) > _TOLERANCE * expected
    ]
    if not differing:
        return None
    first = norms[differing[0]] or 0.0
    if (
        norm_over_copies is not None
        and len(differing) == len(norms)
        and abs(first - norm_over_copies) <= _TOLERANCE * expected
    ):
        return (
            f"equal gradients, but their norm is measured as {first:.4g} instead of {expected:.4g}: "
            "tensors that several ranks "
            "hold (replicated ones) are counted once per rank, so the norm is too large and clips too much"
        )
    return (
        f"equal gradients, but rank {differing[0]} measures their norm as {norms[differing[0]]:.4g} instead of "
        f"{expected:.4g}: the norm is of a part of the gradients, or of the gradients before the reduction "
        f"(on rank {', '.join(map(str, differing))})"
    )


def _is_explained(residual: Vector, error: Vector) -> bool:
    return float(np.linalg.norm(residual)) <= _TOLERANCE * float(np.linalg.norm(error))


def _fit_multiple(error: Vector, direction: Vector) -> float | None:
    """Return the factor by which `error` is a multiple of `direction`; None if it is not a multiple."""
    size = float(direction @ direction)
    if size == 0.0 or error.size < 2:
        return None
    factor = float(error @ direction) / size
    return factor if _is_explained(error - factor * direction, error) else None


def buffer_cause(
    *, buffers: Sequence[Vector], before: Vector, expected: Sequence[Vector], momentum: float | None
) -> str:
    """Return why a buffer is wrong.

    `buffers` has its value in each copy of the model (in data parallelism, on each rank), and `before` its value before
    the step. `expected` has its value after each microbatch in one process.
    """
    ranks, actual = len(buffers), buffers[0]
    if any(_is_close(actual, other, expected[-1]) is False for other in buffers):
        prefix = "ranks hold different values: "
    else:
        prefix = ""
    if _is_close(actual, before, expected[-1]):
        return f"buffers: {prefix}not updated at all"
    if not (np.all(np.isfinite(actual)) and np.all(np.isfinite(expected))):
        return f"buffers: {prefix}not finite, here or in one process"
    if momentum is None:
        return (
            f"buffers: {prefix}in one process, the forward of every microbatch changes this buffer; here it was "
            "updated a different number of times, or from one rank's microbatches only (rank 0's value is sent to all)"
        )
    statistics = _recover_statistics(before, expected, momentum)
    by_rank = [_fold_statistics(before, statistics[rank::ranks], momentum) for rank in range(ranks)]
    for rank, value in enumerate(by_rank):
        if _is_close(actual, value, expected[-1]):
            return f"buffers: {prefix}running statistics of rank {rank}'s microbatches only (left local)"
    if _is_close(actual, np.mean(by_rank, axis=0), expected[-1]):
        return f"buffers: {prefix}the mean of the ranks' own running statistics"
    if _is_close(actual, _fold_statistics(before, statistics[::-1], momentum), expected[-1]):
        return f"buffers: {prefix}folded in a different order"
    for doubled in ([row for row in statistics for _ in range(2)], [*statistics, *statistics]):
        if _is_close(actual, _fold_statistics(before, doubled, momentum), expected[-1]):
            return f"buffers: {prefix}each microbatch was folded twice (one forward too many)"
    joint = before + momentum * (np.mean(statistics, axis=0) - before)
    if _is_close(actual, joint, expected[-1]):
        return f"buffers: {prefix}updated once with the mean over the batch, not microbatch by microbatch"
    return f"buffers: {prefix}running statistics of different microbatches, or updated a different number of times"


def _recover_statistics(before: Vector, after: Sequence[Vector], momentum: float) -> list[Vector]:
    """Return each microbatch's statistics, recovered from the running values."""
    starts = [before, *after[:-1]]
    return [(end - (1.0 - momentum) * start) / momentum for start, end in zip(starts, after, strict=True)]


def _fold_statistics(before: Vector, statistics: Sequence[Vector], momentum: float) -> Vector:
    value = before.copy()
    for row in statistics:
        value = (1.0 - momentum) * value + momentum * row
    return value


def _is_close(one: Vector, other: Vector, scale: Vector) -> bool:
    return float(np.linalg.norm(one - other)) <= 1e-5 * float(np.linalg.norm(scale) + 1e-30)
