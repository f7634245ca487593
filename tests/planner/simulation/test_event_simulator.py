"""The simulation of a step in virtual time agrees with hand-computed times and with closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError, UsageError
from paceline.planner.simulation import event_simulator as module
from paceline.planner.simulation.checkpoint_interval import best_interval
from paceline.planner.simulation.event_simulator import SimulatedStep, SlowRank, simulate_step
from paceline.planner.simulation.goodput import DAY_SECONDS, FailureModel, goodput
from paceline.planner.simulation.overlap import Collective, StepPoint
from paceline.schedule import SCHEDULES, Costs, Program, ScheduleError, build, draw, forward_only, simulate
from paceline.schedule.closed_forms import PipelineCase, bubble_fraction
from tests.work_count import count_calls

RANKS, MICRO = st.integers(1, 6), st.integers(1, 12)
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.75])
OVERLAP = st.floats(0, 1)
SLACK = 1 + 1e-9
many = settings(max_examples=60, deadline=None)
names = pytest.mark.parametrize("name", SCHEDULES)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return build(draw(st.sampled_from([*SCHEDULES])), ranks=draw(RANKS), micro=draw(MICRO))


@st.composite
def times(draw: st.DrawFn) -> Costs:
    positive = st.sampled_from([0.25, 0.5, 1.0, 1.75])
    one, two, three = draw(positive), draw(positive), draw(positive)
    return Costs(forward=one, backward_input=two, backward_weight=three, transfer=draw(SECONDS), latency=draw(SECONDS))


@st.composite
def exchanges(draw: st.DrawFn) -> list[Collective]:
    kinds = draw(st.lists(st.sampled_from([*StepPoint]), max_size=5))
    return [
        Collective(name=f"c{n}", point=k, seconds=draw(SECONDS), overlap=draw(OVERLAP)) for n, k in enumerate(kinds)
    ]


@names
@many
@given(ranks=RANKS, micro=MICRO, forward=st.sampled_from([0.5, 1.0, 2.0]))
def test_with_free_communication_it_is_the_closed_form(name: str, ranks: int, micro: int, forward: float) -> None:
    program = build(name, ranks=ranks, micro=micro)
    case = PipelineCase(
        ranks=ranks,
        micro=micro,
        virtual=program.num_stages // ranks,
        forward=forward,
        backward_input=forward,
        backward_weight=forward,
    )
    found = simulate_step(program, costs=Costs(forward=forward, backward_input=forward, backward_weight=forward))
    makespan = SCHEDULES[name].makespan(case)
    if makespan is not None:
        assert found.step_seconds == pytest.approx(makespan, rel=1e-12)
        assert found.bubble == pytest.approx(bubble_fraction(SCHEDULES[name].makespan, case), abs=1e-12)
    assert found.exposed == 0 and found.slow_seconds == 0


@many
@given(program=programs(), costs=times())
def test_with_messages_alone_it_is_the_simulation(program: Program, costs: Costs) -> None:
    found = simulate_step(program, costs=costs)
    timeline = simulate(program, costs=costs)
    assert found.step_seconds == pytest.approx(timeline.makespan) and found.timeline == timeline
    assert found.compute_seconds == pytest.approx(sum(timeline.busy_seconds) / program.num_ranks)


@many
@given(program=programs(), costs=times(), collectives=exchanges(), factor=st.floats(1, 3), data=st.data())
def test_the_parts_are_no_less_than_nothing(
    program: Program, costs: Costs, collectives: list[Collective], factor: float, data: st.DataObject
) -> None:
    slow = SlowRank(rank=data.draw(st.integers(0, program.num_ranks - 1)), factor=factor, replica=1)
    found = simulate_step(
        program, costs=costs, collectives=collectives, replicas=3, slow_ranks=[slow], update_seconds=0.5
    )
    parts = (found.compute_seconds, found.bubble_seconds, found.exposed_seconds, found.slow_seconds)
    assert min(parts) >= -1e-9 * found.step_seconds
    assert found.step_seconds >= max(found.replica_timeline(1).makespan, found.timeline.makespan) / SLACK


def test_gradients_at_the_end_by_hand() -> None:
    """Two ranks, two microbatches: rank 1 has its gradients at 7 (the last backward from 5 on), rank 0 at 9 (from 7)."""
    program, costs = build("1f1b", ranks=2, micro=2), Costs(forward=1.0, backward=2.0)

    def step(seconds: tuple[float, float], overlap: float = 0.0) -> float:
        grads = Collective(name="gradients", point=StepPoint.END, seconds=seconds, overlap=overlap)
        return simulate_step(program, costs=costs, collectives=[grads], replicas=2, update_seconds=0.25).step_seconds

    assert step((0, 0)) == 9.25
    assert step((3, 0)) == 12.25, "nothing hides them"
    assert step((0, 2)) == 9.25, "rank 1 is done early: its own wait hides them"
    assert step((0, 4)) == 11.25
    assert step((3, 0), 0.5) == 10.75, "half beside the backward, from 7 to 9; the other half after it"
    assert step((3, 0), 1.0) == 10.25, "they are not there before it begins at 7"


def test_two_collectives_of_a_rank_take_turns() -> None:
    """One rank, two stages: gradients of stage 1 are there at 4, of stage 0 at 6."""
    program, costs = build("interleaved", ranks=1, micro=1), Costs(forward=1.0, backward=2.0)
    grads = Collective(name="gradients", point=StepPoint.END, seconds=[1.0, 5.0])
    assert simulate_step(program, costs=costs, collectives=[grads]).step_seconds == 4 + 5 + 1
    assert simulate_step(program, costs=costs, collectives=[grads, grads]).step_seconds == 4 + 10 + 2


def test_parameters_at_the_start_by_hand() -> None:
    """Two ranks that gather 4 seconds each: the second one has them long before its first activation comes at 5."""
    program, costs = build("gpipe", ranks=2, micro=1), Costs(forward=1.0, backward=2.0)

    def step(seconds: tuple[float, float], overlap: float = 0.0) -> float:
        gathered = Collective(name="parameters", point=StepPoint.START, seconds=seconds, overlap=overlap)
        return simulate_step(program, costs=costs, collectives=[gathered]).step_seconds

    assert step((0, 0)) == 6
    assert step((4, 4)) == 10
    assert step((0, 4)) == 9, "at 4 instead of at 1"
    assert step((4, 0), 0.5) == 9, "the forward of 1 ends when the last parameters are there"
    assert step((4, 0), 0.1) == pytest.approx(9.6)
    assert step((1, 0), 1.0) == 6


def test_what_goes_with_each_pass_by_hand() -> None:
    program, costs = build("1f1b", ranks=1, micro=3), Costs(forward=1.0, backward=2.0)

    def step(when: StepPoint, seconds: float, overlap: float) -> float:
        one = Collective(name="sums", point=when, seconds=seconds, overlap=overlap)
        return simulate_step(program, costs=costs, collectives=[one]).step_seconds

    assert step(StepPoint.FORWARD, 0.5, 0.0) == 3 * 3.5
    assert step(StepPoint.FORWARD, 0.5, 1.0) == 3 * 3.0
    assert step(StepPoint.FORWARD, 4.0, 0.75) == 3 * (3 + 1 + 2), "3 beside the forward of 1, 1 after it"
    assert step(StepPoint.BACKWARD, 1.0, 0.5) == 3 * 3.5
    split = build("zb_h1", ranks=1, micro=3)
    one = Collective(name="sums", point=StepPoint.BACKWARD, seconds=0.5)
    assert simulate_step(split, costs=Costs(), collectives=[one]).step_seconds == 3 * 3.5, "with I, not with W too"


@many
@given(program=programs(), costs=times(), collectives=exchanges(), faster=st.floats(0, 1))
def test_a_faster_link_is_never_slower(
    program: Program, costs: Costs, collectives: list[Collective], faster: float
) -> None:
    assert isinstance(costs.transfer, float)
    quick = replace(costs, transfer=faster * costs.transfer, latency=faster * costs.latency)
    shorter = [replace(c, seconds=faster * c.seconds) for c in collectives if isinstance(c.seconds, float)]
    before = simulate_step(program, costs=costs, collectives=collectives).step_seconds
    assert simulate_step(program, costs=quick, collectives=collectives).step_seconds <= before * SLACK
    assert simulate_step(program, costs=costs, collectives=shorter).step_seconds <= before * SLACK


@many
@given(program=programs(), costs=times(), collectives=exchanges(), more=st.floats(0, 1))
def test_more_overlap_is_never_slower(
    program: Program, costs: Costs, collectives: list[Collective], more: float
) -> None:
    over = [replace(c, overlap=c.overlap + more * (1 - c.overlap)) for c in collectives]
    before = simulate_step(program, costs=costs, collectives=collectives).step_seconds
    after = simulate_step(program, costs=costs, collectives=over).step_seconds
    assert after <= before * SLACK


@many
@given(program=programs(), costs=times(), collectives=exchanges(), data=st.data())
def test_a_slower_rank_is_never_faster_and_any_replica_does(
    program: Program, costs: Costs, collectives: list[Collective], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, program.num_ranks - 1))

    def step(factor: float, *replicas: int) -> float:
        slow = [SlowRank(rank=rank, factor=factor, replica=replica) for replica in replicas]
        return simulate_step(program, costs=costs, collectives=collectives, replicas=4, slow_ranks=slow).step_seconds

    assert step(1, 2) == step(2)
    assert step(1.5, 0) <= step(2, 0) * SLACK
    assert step(1.5, 0) == step(1.5, 3) == step(1.5, 0, 2, 1, 3)


@many
@given(program=programs(), costs=times(), collectives=exchanges(), scale=st.sampled_from([0.25, 2.0, 8.0]))
def test_the_clock_does_not_matter(program: Program, costs: Costs, collectives: list[Collective], scale: float) -> None:
    def times_scale(value: object) -> float:
        assert isinstance(value, float)
        return scale * value

    names = ("forward", "backward_input", "backward_weight", "transfer", "latency")
    slower = replace(costs, **{name: times_scale(getattr(costs, name)) for name in names})
    longer = [replace(c, seconds=times_scale(c.seconds)) for c in collectives]
    before = simulate_step(program, costs=costs, collectives=collectives, update_seconds=0.5)
    after = simulate_step(program, costs=slower, collectives=longer, update_seconds=0.5 * scale)
    assert after.step_seconds == pytest.approx(scale * before.step_seconds)
    assert (after.bubble, after.exposed) == pytest.approx((before.bubble, before.exposed), abs=1e-12)


@many
@given(program=programs(), costs=times(), collectives=exchanges(), replicas=st.integers(1, 10_000))
def test_replicas_and_the_update_add_what_they_are(
    program: Program, costs: Costs, collectives: list[Collective], replicas: int
) -> None:
    one = simulate_step(program, costs=costs, collectives=collectives)
    found = simulate_step(program, costs=costs, collectives=collectives, replicas=replicas, update_seconds=0.75)
    assert found.step_seconds == pytest.approx(one.step_seconds + 0.75)
    assert found.ranks == replicas * one.ranks


@many
@given(ranks=RANKS, micro=MICRO, more=st.integers(1, 12), costs=times())
def test_more_microbatches_take_longer_and_leave_less_bubble(ranks: int, micro: int, more: int, costs: Costs) -> None:
    few, many_more = (simulate_step(build("1f1b", ranks=ranks, micro=m), costs=costs) for m in (micro, micro + more))
    assert many_more.step_seconds > few.step_seconds
    alone = replace(costs, transfer=0.0, latency=0.0)
    few, many_more = (simulate_step(build("1f1b", ranks=ranks, micro=m), costs=alone) for m in (micro, micro + more))
    assert many_more.bubble <= few.bubble + 1e-12


def test_one_slow_rank_holds_up_a_long_pipeline_by_its_own_time() -> None:
    """Each of many microbatches takes 0.2 × 3 s longer; a little of that fits where the rank has to wait anyway."""
    program = build("1f1b", ranks=4, micro=100)
    found = simulate_step(
        program,
        costs=Costs(forward=1.0, backward=2.0),
        replicas=512,
        slow_ranks=[SlowRank(rank=2, factor=1.2, replica=77)],
    )
    assert 0.6 * 98 < found.slow_seconds < 0.6 * 100
    assert found.ranks == 2048
    assert found.replica_timeline(77).busy_seconds[2] == pytest.approx(1.2 * found.replica_timeline(0).busy_seconds[2])
    assert found.timeline == found.replica_timeline(511)


def test_gradients_wait_for_the_slowest_replica() -> None:
    """Rank 1 of the slow replica has its gradients at 10, the other one's are there at 7; they take 4."""
    program, costs = build("1f1b", ranks=2, micro=2), Costs(forward=1.0, backward=2.0)
    grads = Collective(name="gradients", point=StepPoint.END, seconds=(0.0, 4.0))
    slow = [SlowRank(rank=1, factor=1.5, replica=1)]
    found = simulate_step(program, costs=costs, collectives=[grads], replicas=2, slow_ranks=slow)
    alone = simulate_step(
        program, costs=costs, collectives=[grads], replicas=1, slow_ranks=[replace(slow[0], replica=0)]
    )
    assert alone.timeline.makespan == pytest.approx(12) and alone.step_seconds == pytest.approx(10 + 4)
    assert found.step_seconds == pytest.approx(14) and found.slow_seconds == pytest.approx(3)


