"""Divide a chain of blocks into stages with the smallest possible maximum time, by dynamic programming.

This is the chain-partition problem that PipeDream's optimizer solves for one machine per stage (Harlap et al., 2018).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from paceline.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The stages of a pipeline."""

    bounds: tuple[tuple[int, int], ...]
    """The blocks of each stage, as a range `[start, stop)`."""
    seconds: tuple[float, ...]
    """The seconds of each stage."""

    @property
    def slowest(self) -> float:
        """The seconds of the slowest stage, which is the time per microbatch in the steady state."""
        return max(self.seconds)


def balance_stages(
    *,
    num_stages: int,
    seconds: Sequence[float],
    first: float = 0.0,
    last: float = 0.0,
    block_bytes: Sequence[float] | None = None,
    limit_bytes: Sequence[float] | float | None = None,
) -> Balance:
    """Return the stages with the smallest maximum time; of equally good cuts, the one with the most even times.

    `seconds` and `block_bytes` have a number for each block. `first` and `last` are the seconds of the parts before the
    first block and after the last block. `limit_bytes` is the memory limit of a stage, one number for all stages or one
    for each. The cost is O(num_stages × num_blocks²).

    Raises:
        LayoutError: there are fewer blocks than stages, or no cut stays within the limit.
    """
    num_blocks = len(seconds)
    if num_stages < 1 or num_blocks < num_stages:
        raise LayoutError(
            f"{num_stages} stages can't be cut from {num_blocks} blocks.", hint=f"pp between 1 and {num_blocks}"
        )
    cost = _StageCost(num_stages, seconds, first, last, block_bytes, limit_bytes)
    # for each number of stages: by the number of blocks in them, the values that `_best_ends` yields
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(num_stages):
        best.append(dict(_best_ends(stage, best[-1], cost, num_blocks, num_stages)))
    if num_blocks not in best[-1]:
        raise LayoutError(
            "no cut keeps every stage within its memory.",
            cause=f"in each cut of {num_blocks} blocks into {num_stages} stages, a stage needs more than its limit",
            hint="more stages, or remat=full",
        )
    ends = [num_blocks]
    for stage in reversed(range(num_stages)):
        ends.append(best[stage + 1][ends[-1]][2])
    bounds = tuple(pairwise(reversed(ends)))
    return Balance(
        bounds=bounds, seconds=tuple(cost.stage_seconds(stage, *bound) for stage, bound in enumerate(bounds))
    )


def slowest_by_exhaustive_search(
    *, num_stages: int, seconds: Sequence[float], first: float = 0.0, last: float = 0.0
) -> float:
    """Return `Balance.slowest` of `balance_stages` by the naive method, which tries all cuts."""
    cost = _StageCost(num_stages, seconds, first, last, None, None)
    inner_cuts = combinations(range(1, len(seconds)), num_stages - 1)
    cuts = (list(pairwise([0, *cut, len(seconds)])) for cut in inner_cuts)
    return min(max(cost.stage_seconds(stage, *bound) for stage, bound in enumerate(cut)) for cut in cuts)


class _StageCost:
    """The seconds and the memory of any stage, in constant time from the sums over all blocks before a block."""

    def __init__(
        self,
        num_stages: int,
        seconds: Sequence[float],
        first: float,
        last: float,
        block_bytes: Sequence[float] | None,
        limit: Sequence[float] | float | None,
    ) -> None:
        self._times = [0.0, *accumulate(seconds)]
        self._bytes = [0.0, *accumulate(block_bytes or [0.0] * len(seconds))]
        self._end_seconds = {0: first, num_stages - 1: last} if num_stages > 1 else {0: first + last}
        self._limits = limit if limit is None or isinstance(limit, Sequence) else [limit] * num_stages

    def stage_seconds(self, stage: int, start: int, stop: int) -> float:
        return self._times[stop] - self._times[start] + self._end_seconds.get(stage, 0.0)

    def fits(self, stage: int, start: int, stop: int) -> bool:
        return self._limits is None or self._bytes[stop] - self._bytes[start] <= self._limits[stage]


def _best_ends(
    stage: int, previous: dict[int, tuple[float, float, int]], cost: _StageCost, num_blocks: int, num_stages: int
) -> Iterator[tuple[int, tuple[float, float, int]]]:
    """Yield each possible end of `stage`, with its best (slowest time, sum of squared times, start of the stage).

    `previous` has the same values for the stage before it. The times are those of all stages up to this one.
    """
    for stop in range(stage + 1, num_blocks - (num_stages - stage - 1) + 1):
        options = [
            (
                max(slowest, cost.stage_seconds(stage, start, stop)),
                squares + cost.stage_seconds(stage, start, stop) ** 2,
                -start,
            )
            for start, (slowest, squares, _) in previous.items()
            if start < stop and cost.fits(stage, start, stop)
        ]
        if options:
            slowest, squares, start = min(options)
            yield stop, (slowest, squares, -start)
