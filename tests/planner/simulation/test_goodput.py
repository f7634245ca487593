"""Goodput under failures: the exact form against simulation, the best interval against search, both against papers."""

from dataclasses import replace
from math import inf, sqrt

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.planner.simulation.checkpoint_interval import (
    best_interval,
    best_interval_in_steps,
    daly_interval,
    young_interval,
)
from paceline.planner.simulation.goodput import (
    DAY_SECONDS,
    FailureModel,
    FailureSource,
    combined_failure_interval,
    goodput,
    useful_fraction_by_simulation,
)

MEANS = st.floats(10, 1e7)
many = settings(max_examples=200, deadline=None)


@st.composite
def hazards(draw: st.DrawFn) -> FailureModel:
    mean = draw(MEANS)
    return FailureModel(
        mean_seconds=mean,
        stall_seconds=draw(st.floats(1e-6, 1)) * mean,
        restart_seconds=draw(st.floats(0, 1)) * mean,
        write_seconds=draw(st.floats(0, 0.5)) * mean,
    )


def useful(hazard: FailureModel, interval: float) -> float:
    return goodput(hazard=hazard, interval_seconds=interval).useful


@pytest.mark.parametrize(
    ("mean", "stall", "restart", "write", "interval"),
    [
        (1000, 10, 0, 0, 140),
        (1000, 10, 100, 0, 140),
        (1000, 10, 100, 80, 140),
        (1000, 10, 0, 140, 140),  # a write that takes the whole interval
        (300, 50, 200, 60, 100),  # a bad cluster
        (100, 1, 5, 0, 300),  # far too long an interval
        (1e5, 1, 60, 30, 450),
    ],
)
def test_the_exact_form_is_what_chance_gives(
    mean: float, stall: float, restart: float, write: float, interval: float
) -> None:
    hazard = FailureModel(mean_seconds=mean, stall_seconds=stall, restart_seconds=restart, write_seconds=write)
    runs = [
        useful_fraction_by_simulation(hazard=hazard, interval_seconds=interval, segments=6000, seed=seed)
        for seed in range(8)
    ]
    middle = sum(runs) / len(runs)
    spread = sqrt(sum((run - middle) ** 2 for run in runs) / (len(runs) - 1) / len(runs))
    exact = useful(hazard, interval)
    assert abs(middle - exact) < 4 * spread + 1e-3 * exact, f"{middle} ± {spread}, by the form {exact}"
    assert spread < 0.02 * exact


def test_a_run_that_never_fails_loses_only_its_stalls() -> None:
    calm = FailureModel(mean_seconds=inf, stall_seconds=5, restart_seconds=100, write_seconds=20)
    found = goodput(hazard=calm, interval_seconds=95)
    assert (found.useful, found.saving, found.restarting, found.redone) == pytest.approx((0.95, 0.05, 0, 0))
    assert found.failures_a_day == 0
    assert useful_fraction_by_simulation(hazard=calm, interval_seconds=95, segments=1000, seed=0) == pytest.approx(
        0.95, rel=2e-3
    )
    assert best_interval(hazard=calm) == young_interval(hazard=calm) == daly_interval(hazard=calm) == inf


@many
@given(hazard=hazards(), share=st.floats(0.001, 4))
def test_the_parts_are_fractions_and_sum_to_one(hazard: FailureModel, share: float) -> None:
    interval = max(share * hazard.mean_seconds, hazard.write_seconds)
    found = goodput(hazard=hazard, interval_seconds=interval)
    parts = (found.useful, found.saving, found.restarting, found.redone)
    assert all(0 <= part <= 1 for part in parts) and sum(parts) == pytest.approx(1, abs=1e-9)


@many
@given(hazard=hazards(), other=st.floats(0.01, 100))
def test_no_interval_is_better_than_the_best(hazard: FailureModel, other: float) -> None:
    best = best_interval(hazard=hazard)
    tried = max(other * best, hazard.write_seconds)
    assert useful(hazard, best) >= useful(hazard, tried) * (1 - 1e-9)


@many
@given(hazard=hazards(), near=st.floats(0.05, 0.95), far=st.floats(1.05, 5))
def test_on_either_side_of_the_best_further_is_worse(hazard: FailureModel, near: float, far: float) -> None:
    best = best_interval(hazard=hazard)
    assert useful(hazard, best) > useful(hazard, far * best) > useful(hazard, 1.5 * far * best)
    assume(near * best > hazard.write_seconds)
    assert useful(hazard, best) > useful(hazard, near * best)


