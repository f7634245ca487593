"""Stages balanced by dynamic programming, against all possible cuts."""

import random
from itertools import combinations, pairwise

import pytest

from paceline.errors import LayoutError
from paceline.planner.model_costs.stage_balance import balance_stages, slowest_by_exhaustive_search


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice([0.0, 1.0, draw.uniform(0, 5)]) for _ in range(draw.randint(1, 9))]
    num_stages = draw.randint(1, len(seconds))
    ends = {"first": draw.uniform(0, 6), "last": draw.uniform(0, 6)}
    found = balance_stages(num_stages=num_stages, seconds=seconds, **ends)
    assert found.slowest == pytest.approx(slowest_by_exhaustive_search(num_stages=num_stages, seconds=seconds, **ends))
    assert found.bounds[0][0] == 0 and found.bounds[-1][1] == len(seconds)
    assert all(one[1] == two[0] for one, two in pairwise(found.bounds)) and all(a < b for a, b in found.bounds)
    assert sum(found.seconds) == pytest.approx(sum(seconds) + sum(ends.values()))


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_kept_to(seed: int) -> None:
    draw = random.Random(seed)
    seconds, sizes = ([draw.uniform(1, 5) for _ in range(7)] for _ in range(2))
    limits = [draw.uniform(4, 12) for _ in range(3)]
    cuts = [list(pairwise([0, *cut, 7])) for cut in combinations(range(1, 7), 2)]
    fit = [c for c in cuts if all(sum(sizes[a:b]) <= limit for (a, b), limit in zip(c, limits, strict=True))]
    if not fit:
        with pytest.raises(LayoutError, match="no cut keeps every stage within its memory"):
            balance_stages(num_stages=3, seconds=seconds, block_bytes=sizes, limit_bytes=limits)
        return
    found = balance_stages(num_stages=3, seconds=seconds, block_bytes=sizes, limit_bytes=limits)
    assert list(found.bounds) in fit
    assert found.slowest == pytest.approx(min(max(sum(seconds[a:b]) for a, b in c) for c in fit))


def test_equal_blocks_are_dealt_evenly() -> None:
    assert balance_stages(num_stages=3, seconds=[1.0] * 7).slowest == 3
    assert [b - a for a, b in balance_stages(num_stages=4, seconds=[1.0] * 8).bounds] == [2, 2, 2, 2]
    assert sorted(b - a for a, b in balance_stages(num_stages=4, seconds=[1.0] * 9).bounds) == [2, 2, 2, 3]


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 stages can't be cut from 2 blocks"):
        balance_stages(num_stages=3, seconds=[1.0, 1.0])
