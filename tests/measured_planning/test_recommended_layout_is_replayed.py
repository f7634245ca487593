"""What a plan recommends was replayed, and what a replay refuses gives way to the next of its family: with replays that
say what the test wants."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from paceline.measured_planning.choose_layout import ChosenLayout, choose_layout, choose_named_layouts
from paceline.measured_planning.finalist_replay import CandidateChecker, CheckedCandidate
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.search_space import SearchSpace
from tests.planner.advice.test_named_layouts import made

FORECAST = made()
GRID = SearchSpace(schedules=("1f1b",), offload=((),), sequence=(False,), remat=("none", "full"))
LATE = float("-inf")
EARLY = float("inf")
Answers = Callable[[Estimate], CheckedCandidate]


class Replays:
    """A rehearsal that answers at once, and counts."""

    def __init__(self, answers: Answers, *, alone: Callable[[Candidate], str] = lambda _: "") -> None:
        self.answers, self.alone = answers, alone
        self.asked: list[Candidate] = []

    def replay(self, estimate: Estimate, forecast: CostModel) -> CheckedCandidate:
        self.asked.append(estimate.candidate)
        return self.answers(estimate)

    def refusal_reason(self, candidate: Candidate, forecast: CostModel) -> str:
        return self.alone(candidate)

    def count_replayed_blocks(self, candidate: Candidate, cut: tuple[int, ...], forecast: CostModel) -> int:
        return 1

    def is_split_error(self, candidate: Candidate, error: str) -> bool:
        return False


def held(estimate: Estimate, num_bytes: float) -> CheckedCandidate:
    return CheckedCandidate(
        layout=estimate.layout, peak_bytes=round(num_bytes), parts={"activations": round(num_bytes)}
    )


def as_forecast(estimate: Estimate) -> CheckedCandidate:
    return held(estimate, estimate.peak_bytes - estimate.memory.reserve)


def refused(estimate: Estimate, error: str) -> CheckedCandidate:
    return CheckedCandidate(layout=estimate.layout, error=error)


def decided(answers: Answers, *, until: float = LATE, forecast: CostModel = FORECAST, **given: Any) -> Any:
    replays = Replays(answers, **{name: given.pop(name) for name in ("alone",) if name in given})
    found: ChosenLayout = choose_layout(cast(CandidateChecker, replays), forecast, grid=GRID, deadline=until, **given)
    return found, replays


def test_what_is_recommended_is_replayed_though_time_was_over_before_it_began() -> None:
    """The first five are refused, each in other words."""
    left = iter(range(5))

    def answers(estimate: Estimate) -> CheckedCandidate:
        turn = next(left, None)
        return as_forecast(estimate) if turn is None else refused(estimate, "why " + "x" * turn)

    found, replays = decided(answers)
    assert found.best is not None and not found.best.error and not found.advice.not_replayed_reason
    assert len(replays.asked) == 6 and found.advice.recommended.candidate == replays.asked[-1]


def test_after_a_dozen_refusals_it_says_loudly_that_it_was_not_replayed() -> None:
    """Of time enough it goes on; the answer's headline and its JSON say the same."""
    turns = iter(range(10**6))
    found, replays = decided(lambda one: refused(one, "why " + "x" * next(turns)))
    assert len(replays.asked) == 12 and found.best is None
    assert (
        found.advice.not_replayed_reason
        == "12 better layouts were refused or did not fit in replay, and the time limit was reached"
    )
    told, text = found.advice.as_json(), "\n".join(found.advice.lines())
    assert told["replayed"] is False and told["unreplayed"] == found.advice.not_replayed_reason
    assert f"recommended, NOT REPLAYED ({found.advice.not_replayed_reason}): --layout" in text


def test_a_size_that_needs_too_much_gives_way_to_the_next_of_its_family() -> None:
    """Microbatches of fsdp hold twice their forecast: another family's sizes are as they were."""
    first = decided(as_forecast)[0].advice.recommended
    family = first.candidate.family

    def answers(estimate: Estimate) -> CheckedCandidate:
        own = estimate.candidate == first.candidate
        return held(estimate, 79 * 2**30) if own else as_forecast(estimate)

    found, replays = decided(answers, until=EARLY, replay_others=True)
    assert replays.asked[0] == first.candidate
    others = {row.family: row.estimate.candidate for row in found.advice.rows if row.fits}
    assert family in others and others[family] != first.candidate, "its next one is in the table"
    assert str(others[family]) in found.replays and not found.replays[str(others[family])].error
    assert not any(word.startswith("family=") for word in found.forecast.profile.refused)
    assert found.forecast.cluster.fuller[family] > 1 and {*found.forecast.cluster.fuller} == {family}


