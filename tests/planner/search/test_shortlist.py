"""Which candidates a plan times, and what it concludes from the times."""

import json
from dataclasses import asdict, replace
from functools import cache
from statistics import median

import pytest

from paceline.config.layout import parse_layout
from paceline.planner.advice.recommendations import build_advice
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.search_space import SearchSpace, candidates
from paceline.planner.search.shortlist import (
    MAX_TRIALS,
    apply_measured_times,
    parse_measured_times,
    shortlist,
    timing_order,
    timing_trial,
)
from tests.planner.random_plans import forecast

SEEDS = range(12)


@cache
def shortlisted(seed: int) -> list[Estimate]:
    drawn, grid = forecast(seed)
    return shortlist(drawn, grid=grid)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_every_family_is_timed_and_the_quickest_first(seed: int) -> None:
    drawn, grid = forecast(seed)
    found = shortlisted(seed)
    best = search(drawn, grid=grid).best
    quickest: dict[str, float] = {}
    for one in found:
        quickest.setdefault(one.candidate.family, one.step_seconds)
    plain = {family: one for family, one in best.items() if one.candidate.remat == "none"}
    assert {*quickest} == {*best}
    assert all(quickest[family] == pytest.approx(one.step_seconds) for family, one in plain.items())
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    assert len({str(one.candidate) for one in found}) == len(found) <= max(MAX_TRIALS, len(best))


@pytest.mark.parametrize("seed", SEEDS)
def test_time_goes_first_to_one_of_each_family_that_may_be_the_quickest(seed: int) -> None:
    found = shortlisted(seed)
    turns = timing_order(found[::-1])
    near = {one.candidate.family for one in found if one.step_seconds <= 1.6 * found[0].step_seconds}
    first, rest = turns[: len(near)], turns[len(near) :]
    assert {one.candidate.family for one in first} == near
    for own in (first, rest):
        assert [one.step_seconds for one in own] == sorted(one.step_seconds for one in own)
    assert sorted(map(str, (one.candidate for one in turns))) == sorted(map(str, (one.candidate for one in found)))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_run_again_only_where_what_they_keep_does_not_fit(seed: int) -> None:
    drawn, grid = forecast(seed)
    fits = {one for one in candidates(drawn.profile, drawn.cluster, grid or SearchSpace()) if drawn.estimate(one).fits}
    for one in shortlisted(seed):
        assert one.candidate.remat == "none" or replace(one.candidate, remat="none") not in fits


def test_what_was_timed_replaces_the_forecast_and_the_rest_is_as_wrong() -> None:
    drawn, grid = next(pair for pair in map(forecast, range(60)) if len(shortlist(pair[0], grid=pair[1])) > 3)
    found = shortlist(drawn, grid=grid)
    timed = {
        str(one.candidate): MeasuredTime(seconds=one.step_seconds * (5 - n), spread=0.1, steps=9, blocks=(2, 4))
        for n, one in enumerate(found[:3])
    }
    after = {str(one.candidate): one for one in apply_measured_times(found, timed)}
    for one in found:
        own = after[str(one.candidate)]
        ratio = own.step_seconds / one.step_seconds
        expected = timed[str(one.candidate)].seconds / one.step_seconds if one in found[:3] else median([5, 4, 3])
        assert ratio == pytest.approx(expected)
        assert own.seconds.compute == pytest.approx(one.seconds.compute * ratio)
        assert own.memory == one.memory and own.measured_time == timed.get(str(one.candidate))
    assert [one.step_seconds for one in apply_measured_times(found, timed)] == sorted(
        one.step_seconds for one in after.values()
    )


def test_advice_recommends_what_was_the_quickest_where_it_ran() -> None:
    drawn, grid = next(
        pair for pair in map(forecast, range(60)) if len({*search(pair[0], grid=pair[1]).best}) > 2
    )  # fmt: skip
    found = shortlist(drawn, grid=grid)
    last = found[-1]
    timed = {
        str(one.candidate): MeasuredTime(seconds=1.0 if one is last else 2.0, spread=0.0, steps=1, blocks=(4,))
        for one in found
    }
    advice = build_advice(drawn, apply_measured_times(found, timed), grid=grid)
    assert advice.recommended.candidate == last.candidate and advice.recommended.step_seconds == pytest.approx(1.0)
    assert "1.00 s timed" in "\n".join(advice.lines())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_stage_of_what_is_tried_has_two_blocks_and_its_layout_can_be_typed(seed: int) -> None:
    for one in shortlisted(seed):
        told = timing_trial(one)
        assert told.min_blocks >= 2 * one.candidate.pp * one.candidate.virtual
        assert parse_layout(told.layout).sizes == one.candidate.layout_spec.sizes
        assert 0 < told.peak_fraction <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_kept_is_read_as_it_was(seed: int) -> None:
    found = shortlisted(seed)
    timed = {
        str(one.candidate): MeasuredTime(
            seconds=one.step_seconds * n, spread=0.1, steps=9, blocks=(2, 4), between=(1, 2)
        )
        for n, one in enumerate(found[:2], start=1)
    }
    assert parse_measured_times(json.loads(json.dumps({name: asdict(one) for name, one in timed.items()}))) == timed


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_asked_for_is_on_the_list_however_slow_it_is_thought(seed: int) -> None:
    drawn, grid = forecast(seed)
    found = shortlisted(seed)
    wide = shortlist(drawn, grid=grid, max_trials=10_000)
    others = [one for one in wide if one not in found][:2]
    slow = CostModel(
        profile=drawn.profile, cluster=replace(drawn.cluster, longer={one.candidate.family: 40.0 for one in found})
    )
    names = {str(one.candidate) for one in [*others, *found]}
    assert names == {str(one.candidate) for one in shortlist(drawn, grid=grid, extra_candidates=names)}
    assert names <= {str(one.candidate) for one in shortlist(slow, grid=grid, extra_candidates=names)}
