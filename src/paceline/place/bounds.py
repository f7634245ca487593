"""Which blocks each stage gets: listed, or as even as they come."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import LayoutError
from paceline.place.blocks import Block
from paceline.plan.balance import balance

Bounds = tuple[tuple[int, int], ...]


def checked_bounds(counts: Sequence[int], num_stages: int, num_blocks: int) -> Bounds:
    """From the listed number of blocks of each stage.

    Raises:
        LayoutError: the numbers do not add up, or a stage would have no block.
    """
    if len(counts) != num_stages or sum(counts) != num_blocks or min(counts) < 1:
        raise LayoutError(
            f"bounds lists {list(counts)}: {len(counts)} stages with {sum(counts)} blocks; "
            f"the layout has {num_stages} stages, the model {num_blocks} blocks, and each stage needs at least one.",
            hint="one number of blocks for each stage, all of them together",
        )
    return tuple(pairwise([0, *accumulate(counts)]))


def even_bounds(num_stages: int, blocks: Sequence[Block], weights: Sequence[float] | None) -> Bounds:
    """As even as can be over the weights.

    Raises:
        LayoutError: more stages than blocks.
    """
    if num_stages > len(blocks):
        names = ", ".join(block.name for block in blocks[:3])
        raise LayoutError(
            f"{num_stages} stages, but the model has only {len(blocks)} blocks ({names}{', ...' * (len(blocks) > 3)}).",
            hint=f"at most pp={len(blocks)}; or list finer blocks",
        )
    if weights is not None and len(weights) != len(blocks):
        raise LayoutError(f"{len(weights)} weights for {len(blocks)} blocks.", hint="one number for each block")
    return balance(num_stages=num_stages, seconds=weights or [1.0] * len(blocks)).bounds
