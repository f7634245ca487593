"""When what the parts of a sequence give is what the whole gives, up to rounding in float64."""

from collections.abc import Sequence

from torch import Tensor

from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding

CLOSE = 1e-9
_LEAST = 1e-6


def equal_up_to_rounding(found: Tensor, wanted: Tensor, *, scale: float = 0.0) -> bool:
    """Whether they differ by rounding only, for tensors of this size, or for sums of terms that have `scale`."""
    if found.shape != wanted.shape:
        return False
    size = max(largest_magnitude(wanted), scale, _LEAST)
    return bool(((found - wanted).abs() <= CLOSE * size).all())


def largest_magnitude(tensor: Tensor) -> float:
    """Its largest element, without the sign."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def equal_when_joined(whole: Tensor, parts: Sequence[Tensor], cut: SequenceSharding) -> bool:
    """Joined where it has the sequence, by itself or flattened with the batch; every rank's equal where it has not."""
    for dim in [d for d in (1, *range(whole.dim())) if d < whole.dim()]:
        rows, rest = divmod(whole.shape[dim], cut.length)
        shapes = [(*whole.shape[:dim], rows * cut.size(rank), *whole.shape[dim + 1 :]) for rank in range(len(parts))]
        if rows and not rest and all(part.shape == shape for part, shape in zip(parts, shapes, strict=True)):
            split = [part.unflatten(dim, (rows, -1)) for part in parts]
            return equal_up_to_rounding(cut.join(split, dim=dim + 1).flatten(dim, dim + 1), whole)
    return all(equal_up_to_rounding(part, whole) for part in parts)


def sequence_dimension(tensor: Tensor, size: int) -> int | None:
    """Where the sequence is: usually the second dimension."""
    order = [d for d in (1, *range(tensor.dim())) if d < tensor.dim()]
    return next((d for d in order if tensor.shape[d] == size), None)
