"""Order layouts by simplicity, and find the simplest layout that ties with the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from math import prod

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import is_tie
from paceline.planner.cost.layout_candidate import FAMILIES, MODEL_AXES, Candidate
from paceline.planner.search.branch_and_bound import sort_key
from paceline.planner.search.search_space import (
    SearchSpace,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)

_AXES = (*MODEL_AXES, "dp_replicate", "dp_shard")
_NOT_OPTIONS = {*_AXES, "zero", "virtual", "micro_batch_size", "precision"}
# the options of a candidate, with their defaults
_OPTIONS = {field.name: field.default for field in fields(Candidate) if field.name not in _NOT_OPTIONS}
Simplicity = tuple[int, int, int, int, int]  # see `simplicity_key`


def simplicity_key(candidate: Candidate) -> Simplicity:
    """Return a sort key that is smaller for simpler candidates.

    Its five entries are the number of axes, the number of model axes, the number of options, the position of the
    family, and the ZeRO stage.
    """
    num_options = sum(getattr(candidate, name) != default for name, default in _OPTIONS.items())
    num_model_axes = sum(getattr(candidate, axis) > 1 for axis in MODEL_AXES)
    return len(candidate.mesh.split_axes), num_model_axes, num_options, FAMILIES.index(candidate.family), candidate.zero


def find_simplest_tie(estimates: Sequence[Estimate]) -> Estimate:
    """Return the simplest of the estimates that tie with the fastest; if several are equally simple, the fastest."""
    fastest = min(estimates, key=sort_key)
    ties = [estimate for estimate in estimates if estimate is fastest or is_tie(estimate, fastest)]
    return min(ties, key=lambda estimate: (simplicity_key(estimate.candidate), sort_key(estimate)))


def find_simpler_candidate(cost_model: CostModel, best: Estimate, *, grid: SearchSpace) -> Estimate | None:
    """Return the simplest candidate of the same family that fits and ties with `best`; None if `best` is the simplest.

    The result has no option and no axis that `best` lacks. If an axis of `best` is gone, another axis has its ranks.
    """
    best_simplicity, family = simplicity_key(best.candidate), best.candidate.family
    simpler_leaves = {
        leaf
        for leaf in _leaves_without_extras(cost_model, best.candidate, grid)
        if simplicity_key(leaf) < best_simplicity
    }
    same_family = sorted((leaf for leaf in simpler_leaves if leaf.family == family), key=simplicity_key)
    for _, group in groupby(same_family, key=simplicity_key):
        ties = [estimate for estimate in map(cost_model.estimate, group) if estimate.fits and is_tie(estimate, best)]
        if ties:
            return min(ties, key=sort_key)
    return None


def _leaves_without_extras(cost_model: CostModel, best: Candidate, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield all leaves of the search space that have no option and no axis that `best` lacks."""
    profile, cluster = cost_model.profile, cost_model.cluster
    smaller_grid = replace(
        grid,
        schedules=tuple(name for name in grid.schedules if name in ("1f1b", best.schedule)),
        remat=tuple(name for name in grid.remat if name in ("none", best.remat)),
        offload=tuple(state for state in grid.offload if state in ((), best.offload)),
        sequence=tuple(choice for choice in grid.sequence if choice in (False, best.sequence)),
        zero=tuple(stage for stage in grid.zero if stage <= max(1, best.zero)),
    )
    for model_parallel_node in model_parallel_choices(profile, cluster, smaller_grid):
        if not _has_no_extra_axis(model_parallel_node, best):
            continue
        for recompute_node in recompute_choices(model_parallel_node, profile, smaller_grid):
            for microbatch_node in microbatch_choices(recompute_node, profile, smaller_grid):
                for schedule_node in schedule_choices(microbatch_node, profile, smaller_grid):
                    yield from (
                        leaf
                        for leaf in data_parallel_choices(schedule_node, profile, cluster, smaller_grid)
                        if _has_no_extra_option(leaf, best)
                    )


def _has_no_extra_axis(node: Candidate, best: Candidate) -> bool:
    """Return True if the node has no axis that `best` lacks, and at most one axis is larger than in `best`.

    If the node lacks axes of `best`, one other axis is larger by the product of their sizes.
    """
    sizes = [(getattr(node, axis), getattr(best, axis)) for axis in MODEL_AXES if axis != "ep"]
    sizes.append((node.replicas, best.replicas))
    if any(size > 1 and best_size == 1 for size, best_size in sizes) or node.ep not in (1, best.ep):
        return False
    freed_ranks = prod(best_size for size, best_size in sizes if size == 1)
    growth_factors = [size // best_size for size, best_size in sizes if size not in (1, best_size)]
    return not growth_factors if freed_ranks == 1 else growth_factors == [freed_ranks]


def _has_no_extra_option(leaf: Candidate, best: Candidate) -> bool:
    """Return True if every option of the leaf is the default or as in `best`, and it shards only if `best` does."""
    if best.dp_shard == 1 and leaf.dp_shard > 1:
        return False
    return all(getattr(leaf, name) in (default, getattr(best, name)) for name, default in _OPTIONS.items())
