"""Comparison of results on the shards of a sequence with those on the full sequence, up to rounding in float64."""

from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding

RELATIVE_TOLERANCE = 1e-9
_MIN_MAGNITUDE = 1e-6


def equal_up_to_rounding(result: Tensor, expected: Tensor, *, scale: float = 0.0) -> bool:
    """Return whether two tensors differ by rounding only, relative to their magnitude or the `scale` of their terms."""
    if result.shape != expected.shape:
        return False
    size = max(largest_magnitude(expected), scale, _MIN_MAGNITUDE)
    return bool(((result - expected).abs() <= RELATIVE_TOLERANCE * size).all())


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def equal_when_joined(expected: Tensor, shards: Sequence[Tensor], sharding: SequenceSharding) -> bool:
    """Return whether the joined parts equal the expected tensor.

    The parts are joined along the sequence dimension, which may be flattened with the batch dimension. Without a
    sequence dimension, each part must equal the expected tensor.
    """
    for dim in [d for d in (1, *range(expected.dim())) if d < expected.dim()]:
        rows, rest = divmod(expected.shape[dim], sharding.length)
        shapes = [
            (*expected.shape[:dim], rows * sharding.local_length(rank), *expected.shape[dim + 1 :])
            for rank in range(len(shards))
        ]
        if rows and not rest and all(part.shape == shape for part, shape in zip(shards, shapes, strict=True)):
            split = [part.unflatten(dim, (rows, -1)) for part in shards]
            return equal_up_to_rounding(sharding.join(split, dim=dim + 1).flatten(dim, dim + 1), expected)
    return all(equal_up_to_rounding(part, expected) for part in shards)


def sequence_dimension(tensor: Tensor, size: int) -> int | None:
    """Return the dimension of this size (the second dimension is tried first), or None."""
    order = [d for d in (1, *range(tensor.dim())) if d < tensor.dim()]
    return next((d for d in order if tensor.shape[d] == size), None)
