"""Writing into tensors that show more numbers than they have in memory."""

from torch import Tensor


def write(target: Tensor, value: Tensor, *, non_blocking: bool = False) -> None:
    """Copy `value` over `target`; of an expanded axis the first place is everybody's."""
    for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, value = target.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    target.copy_(value, non_blocking=non_blocking)


def same(old: Tensor, new: Tensor) -> bool:
    """Equal in every element, where NaN is NaN."""
    return bool(((old == new) | ((old != old) & (new != new))).all())