def test_replicas_are_counted_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(program: Program, *, costs: Costs) -> object:
        calls.append(program)
        return original(program, costs=costs)

    original = module.walk_actions
    monkeypatch.setattr(module, "walk_actions", counted)
    program = build("1f1b", ranks=16, micro=32)
    one = simulate_step(program, costs=Costs(transfer=0.1))
    assert len(calls) == 2
    big = simulate_step(program, costs=Costs(transfer=0.1), replicas=128, ranks_per_stage=8)
    assert len(calls) == 4 and big.ranks == 16_384 and big.step_seconds == one.step_seconds
    slow = [SlowRank(rank=3, factor=1.1, replica=n) for n in range(100)]
    simulate_step(program, costs=Costs(transfer=0.1), replicas=128, slow_ranks=slow)
    assert len(calls) == 7, "a hundred replicas that are slow in the same way are followed once"


def test_64_ranks_and_256_microbatches_are_quick() -> None:
    def simulate() -> SimulatedStep:
        program = build("interleaved", ranks=64, micro=256, virtual=2)
        grads = Collective(name="gradients", point=StepPoint.END, seconds=0.3, overlap=0.5)
        costs = Costs(forward=0.1, backward=0.2, transfer=0.004, latency=1e-5)
        return simulate_step(program, costs=costs, collectives=[grads], replicas=32, ranks_per_stage=8)

    found, calls = count_calls(simulate)
    assert found.ranks == 16_384 and 0.05 < found.bubble < 0.2
    assert calls < 4_500_000, "about a second"


