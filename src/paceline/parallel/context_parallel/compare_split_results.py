"""Comparison of results on the shards of a sequence with those on the full sequence, up to rounding in float64."""

from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding

RELATIVE_TOLERANCE = 1e-9
_MIN_MAGNITUDE = 1e-6


def equal_up_to_rounding(result: Tensor, expected: Tensor, *, scale: float = 0.0) -> bool:
    """Return whether two tensors differ by rounding only.

    The tolerance is relative to the largest of three numbers: `scale`, a small constant, and the largest magnitude in
    `expected`. If `expected` is a sum whose terms may cancel, pass the magnitude of these terms as `scale`.
    """
    if result.shape != expected.shape:
        return False
    magnitude = max(largest_magnitude(expected), scale, _MIN_MAGNITUDE)
    return bool(((result - expected).abs() <= RELATIVE_TOLERANCE * magnitude).all())


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def equal_when_joined(expected: Tensor, shards: Sequence[Tensor], sharding: SequenceSharding) -> bool:
    """Return whether the joined shards equal the expected tensor up to rounding.

    The shards are joined along the sequence dimension, which may be flattened with the batch dimension. Without a
    sequence dimension, each shard must equal the expected tensor.
    """
    for dim in [d for d in (1, *range(expected.dim())) if d < expected.dim()]:
        num_rows, remainder = divmod(expected.shape[dim], sharding.length)
        shapes = [
            (*expected.shape[:dim], num_rows * sharding.local_length(rank), *expected.shape[dim + 1 :])
            for rank in range(len(shards))
        ]
        if num_rows and not remainder and [tuple(shard.shape) for shard in shards] == shapes:
            unflattened = [shard.unflatten(dim, (num_rows, -1)) for shard in shards]
            return equal_up_to_rounding(sharding.join(unflattened, dim=dim + 1).flatten(dim, dim + 1), expected)
    return all(equal_up_to_rounding(shard, expected) for shard in shards)


def sequence_dimension(tensor: Tensor, size: int) -> int | None:
    """Return the dimension of this size (the second dimension is tried first), or None if there is none."""
    dims = [d for d in (1, *range(tensor.dim())) if d < tensor.dim()]
    return next((d for d in dims if tensor.shape[d] == size), None)
