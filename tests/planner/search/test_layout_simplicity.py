"""Which layouts are tight, which tie, and which of a tie is simpler."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.errors import LayoutError
from paceline.planner.advice.named_layouts import evaluate_named_layouts
from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.forecast_margins import bytes_margin, is_tie, seconds_error
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.step_time import StepTime
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.layout_simplicity import find_simpler_candidate, find_simplest_tie, simplicity_key
from paceline.planner.search.search_space import SearchSpace, candidates
from tests.planner.advice.test_named_layouts import made
from tests.planner.random_plans import forecast

FORECAST = made()


def took(candidate: Candidate, seconds: float, *, spread: float | None = None, steps: int = 24) -> Estimate:
    timed = None if spread is None else MeasuredTime(seconds=seconds, spread=spread, steps=steps, blocks=(32,))
    return replace(FORECAST.estimate(candidate), seconds=StepTime(compute=seconds), measured_time=timed)


DDP, FSDP, PP = Candidate(dp_replicate=8), Candidate(dp_shard=8, zero=3), Candidate(pp=8)
SIMPLE_FIRST = [
    DDP,
    Candidate(dp_shard=8, zero=1),
    FSDP,
    Candidate(dp_replicate=8, remat="full"),
    Candidate(dp_shard=8, zero=3, remat="full"),
    Candidate(dp_shard=8, zero=3, remat="full", offload=("optimizer",)),
    Candidate(tp=8),
    PP,
    Candidate(pp=8, schedule="gpipe"),
    Candidate(dp_replicate=2, dp_shard=4, zero=3),
    Candidate(pp=2, dp_replicate=4),
    Candidate(pp=2, dp_shard=4, zero=3),
    Candidate(pp=4, tp=2),
    Candidate(pp=2, tp=2, dp_replicate=2),
]


def test_the_order_of_simplicity() -> None:
    found = [simplicity_key(one) for one in SIMPLE_FIRST]
    assert found == sorted(found) and len({*found}) == len(found)


@pytest.mark.parametrize("simple", range(len(SIMPLE_FIRST) - 1))
def test_a_tie_goes_to_the_simpler_one_and_what_is_slower_than_the_error_does_not(simple: int) -> None:
    one, other = SIMPLE_FIRST[simple : simple + 2]
    assert find_simplest_tie([took(other, 1.0), took(one, 1.09)]).candidate == one
    assert find_simplest_tie([took(other, 1.0), took(one, 1.11)]).candidate == other
    assert find_simplest_tie([took(one, 1.0), took(other, 0.99), took(other, 0.98)]).candidate == one


@pytest.mark.parametrize(
    ("spreads", "steps", "error"),
    [
        ((0.0001, 0.0001), 24, 0.02),
        ((0.10, 0.10), 24, 2 * 1.86 * (0.02 / 24) ** 0.5),
        ((0.0, 0.05), 1, 2 * (0.1**2 + (1.86 * 0.05) ** 2) ** 0.5),
        ((None, 0.05), 24, 0.0),
        ((None, None), 24, 0.10),
        ((0.05, None), 24, 0.10),
    ],
)
def test_the_error_of_a_ratio(spreads: Sequence[float | None], steps: int, error: float) -> None:
    """Of two medians of steps it follows from what the steps span; a forecast does not overrule a clock."""
    one, quickest = (took(DDP, seconds, spread=spread, steps=steps) for seconds, spread in zip((2, 1), spreads))  # noqa: B905
    assert seconds_error(one, quickest) == pytest.approx(error)


@pytest.mark.parametrize(
    ("times", "mark"), [(-1.01, "fits"), (-0.99, "tight"), (0.0, "tight"), (0.99, "tight"), (1.01, "does not fit")]
)
def test_what_is_within_the_error_of_the_limit_is_tight(times: float, mark: str) -> None:
    """`times` is how far the peak is over the limit, in margins; the row, its words and its JSON say the same."""
    own = FORECAST.estimate(Candidate(dp_shard=8, zero=3, remat="full", precision="bf16"))
    assert own.margin_bytes == pytest.approx(0.05 * (own.peak_bytes - own.memory.reserve))
    device = replace(FORECAST.cluster.device, memory_bytes=own.peak_bytes - times * own.margin_bytes)
    near = CostModel(profile=FORECAST.profile, cluster=replace(FORECAST.cluster, device=device))
    found = evaluate_named_layouts(near, ["fsdp,remat=full"], micro_batch_size=1)
    (row,), told = found.rows, found.as_json()
    assert row.verdict == mark and f"{mark} " in "\n".join(found.lines())
    assert (told["plans"][0]["fits"], told["plans"][0]["tight"]) == (mark == "fits", mark == "tight")
    assert told["recommended"] == ("fsdp,remat=full" if mark == "fits" else None)
    assert ("tight: " in row.explanation) == (mark == "tight")


def test_a_replay_is_nearer_and_a_process_on_cpus_counts_as_a_whole() -> None:
    memory, gpu = FORECAST.estimate(FSDP).memory, FORECAST.cluster.device
    own = memory.peak_bytes - memory.reserve
    assert bytes_margin(memory, gpu, is_replayed=True) == pytest.approx(0.02 * own)
    assert bytes_margin(memory, replace(gpu, kind="cpu"), is_replayed=True) == pytest.approx(0.06 * memory.peak_bytes)


def test_where_all_that_is_left_is_tight_nothing_is_recommended() -> None:
    """It is refused with the line to type, so that no script takes it for a fit."""
    grid = SearchSpace(remat=("none",), offload=((),), schedules=("1f1b",), micro_batch_size=1)
    facts = replace(FORECAST.profile, tp_sizes=(), cp_sizes=(), refused={"pp": "one piece"})
    drawn = CostModel(profile=facts, cluster=FORECAST.cluster)
    least = min((drawn.estimate(one) for one in candidates(facts, drawn.cluster, grid)), key=lambda one: one.peak_bytes)
    device = replace(drawn.cluster.device, memory_bytes=least.peak_bytes + 0.5 * least.margin_bytes)
    with pytest.raises(LayoutError, match="no layout of 8B is certain to fit on") as caught:
        advise(CostModel(profile=facts, cluster=replace(drawn.cluster, device=device)), grid=grid)
    assert "tight: " in caught.value.cause and f"or try it: --layout {least.layout} --train." in caught.value.hint


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_a_family_gives_way_to_the_simplest_with_its_axes(seed: int) -> None:
    """As looking at every candidate finds it."""
    drawn, grid = forecast(seed)
    every = [drawn.estimate(one) for one in candidates(drawn.profile, drawn.cluster, grid)]
    for family, best in search(drawn, grid=grid).best.items():
        found = find_simpler_candidate(drawn, best, grid=grid)
        own = simplicity_key(best.candidate)
        plainer = [
            simplicity_key(one.candidate)
            for one in every
            if one.candidate.family == family and one.fits and is_tie(one, best)
            if one.candidate.replace(micro_batch_size=1, remat="none", schedule="1f1b", virtual=1, offload=(), params="fp32", sequence=False)
            == best.candidate.replace(micro_batch_size=1, remat="none", schedule="1f1b", virtual=1, offload=(), params="fp32", sequence=False)
            if one.candidate.remat in ("none", best.candidate.remat)
            if one.candidate.schedule in ("1f1b", best.candidate.schedule)
            if one.candidate.offload in ((), best.candidate.offload)
            if one.candidate.sequence <= best.candidate.sequence
            if one.candidate.params in ("fp32", best.candidate.params)
        ]  # fmt: skip
        if found is None:
            assert min(plainer) >= own
        else:
            assert found.fits and is_tie(found, best) and found.candidate.family == family
            assert simplicity_key(found.candidate) < own and simplicity_key(found.candidate) <= min(plainer)


def test_sequences_that_are_cut_are_planned_with_blocks_that_run_again() -> None:
    every = [*candidates(FORECAST.profile, FORECAST.cluster, SearchSpace(offload=((),)))]
    kinds = {one.remat for one in every if one.cp == 2 and one.pp == one.tp == 1}
    assert kinds == {"none", "selective", "full"}
    without, found = (FORECAST.estimate(Candidate(cp=2, dp_shard=4, zero=3, remat=name)) for name in ("none", "full"))
    assert found.seconds.again > 0 == without.seconds.again and found.peak_bytes < without.peak_bytes
    assert found.step_seconds > without.step_seconds