def test_what_a_day_gives() -> None:
    found = simulate_step(build("1f1b", ranks=4, micro=16), costs=Costs(forward=1.0, backward=2.0))
    assert found.amount_per_day(amount_per_step=100) == pytest.approx(100 * DAY_SECONDS / found.step_seconds)
    hazard = FailureModel(mean_seconds=10_000, stall_seconds=10, restart_seconds=300)
    kept = goodput(hazard=hazard, interval_seconds=best_interval(hazard=hazard))
    assert found.amount_per_day(amount_per_step=100, goodput=kept) == pytest.approx(
        kept.useful * found.amount_per_day(amount_per_step=100)
    )


def test_it_can_be_drawn() -> None:
    found = simulate_step(
        build("interleaved", ranks=4, micro=8),
        costs=Costs(forward=1.0, backward=2.0, transfer=0.2),
        collectives=[Collective(name="sums", point=StepPoint.FORWARD, seconds=0.5)],
    )
    picture = draw(found.timeline, unit="s")
    assert picture.startswith("<svg") and "interleaved · 4 ranks" in picture
    assert found.timeline.compute_spans[0].seconds == 1.5, "what is exposed stands in the compute"


def test_a_program_without_training_has_no_backward_to_wait_for() -> None:
    program = forward_only(rank_of_stage=(0, 1), micro=3)
    last = Collective(name="metrics", point=StepPoint.END, seconds=1.0)
    assert simulate_step(program, costs=Costs(), collectives=[last]).step_seconds == 5