@many
@given(hazard=hazards(), share=st.floats(0.01, 3), factor=st.floats(1.01, 10))
def test_less_trouble_is_never_worse(hazard: FailureModel, share: float, factor: float) -> None:
    interval = max(share * hazard.mean_seconds, hazard.write_seconds * factor)
    of = {name: getattr(hazard, name) for name in ("mean_seconds", "stall_seconds", "restart_seconds", "write_seconds")}
    now = useful(hazard, interval)
    assert useful(FailureModel(**of | {"mean_seconds": factor * of["mean_seconds"]}), interval) > now
    for name in ("stall_seconds", "restart_seconds", "write_seconds"):
        assert useful(FailureModel(**of | {name: factor * of[name]}), interval) <= now


@many
@given(hazard=hazards(), factor=st.floats(1.01, 10))
def test_dearer_checkpoints_and_calmer_machines_want_them_further_apart(hazard: FailureModel, factor: float) -> None:
    plain = replace(hazard, write_seconds=0.0)
    best = best_interval(hazard=plain)
    assert best_interval(hazard=replace(plain, stall_seconds=factor * plain.stall_seconds)) > best
    assert best_interval(hazard=replace(plain, mean_seconds=factor * plain.mean_seconds)) > best
    assert best_interval(hazard=replace(plain, restart_seconds=factor * plain.restart_seconds)) == best
    assert best < plain.mean_seconds * (1 + 1e-12), "never longer than what lies between two failures"


@many
@given(hazard=hazards(), share=st.floats(0.01, 3), scale=st.floats(1e-3, 1e3))
def test_the_clock_does_not_matter(hazard: FailureModel, share: float, scale: float) -> None:
    """Hours for seconds everywhere change no fraction."""
    interval = max(share * hazard.mean_seconds, 1.001 * hazard.write_seconds)
    of = ("mean_seconds", "stall_seconds", "restart_seconds", "write_seconds")
    other = FailureModel(**{name: scale * getattr(hazard, name) for name in of})
    assert useful(other, scale * interval) == pytest.approx(useful(hazard, interval), rel=1e-9)
    assert best_interval(hazard=other) == pytest.approx(scale * best_interval(hazard=hazard), rel=1e-9)


@many
@given(counts=st.lists(st.tuples(st.integers(0, 10_000), MEANS), max_size=5), more=st.integers(1, 1000), mean=MEANS)
def test_more_parts_fail_more_often_in_any_order(counts: list[tuple[int, float]], more: int, mean: float) -> None:
    parts = [FailureSource(name=f"part {n}", count=count, mean_seconds=each) for n, (count, each) in enumerate(counts)]
    alone = combined_failure_interval(parts)
    assert combined_failure_interval(parts[::-1]) == pytest.approx(alone)
    assert combined_failure_interval([*parts, FailureSource(name="more", count=more, mean_seconds=mean)]) < alone


def test_the_papers_approximations_lie_where_they_are_said_to() -> None:
    for ratio, of_young, of_daly in [(1e-5, 4e-3, 1e-5), (1e-3, 4e-2, 5e-4), (0.1, 0.4, 0.05)]:
        hazard = FailureModel(mean_seconds=1e4, stall_seconds=ratio * 1e4)
        best = best_interval(hazard=hazard)
        assert young_interval(hazard=hazard) == pytest.approx(sqrt(2 * ratio) * 1e4)
        assert (
            abs(daly_interval(hazard=hazard) / best - 1)
            < of_daly
            < abs(young_interval(hazard=hazard) / best - 1)
            < of_young
        )
        assert young_interval(hazard=hazard) > best, "Young's is too long"
    assert daly_interval(hazard=FailureModel(mean_seconds=10, stall_seconds=20)) == 10


def test_the_best_interval_by_hand() -> None:
    """(1 - u) e^(u + d) = 1 at u = 1/2 gives d = log 2 - 1/2."""
    hazard = FailureModel(mean_seconds=1000, stall_seconds=1000 * 0.1931471805599453)
    assert best_interval(hazard=hazard) == pytest.approx(500, rel=1e-12)
    assert best_interval(hazard=FailureModel(mean_seconds=1e12, stall_seconds=1e-9)) == pytest.approx(
        sqrt(2e3), rel=1e-9
    )
    assert best_interval(hazard=FailureModel(mean_seconds=1, stall_seconds=1e4)) == pytest.approx(1)
    assert best_interval(hazard=FailureModel(mean_seconds=100, stall_seconds=0)) == 0


