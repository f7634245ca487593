"""Order of layouts by simplicity, and search for the simplest layout that ties with the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from math import prod

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import is_tie
from paceline.planner.cost.layout_candidate import FAMILIES, MODEL_AXES, Candidate
from paceline.planner.search.branch_and_bound import key_of
from paceline.planner.search.search_space import (
    SearchSpace,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)

_AXES = (*MODEL_AXES, "dp_replicate", "dp_shard")
_NO_OPTION = {*_AXES, "zero", "virtual", "micro_batch_size", "precision"}
_OPTIONS = {field.name: field.default for field in fields(Candidate) if field.name not in _NO_OPTION}
Simplicity = tuple[int, int, int, int, int]


def simplicity(candidate: Candidate) -> Simplicity:
    """Return a sort key, smaller for simpler: axes, model axes, options, the family's place, the ZeRO stage."""
    options = sum(getattr(candidate, name) != usual for name, usual in _OPTIONS.items())
    cuts = sum(getattr(candidate, axis) > 1 for axis in MODEL_AXES)
    return len(candidate.mesh.split), cuts, options, FAMILIES.index(candidate.family), candidate.zero


def simplest(estimates: Sequence[Estimate]) -> Estimate:
    """Return the simplest of the estimates that tie with the fastest; of equally simple ones the fastest."""
    quickest = min(estimates, key=key_of)
    alike = [one for one in estimates if one is quickest or is_tie(one, quickest)]
    return min(alike, key=lambda one: (simplicity(one.candidate), key_of(one)))


def simpler(forecast: CostModel, best: Estimate, *, grid: SearchSpace) -> Estimate | None:
    """Return the simplest candidate of the same family that fits and ties with `best`, None if none is simpler.

    The result has fewer options than `best`, or one axis fewer, whose ranks moved to another axis.
    """
    own, family = simplicity(best.candidate), best.candidate.family
    plainer = {leaf for leaf in _plainer(forecast, best.candidate, grid) if simplicity(leaf) < own}
    ordered = sorted((leaf for leaf in plainer if leaf.family == family), key=simplicity)
    for _, group in groupby(ordered, key=simplicity):
        found = [one for one in map(forecast.estimate, group) if one.fits and is_tie(one, best)]
        if found:
            return min(found, key=key_of)
    return None


def _plainer(forecast: CostModel, best: Candidate, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield all leaves of the grid with no option and no axis that `best` lacks."""
    facts, fleet = forecast.facts, forecast.fleet
    less = replace(
        grid,
        schedules=tuple(name for name in grid.schedules if name in ("1f1b", best.schedule)),
        remat=tuple(name for name in grid.remat if name in ("none", best.remat)),
        offload=tuple(what for what in grid.offload if what in ((), best.offload)),
        sequence=tuple(one for one in grid.sequence if one in (False, best.sequence)),
        zero=tuple(stage for stage in grid.zero if stage <= max(1, best.zero)),
    )
    for trunk in model_parallel_choices(facts, fleet, less):
        if not _is_moved(trunk, best):
            continue
        for bough in recompute_choices(trunk, facts, less):
            for branch in microbatch_choices(bough, facts, less):
                for twig in schedule_choices(branch, facts, less):
                    yield from (
                        leaf for leaf in data_parallel_choices(twig, facts, fleet, less) if _has_no_more(leaf, best)
                    )


def _is_moved(trunk: Candidate, best: Candidate) -> bool:
    """Return True if `trunk` has the model axes of `best`, or lacks some, and one other axis has their ranks."""
    sizes = [(getattr(trunk, axis), getattr(best, axis)) for axis in MODEL_AXES if axis != "ep"]
    sizes.append((trunk.replicas, best.replicas))
    if any(own > 1 and other == 1 for own, other in sizes) or trunk.ep not in (1, best.ep):
        return False
    gone = prod(other for own, other in sizes if own == 1)
    changed = [own // other for own, other in sizes if own not in (1, other)]
    return not changed if gone == 1 else changed == [gone]


def _has_no_more(leaf: Candidate, best: Candidate) -> bool:
    if best.dp_shard == 1 and leaf.dp_shard > 1:
        return False
    return all(getattr(leaf, name) in (usual, getattr(best, name)) for name, usual in _OPTIONS.items())