PROGRAM = build("1f1b", ranks=2, micro=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"costs": Costs(forward=-1.0)}, "forward=-1"),
        ({"costs": Costs(forward=[1.0])}, "forward has 1 number for 2 stages"),
        ({"costs": Costs(transfer=[])}, "transfer has 0 numbers"),
        ({"costs": Costs(backward=float("nan"))}, "backward=nan"),
        ({"costs": Costs(latency=float("inf"))}, "latency=inf"),
        ({"replicas": 0}, "0 replicas"),
        ({"ranks_per_stage": -8}, "-8 ranks a stage"),
        ({"update_seconds": -1.0}, "update_seconds=-1"),
        ({"slow_ranks": [SlowRank(rank=2, factor=2)]}, "no rank 2 of replica 0"),
        ({"slow_ranks": [SlowRank(rank=0, factor=2, replica=1)]}, "no rank 0 of replica 1"),
        ({"slow_ranks": [SlowRank(rank=0, factor=0.5)]}, "0.5 times as long"),
        ({"collectives": [Collective(name="sums", point=StepPoint.END, seconds=-2.0)]}, "sums=-2"),
        (
            {"collectives": [Collective(name="sums", point=StepPoint.END, seconds=1.0, overlap=1.5)]},
            "sums: overlap=1.5",
        ),
    ],
)
def test_nonsense_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        simulate_step(PROGRAM, **{"costs": Costs()} | given)  # type: ignore[arg-type]


def test_a_program_that_deadlocks_says_where() -> None:
    swapped = tuple(tuple(reversed(row)) for row in PROGRAM.actions)
    with pytest.raises(PacelineError) as found:
        simulate_step(replace(PROGRAM, actions=swapped), costs=Costs())
    assert isinstance(found.value, ScheduleError)


def test_nothing_takes_no_time() -> None:
    found = simulate_step(PROGRAM, costs=Costs(forward=0.0, backward_input=0.0, backward_weight=0.0))
    assert isinstance(found, SimulatedStep) and found.step_seconds == found.bubble == found.exposed == 0
