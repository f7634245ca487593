"""The search finds what an enumeration of all layouts finds, and its bounds hold."""

from dataclasses import replace

import pytest

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import FAMILIES
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.search.bounds import Bounds
from paceline.planner.search.branch_and_bound import SearchResult, search, search_exhaustively, sort_key
from paceline.planner.search.least_memory import find_least_memory
from paceline.planner.search.search_space import (
    SearchSpace,
    candidates,
    data_parallel_choices,
    is_in_search_space,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)
from tests.planner.random_plans import forecast

SEEDS = range(30)


def keys(found: SearchResult) -> dict[str, object]:
    return {name: sort_key(estimate) for name, estimate in found.best.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_every_family_is_that_of_all_layouts(seed: int) -> None:
    made, grid = forecast(seed)
    quick = search(made, grid=grid)
    every = search_exhaustively(CostModel(profile=made.profile, cluster=made.cluster), grid=grid)
    assert keys(quick) == keys(every)
    assert (quick.fastest is None) == (every.fastest is None)
    assert set(quick.best) <= set(FAMILIES)
    if quick.fastest is not None and every.fastest is not None:
        assert sort_key(quick.fastest) == sort_key(every.fastest)
        assert quick.num_estimates <= every.num_estimates


@pytest.mark.parametrize("seed", range(100, 112))
def test_no_bound_is_above_what_grows_from_it(seed: int) -> None:
    made, grid = forecast(seed)
    bounds, near = Bounds(cost_model=made, grid=grid), 1 + 1e-9
    for trunk in model_parallel_choices(made.profile, made.cluster, grid):
        for bough in recompute_choices(trunk, made.profile, grid):
            times, sizes = [bounds.recompute_node_seconds(bough)], [bounds.recompute_node_bytes(bough)]
            for branch in microbatch_choices(bough, made.profile, grid):
                times = [times[0], bounds.microbatch_node_seconds(branch)]
                for twig in schedule_choices(branch, made.profile, grid):
                    times, sizes = (
                        [*times[:2], bounds.schedule_node_seconds(twig)],
                        [sizes[0], bounds.schedule_node_bytes(twig)],
                    )
                    for leaf in data_parallel_choices(twig, made.profile, made.cluster, grid):
                        found = made.estimate(leaf)
                        assert max(times) <= found.step_seconds * near, (bough, leaf)
                        assert bounds.leaf_seconds(leaf, node_seconds=times[2]) <= found.step_seconds * near, leaf
                        assert max(sizes) <= found.peak_bytes * near, (bough, leaf)


@pytest.mark.parametrize("seed", range(200, 212))
def test_the_least_memory_is_that_of_all_layouts(seed: int) -> None:
    made, grid = forecast(seed)
    every = [made.estimate(candidate) for candidate in candidates(made.profile, made.cluster, grid)]
    for family in {estimate.candidate.family for estimate in every}:
        found = find_least_memory(made, grid=grid, family=family)
        assert found is not None and found.candidate.family == family
        assert found.fits_host or all(not one.fits_host for one in every if one.candidate.family == family)
        if all(one.fits_host for one in every):
            least = min(one.peak_bytes for one in every if one.candidate.family == family)
            assert found.peak_bytes == pytest.approx(least)
    assert find_least_memory(made, grid=grid, family="no such family") is None


@pytest.mark.parametrize("seed", range(6))
def test_a_candidate_is_on_its_grid_and_its_like_is_not(seed: int) -> None:
    made, grid = forecast(seed)
    for candidate in [*candidates(made.profile, made.cluster, grid)][::50]:
        assert is_in_search_space(candidate, made.profile, made.cluster, grid)
        assert not is_in_search_space(replace(candidate, micro_batch_size=999), made.profile, made.cluster, grid)
        assert not is_in_search_space(replace(candidate, tp=7), made.profile, made.cluster, grid)


@pytest.mark.parametrize("seed", range(8))
def test_more_memory_never_makes_the_best_slower(seed: int) -> None:
    made, grid = forecast(seed)

    def best(times: float) -> float:
        device = replace(made.cluster.device, memory_bytes=times * made.cluster.device.memory_bytes)
        first = search(CostModel(profile=made.profile, cluster=replace(made.cluster, device=device)), grid=grid).fastest
        return float("inf") if first is None else first.step_seconds

    found = [best(times) for times in (0.5, 1, 2, 8)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_faster_links_never_make_the_best_slower(seed: int) -> None:
    made, grid = forecast(seed)

    def best(fleet: Cluster) -> float:
        first = search(CostModel(profile=made.profile, cluster=fleet), grid=grid).fastest
        return float("inf") if first is None else first.step_seconds

    quick = {
        name: replace(link, bytes_per_second=4 * link.bytes_per_second, latency_seconds=link.latency_seconds / 4)
        for name, link in (
            ("inside", made.cluster.inside),
            ("between", made.cluster.between),
            ("host", made.cluster.host),
        )
    }
    assert best(replace(made.cluster, **quick)) <= best(made.cluster) * (1 + 1e-9)


def test_a_larger_grid_is_never_slower() -> None:
    for seed in range(6):
        made, _ = forecast(seed)
        small = search(made, grid=SearchSpace(remat=("none",), schedules=("1f1b",), offload=((),))).fastest
        large = search(made, grid=SearchSpace()).fastest
        if small is not None:
            assert large is not None and large.step_seconds <= small.step_seconds
