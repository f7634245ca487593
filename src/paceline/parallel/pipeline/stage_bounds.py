"""Assignment of blocks to stages, from listed numbers of blocks or balanced by weights."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import Block
from paceline.planner.model_costs.stage_balance import balance_stages

Bounds = tuple[tuple[int, int], ...]
"""The index of the first block of each stage, and the index after its last block."""


def bounds_from_counts(counts: Sequence[int], num_stages: int, num_blocks: int) -> Bounds:
    """Return the bounds for the given number of blocks of each stage.

    Raises:
        LayoutError: the numbers do not add up to the model's blocks, or a stage has no block.
    """
    if len(counts) != num_stages or sum(counts) != num_blocks or min(counts) < 1:
        raise LayoutError(
            f"place.stages lists {len(counts)} stages with {sum(counts)} blocks, but the layout has {num_stages} "
            f"stages, and the model has {num_blocks} blocks.",
            cause=f"place.stages must list one number of blocks (at least 1) per stage, with the sum {num_blocks}",
            hint=_suggest_counts(num_stages, num_blocks),
        )
    return tuple(pairwise([0, *accumulate(counts)]))


def balanced_bounds(num_stages: int, blocks: Sequence[Block], weights: Sequence[float] | None) -> Bounds:
    """Return bounds that balance the weights over the stages; without weights, all blocks are equal.

    Raises:
        LayoutError: there are more stages than blocks, or `weights` has another length than `blocks`.
    """
    if num_stages > len(blocks):
        names = ", ".join(block.name for block in blocks[:3])
        raise LayoutError(
            f"{num_stages} stages, but the model has only {len(blocks)} blocks ({names}{', ...' * (len(blocks) > 3)}).",
            cause="each stage needs a block, and a schedule may have several stages on each rank",
            hint=f"a smaller pp or virtual: {len(blocks)} stages at most; or finer blocks: --place.blocks",
        )
    if weights is not None and len(weights) != len(blocks):
        raise LayoutError(f"{len(weights)} weights for {len(blocks)} blocks.", hint="one number for each block")
    return balance_stages(num_stages=num_stages, seconds=weights or [1.0] * len(blocks)).bounds


def _suggest_counts(num_stages: int, num_blocks: int) -> str:
    """Return an option that works, for the hint of an error."""
    if num_stages > num_blocks:
        return f"a smaller pp: {num_blocks} stages at most"
    bounds = balance_stages(num_stages=num_stages, seconds=[1.0] * num_blocks).bounds
    return f"--place.stages {','.join(str(stop - start) for start, stop in bounds)}"