@pytest.mark.parametrize(("share", "is_sure"), [(0.97, True), (0.99, False), (1.01, False)])
def test_a_replay_near_the_limit_is_no_fit(share: float, is_sure: bool) -> None:
    """Replays may be 2 % off."""
    first = decided(as_forecast)[0].advice.recommended
    device = FORECAST.cluster.device
    room = device.memory_bytes - device.reserve_bytes

    def answers(estimate: Estimate) -> CheckedCandidate:
        return held(estimate, share * room) if estimate.candidate == first.candidate else as_forecast(estimate)

    found, _ = decided(answers)
    assert (found.advice.recommended.candidate == first.candidate) is is_sure


def test_two_layouts_of_a_family_that_are_refused_in_the_same_words_are_enough() -> None:
    """A third is not asked; the family's reason stands in the answer, and mixtures without it go on."""

    def answers(estimate: Estimate) -> CheckedCandidate:
        size = estimate.candidate.micro_batch_size
        return refused(estimate, f"no pp of {size}") if estimate.candidate.pp > 1 else as_forecast(estimate)

    def alone(candidate: Candidate) -> str:
        return "no pp at all" if candidate.pp > 1 else ""

    found, replays = decided(answers, until=EARLY, replay_others=True, alone=alone)
    assert 2 <= sum(one.pp > 1 for one in replays.asked) <= 6
    assert "pp" in found.forecast.profile.refused and all(row.family != "pp" for row in found.advice.rows)
    assert any(line.startswith("pp: no pp") for line in found.advice.missing)
    assert all(not found.replays[str(row.estimate.candidate)].error for row in found.advice.rows if row.fits)


def test_one_size_of_an_axis_that_is_refused_leaves_its_others() -> None:
    def answers(estimate: Estimate) -> CheckedCandidate:
        return refused(estimate, "no eight") if estimate.candidate.tp == 8 else as_forecast(estimate)

    def alone(candidate: Candidate) -> str:
        return "no eight" if candidate.tp == 8 else ""

    options = [FORECAST.estimate(Candidate(tp=8, micro_batch_size=4, precision="bf16", remat="full"))]
    found, replays = decided(answers, until=EARLY, replay_others=True, alone=alone, options=options)
    assert replays.asked[0].tp == 8 and "tp=8" in found.forecast.profile.refused
    assert "tp" not in found.forecast.profile.refused
    assert any(row.estimate.candidate.tp in (2, 4) for row in found.advice.rows)


def test_an_option_that_was_refused_is_replaced_by_the_next_of_its_family() -> None:
    """Options are what was timed here: fsdp had one, which is refused; it stays in the table by another."""
    names = [Candidate(dp_shard=8, zero=3, remat="full", micro_batch_size=size, precision="bf16") for size in (1, 2)]
    options = [FORECAST.estimate(names[1])]

    def answers(estimate: Estimate) -> CheckedCandidate:
        return refused(estimate, "not so") if estimate.candidate == names[1] else as_forecast(estimate)

    found, replays = decided(answers, options=options)
    assert replays.asked[0] == names[1]
    assert "fsdp" in {row.family for row in found.advice.rows if row.fits}


def test_a_named_layout_that_needs_too_much_is_replayed_with_smaller_microbatches() -> None:
    layouts = ["fsdp,remat=full", "single"]

    def answers(estimate: Estimate) -> CheckedCandidate:
        return held(estimate, (70 if estimate.candidate.micro_batch_size == 1 else 90) * 2**30)

    replays = Replays(answers)
    found, seen = choose_named_layouts(cast(CandidateChecker, replays), FORECAST, layouts, deadline=LATE)
    best = found.recommended
    assert best is not None and best.candidate.micro_batch_size == 1 and str(best.candidate) in seen
    assert [one.micro_batch_size for one in replays.asked][-1] == 1 and len(replays.asked) > 1
    assert found.as_json()["replayed"] is True and "NOT REPLAYED" not in "\n".join(found.lines())


def test_of_named_layouts_with_their_microbatch_one_that_does_not_fit_is_not_recommended() -> None:
    replays = Replays(lambda one: held(one, 77.5 * 2**30))
    found, _ = choose_named_layouts(
        cast(CandidateChecker, replays), FORECAST, ["fsdp,remat=full"], deadline=LATE, micro_batch_size=1
    )
    assert found.recommended is None and found.as_json()["recommended"] is None
    (row,) = found.as_json()["plans"]
    assert row["replayed"] and not row["fits"] and row["tight"]
    assert "tight " in "\n".join(found.lines()) and "the forecast may be 1.5 GiB off" in row["why"]
