"""The search finds what an enumeration of all layouts finds, and its bounds hold."""

from dataclasses import replace

import pytest

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import FAMILIES
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.search.bounds import Bounds
from paceline.planner.search.branch_and_bound import SearchResult, key_of, search, try_all
from paceline.planner.search.least_memory import least_memory
from paceline.planner.search.search_space import (
    SearchSpace,
    candidates,
    data_parallel_choices,
    is_on,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)
from tests.planner.random_plans import forecast

SEEDS = range(30)


def keys(found: SearchResult) -> dict[str, object]:
    return {name: key_of(estimate) for name, estimate in found.best.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_every_family_is_that_of_all_layouts(seed: int) -> None:
    made, grid = forecast(seed)
    quick = search(made, grid=grid)
    every = try_all(CostModel(facts=made.facts, fleet=made.fleet), grid=grid)
    assert keys(quick) == keys(every)
    assert (quick.first is None) == (every.first is None)
    assert set(quick.best) <= set(FAMILIES)
    if quick.first is not None and every.first is not None:
        assert key_of(quick.first) == key_of(every.first)
        assert quick.num_estimates <= every.num_estimates


@pytest.mark.parametrize("seed", range(100, 112))
def test_no_bound_is_above_what_grows_from_it(seed: int) -> None:
    made, grid = forecast(seed)
    bounds, near = Bounds(forecast=made, grid=grid), 1 + 1e-9
    for trunk in model_parallel_choices(made.facts, made.fleet, grid):
        for bough in recompute_choices(trunk, made.facts, grid):
            times, sizes = [bounds.bough_seconds(bough)], [bounds.bough_bytes(bough)]
            for branch in microbatch_choices(bough, made.facts, grid):
                times = [times[0], bounds.branch_seconds(branch)]
                for twig in schedule_choices(branch, made.facts, grid):
                    times, sizes = [*times[:2], bounds.twig_seconds(twig)], [sizes[0], bounds.twig_bytes(twig)]
                    for leaf in data_parallel_choices(twig, made.facts, made.fleet, grid):
                        found = made.estimate(leaf)
                        assert max(times) <= found.step_seconds * near, (bough, leaf)
                        assert bounds.leaf_seconds(leaf, twig_seconds=times[2]) <= found.step_seconds * near, leaf
                        assert max(sizes) <= found.peak_bytes * near, (bough, leaf)


@pytest.mark.parametrize("seed", range(200, 212))
def test_the_least_memory_is_that_of_all_layouts(seed: int) -> None:
    made, grid = forecast(seed)
    every = [made.estimate(candidate) for candidate in candidates(made.facts, made.fleet, grid)]
    for family in {estimate.candidate.family for estimate in every}:
        found = least_memory(made, grid=grid, family=family)
        assert found is not None and found.candidate.family == family
        assert found.fits_host or all(not one.fits_host for one in every if one.candidate.family == family)
        if all(one.fits_host for one in every):
            least = min(one.peak_bytes for one in every if one.candidate.family == family)
            assert found.peak_bytes == pytest.approx(least)
    assert least_memory(made, grid=grid, family="no such family") is None


@pytest.mark.parametrize("seed", range(6))
def test_a_candidate_is_on_its_grid_and_its_like_is_not(seed: int) -> None:
    made, grid = forecast(seed)
    for candidate in [*candidates(made.facts, made.fleet, grid)][::50]:
        assert is_on(candidate, made.facts, made.fleet, grid)
        assert not is_on(replace(candidate, micro_batch_size=999), made.facts, made.fleet, grid)
        assert not is_on(replace(candidate, tp=7), made.facts, made.fleet, grid)


@pytest.mark.parametrize("seed", range(8))
def test_more_memory_never_makes_the_best_slower(seed: int) -> None:
    made, grid = forecast(seed)

    def best(times: float) -> float:
        device = replace(made.fleet.device, memory_bytes=times * made.fleet.device.memory_bytes)
        first = search(CostModel(facts=made.facts, fleet=replace(made.fleet, device=device)), grid=grid).first
        return float("inf") if first is None else first.step_seconds

    found = [best(times) for times in (0.5, 1, 2, 8)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_faster_links_never_make_the_best_slower(seed: int) -> None:
    made, grid = forecast(seed)

    def best(fleet: Cluster) -> float:
        first = search(CostModel(facts=made.facts, fleet=fleet), grid=grid).first
        return float("inf") if first is None else first.step_seconds

    quick = {
        name: replace(link, bytes_per_second=4 * link.bytes_per_second, latency_seconds=link.latency_seconds / 4)
        for name, link in (("inside", made.fleet.inside), ("between", made.fleet.between), ("host", made.fleet.host))
    }
    assert best(replace(made.fleet, **quick)) <= best(made.fleet) * (1 + 1e-9)


def test_a_larger_grid_is_never_slower() -> None:
    for seed in range(6):
        made, _ = forecast(seed)
        small = search(made, grid=SearchSpace(remat=("none",), schedules=("1f1b",), offload=((),))).first
        large = search(made, grid=SearchSpace()).first
        if small is not None:
            assert large is not None and large.step_seconds <= small.step_seconds
