"""A measured schedule has the spans of all ranks on one clock, and the plan's times for the same actions."""

import pytest

from paceline.commands.compare import compare
from paceline.errors import UsageError
from paceline.measured_planning.timing.schedule_benchmark import build_timeline, median_costs
from paceline.schedule.action_walk import Costs
from paceline.schedule.program import Op
from paceline.schedule.program_simulation import simulate
from paceline.schedule.registry import build


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "gpipe"])
def test_what_was_simulated_comes_back(name: str) -> None:
    program = build(name, ranks=3, micro=5)
    given = Costs(forward=[1.0, 2.0, 3.0], backward_input=[2.0, 1.0, 2.0], backward_weight=[1.0, 2.0, 1.0])
    found = simulate(program, costs=given)
    heard = [
        [
            [str(span.action.op), span.action.stage, span.action.microbatch, 100 + span.start, 100 + span.stop]
            for span in found.compute_spans
            if span.rank == rank
        ]
        for rank in range(3)
    ]
    again = build_timeline(heard, name="again")
    assert again.start == 0 and again.bubble == pytest.approx(found.bubble)
    learnt = simulate(program, costs=median_costs(again, program))
    assert learnt.makespan == pytest.approx(found.makespan)
    assert {span.action.op for span in again.compute_spans} >= {Op.FORWARD}


def test_from_python_the_job_is_named() -> None:
    with pytest.raises(UsageError, match="one job, got 2"):
        compare("a.py", "b.py", layouts=["ddp", "fsdp"])  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="expected the path of a job"):
        compare(object(), layouts=["ddp", "fsdp"])  # type: ignore[call-overload]