def test_a_write_is_never_overtaken_by_the_next_one() -> None:
    slow = FailureModel(mean_seconds=1e5, stall_seconds=0.78, write_seconds=3600)
    assert best_interval(hazard=slow) == 3600
    with pytest.raises(UsageError, match="every 60 s takes 3600 s"):
        goodput(hazard=slow, interval_seconds=60)


def test_whole_steps() -> None:
    hazard = FailureModel(mean_seconds=1e4, stall_seconds=10)
    best = best_interval(hazard=hazard)
    steps = best_interval_in_steps(hazard=hazard, step_seconds=7)
    tried = range(1, 300)
    assert steps == max(tried, key=lambda n: useful(hazard, 7 * n)) and abs(7 * steps - best) < 7
    assert best_interval_in_steps(hazard=hazard, step_seconds=1e4) == 1
    slow = FailureModel(mean_seconds=1e5, stall_seconds=0.1, write_seconds=1000)
    assert best_interval_in_steps(hazard=slow, step_seconds=300) == 4, "the write has to be done"
    with pytest.raises(UsageError, match="nothing ever fails"):
        best_interval_in_steps(hazard=FailureModel(mean_seconds=inf, stall_seconds=1), step_seconds=1)


QUOTIENT_ROUNDED_UP = FailureModel(mean_seconds=10.0, stall_seconds=1.25, write_seconds=10 * 0.4950582650927007)


@many
@given(hazard=hazards(), step=st.floats(1e-3, 1e3))
@example(hazard=QUOTIENT_ROUNDED_UP, step=0.4950582650927007)
def test_no_other_number_of_steps_is_better(hazard: FailureModel, step: float) -> None:
    steps = best_interval_in_steps(hazard=hazard, step_seconds=step)
    here = useful(hazard, steps * step)
    for other in (steps - 1, steps + 1, 2 * steps):
        if other and other * step >= hazard.write_seconds:
            assert here >= useful(hazard, other * step) * (1 - 1e-9)


def test_rates_of_parts_add_up() -> None:
    """Llama 3 405B on 16,384 devices: 419 unexpected interruptions in 54 days, over 90 % of the time effective."""
    of_one = 16_384 * 54 * DAY_SECONDS / 419
    mean = combined_failure_interval([FailureSource(name="H100", count=16_384, mean_seconds=of_one)])
    assert mean / 3600 == pytest.approx(3.09, abs=0.01)
    nodes = FailureSource(name="host", count=2048, mean_seconds=2048 * mean)
    assert combined_failure_interval(
        [FailureSource(name="H100", count=16_384, mean_seconds=of_one), nodes]
    ) == pytest.approx(mean / 2)
    assert combined_failure_interval([]) == inf
    hazard = FailureModel(mean_seconds=mean, stall_seconds=5, restart_seconds=600, write_seconds=60)
    assert 0.9 < useful(hazard, best_interval(hazard=hazard)) < 0.93


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mean_seconds": 0}, "more than 0"),
        ({"mean_seconds": float("nan")}, "more than 0"),
        ({"stall_seconds": -1}, "stall_seconds=-1"),
        ({"restart_seconds": inf}, "restart_seconds=inf"),
        ({"write_seconds": float("nan")}, "write_seconds=nan"),
    ],
)
def test_a_hazard_of_nonsense_is_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        FailureModel(**{"mean_seconds": 1000, "stall_seconds": 1} | given)


def test_other_nonsense_is_refused() -> None:
    hazard = FailureModel(mean_seconds=1000, stall_seconds=1)
    for interval in (0, -5, inf, float("nan")):
        with pytest.raises(UsageError, match="interval_seconds="):
            goodput(hazard=hazard, interval_seconds=interval)
    for step in (0, float("nan"), inf):
        with pytest.raises(UsageError, match="step_seconds="):
            best_interval_in_steps(hazard=hazard, step_seconds=step)
    for part in (
        FailureSource(name="GPU", count=-1, mean_seconds=1),
        FailureSource(name="GPU", count=8, mean_seconds=0),
    ):
        with pytest.raises(UsageError, match="'GPU'"):
            combined_failure_interval([part])


def test_an_interval_that_never_ends_leaves_nothing() -> None:
    found = goodput(hazard=FailureModel(mean_seconds=1, stall_seconds=1), interval_seconds=1e6)
    assert found.useful == 0 and found.redone == 1
