"""Closed forms of the schedules against their programs."""

import random

import pytest

from paceline.planner.cost.pipeline_formulas import (
    LOOPED_SCHEDULES,
    MODELED_SCHEDULES,
    StageTimes,
    count_in_flight,
    has_reliable_makespan,
    makespan,
    max_in_flight,
)
from paceline.schedule import SCHEDULES, Costs, build, simulate

_VIRTUAL = {
    name: (2, 3, 4) if name in LOOPED_SCHEDULES else (2,) if name == "zbv" else (1,) for name in MODELED_SCHEDULES
}
_WRONG = {"naive": 0.001, "gpipe": 0.001, "1f1b": 0.10}  # how far off with uneven stages and slow messages
_NEAR = 0.20


def _drawn(name: str, seed: int) -> tuple[random.Random, int, int, int]:
    draw = random.Random(f"{name} {seed}")
    while True:
        ranks, micro, virtual = draw.randint(1, 7), draw.randint(1, 30), draw.choice(_VIRTUAL[name])
        if has_reliable_makespan(name, ranks=ranks, micro=micro):
            return draw, ranks, micro, virtual


def test_every_schedule_has_a_form() -> None:
    assert set(MODELED_SCHEDULES) == set(SCHEDULES)


@pytest.mark.parametrize("name", MODELED_SCHEDULES)
def test_what_is_held_is_what_the_program_holds(name: str) -> None:
    for virtual in _VIRTUAL[name]:
        for ranks in range(1, 7):
            for micro in range(1, 3 * ranks + 3):
                if name == "zbv" and not has_reliable_makespan(name, ranks=ranks, micro=micro):
                    continue
                program = build(name, ranks=ranks, micro=micro, virtual=virtual)
                for rank in range(ranks):
                    form = max_in_flight(name, ranks=ranks, micro=micro, virtual=virtual, rank=rank)
                    assert form == count_in_flight(program, rank), (virtual, ranks, micro, rank)


@pytest.mark.parametrize("name", MODELED_SCHEDULES)
def test_the_programs_own_line_holds_what_its_simulation_holds(name: str) -> None:
    program = build(name, ranks=4, micro=9)
    held = simulate(program).peak_activations()
    assert [count_in_flight(program, rank) for rank in range(4)] == list(held)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", MODELED_SCHEDULES)
def test_equal_stages_take_what_the_simulation_takes(name: str, seed: int) -> None:
    draw, ranks, micro, virtual = _drawn(name, seed)
    forward, back = draw.uniform(0.5, 2), draw.uniform(1, 1.4)
    seconds = {"forward": forward, "backward_input": forward * back, "backward_weight": forward * draw.uniform(0.8, 1)}
    found = simulate(build(name, ranks=ranks, micro=micro, virtual=virtual), costs=Costs(**seconds)).makespan
    turns = StageTimes(**{part: [each] * (ranks * virtual) for part, each in seconds.items()})
    assert makespan(name, turns, ranks=ranks, micro=micro, virtual=virtual) == pytest.approx(found)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", MODELED_SCHEDULES)
def test_uneven_stages_and_messages_are_near_the_simulation(name: str, seed: int) -> None:
    draw, ranks, micro, virtual = _drawn(name, 100 + seed)
    blocks = [draw.choice([4, 5]) for _ in range(ranks * virtual)]
    back, weight = draw.uniform(1, 1.4), draw.uniform(0.7, 1)
    costs = {
        "forward": blocks,
        "backward_input": [back * n for n in blocks],
        "backward_weight": [weight * n for n in blocks],
    }
    hop = draw.uniform(0, 1)
    program = build(name, ranks=ranks, micro=micro, virtual=virtual)
    found = simulate(program, costs=Costs(**costs, transfer=hop)).makespan
    form = makespan(name, StageTimes(**costs, hop_seconds=hop), ranks=ranks, micro=micro, virtual=virtual)
    assert form == pytest.approx(found, rel=_WRONG.get(name, _NEAR))


@pytest.mark.parametrize("name", MODELED_SCHEDULES)
def test_no_stage_that_gets_slower_makes_the_pipeline_quicker(name: str) -> None:
    for seed in range(20):
        draw, ranks, micro, virtual = _drawn(name, 200 + seed)
        stages = ranks * virtual
        seconds = {
            part: [draw.uniform(1, 2) for _ in range(stages)]
            for part in ("forward", "backward_input", "backward_weight")
        }
        hop, place, part = draw.uniform(0, 1), draw.randrange(stages), draw.choice(["forward", "backward_input"])

        def total(found: dict[str, list[float]], hop: float = hop, ranks: int = ranks, m: int = micro) -> float:
            return makespan(
                name,
                StageTimes(**found, hop_seconds=hop),
                ranks=ranks,
                micro=m,
                virtual=len(found["backward_input"]) // ranks,
            )

        before = total(seconds)
        slower = {**seconds, part: [s + (i == place) * draw.random() for i, s in enumerate(seconds[part])]}
        assert total(slower) >= before * (1 - 1e-12)
        assert total(seconds, hop=hop * 2) >= before
        assert total(seconds, m=micro + 1) > before
