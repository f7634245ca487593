"""Every schedule at every size is complete and free of deadlock, with the length and memory of its theory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import LayoutError
from paceline.schedule import (
    SCHEDULES,
    Costs,
    Op,
    Program,
    build,
    check,
    forward_only,
    simulate,
)
from paceline.schedule.closed_forms import PipelineCase, bubble_fraction

RANKS, MICRO, VIRTUAL = st.integers(1, 8), st.integers(1, 24), st.integers(1, 3)
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.75, 3.0])
many = settings(max_examples=20, deadline=None)
few = settings(max_examples=6, deadline=None)


def program_of(name: str, ranks: int, micro: int, virtual: int) -> Program:
    row = SCHEDULES[name]
    return build(name, ranks=ranks, micro=micro, virtual=virtual if row.any_virtual else None)


def splits_backward(program: Program) -> bool:
    return any(a.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for row in program for a in row)


@pytest.mark.parametrize("name", SCHEDULES)
@many
@given(ranks=RANKS, micro=MICRO, virtual=VIRTUAL)
def test_any_size_is_complete_and_ends(name: str, ranks: int, micro: int, virtual: int) -> None:
    program = program_of(name, ranks, micro, virtual)
    timeline = simulate(
        program, costs=Costs(forward=0.7, backward_input=1.1, backward_weight=0.4, latency=0.2, transfer=0.1)
    )
    assert program.num_ranks == ranks and program.num_micro == micro
    for rank in range(ranks):
        kinds = [(a.op, a.stage, a.microbatch) for a in program.compute_actions(rank)]
        backward = [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT] if splits_backward(program) else [Op.BACKWARD]
        wanted = {(op, s, m) for op in (Op.FORWARD, *backward) for s in program.stages_of(rank) for m in range(micro)}
        assert len(kinds) == len(wanted) and set(kinds) == wanted
    assert len(timeline.spans) == program.num_actions


@pytest.mark.parametrize("name", SCHEDULES)
@many
@given(ranks=RANKS, micro=MICRO, virtual=VIRTUAL, forward=SECONDS, inputs=SECONDS, weight=SECONDS)
def test_the_simulation_equals_the_closed_form(
    name: str, ranks: int, micro: int, virtual: int, forward: float, inputs: float, weight: float
) -> None:
    program = program_of(name, ranks, micro, virtual)
    each = program.num_stages // ranks
    case = PipelineCase(
        ranks=ranks, micro=micro, virtual=each, forward=forward, backward_input=inputs, backward_weight=weight
    )
    makespan = SCHEDULES[name].makespan(case)
    timeline = simulate(program, costs=Costs(forward=forward, backward_input=inputs, backward_weight=weight))
    if makespan is not None:
        assert timeline.makespan == pytest.approx(makespan, rel=1e-12)
        assert timeline.bubble == pytest.approx(bubble_fraction(SCHEDULES[name].makespan, case), abs=1e-12)
    equal = SCHEDULES[name].makespan(PipelineCase(ranks=ranks, micro=max(micro, 2 * ranks), virtual=each))
    assert equal is not None, "at equal times and enough microbatches every schedule has its form"


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("naive", 3 / 4),
        ("gpipe", 3 / 11),
        ("1f1b", 3 / 11),
        ("interleaved", 3 / 19),
        ("breadth_first", 3 / 19),
        ("zb_h1", 3 / 27),  # (p - 1)(F + I - W) beside m (F + I + W)
        ("zb_interleaved", 3 / 51),
        ("zbv", 3 / 51),
    ],
)
def test_the_bubbles_of_the_papers_at_4_ranks_and_8_microbatches(name: str, bubble: float) -> None:
    assert simulate(build(name, ranks=4, micro=8)).bubble == pytest.approx(bubble, abs=1e-12)


@few
@given(ranks=RANKS, micro=MICRO)
def test_what_is_held_at_most(ranks: int, micro: int) -> None:
    def peaks(name: str) -> tuple[float, ...]:
        return simulate(build(name, ranks=ranks, micro=micro)).peak_activations()

    assert set(peaks("naive")) == {1}
    assert set(peaks("gpipe")) == {micro}
    assert peaks("1f1b") == tuple(min(ranks - rank, micro) for rank in range(ranks))
    assert max(peaks("zb_h1")) == min(ranks, micro) == max(peaks("1f1b"))
    assert max(peaks("zbv")) <= 2 * ranks  # of half as long stages
    assert set(peaks("breadth_first")) == {2 * micro}
    assert max(peaks("zb_interleaved")) == max(peaks("interleaved"))


@few
@given(ranks=RANKS, rounds=st.integers(4, 6), virtual=st.integers(2, 3))
def test_what_interleaving_holds_as_the_docs_say(ranks: int, rounds: int, virtual: int) -> None:
    def peaks(name: str) -> list[float]:
        return [*simulate(build(name, ranks=ranks, micro=rounds * ranks, virtual=virtual)).peak_activations()]

    first = ranks * (virtual - 1) + 2 * ranks - 1
    assert peaks("interleaved") == [first - 2 * rank for rank in range(ranks)]
    assert peaks("zb_interleaved") == [first - rank for rank in range(ranks)]


@few
@given(ranks=st.integers(2, 8), micro=MICRO, virtual=VIRTUAL)
def test_how_many_messages_are_sent_as_the_docs_say(ranks: int, micro: int, virtual: int) -> None:
    for name in SCHEDULES:
        program = program_of(name, ranks, micro, virtual)
        each = program.num_stages // ranks
        borders = 2 * (ranks - 1) if name == "zbv" else each * ranks - 1
        assert sum(action.op.is_send for row in program for action in row) == 2 * micro * borders


@few
@given(ranks=RANKS, micro=MICRO, virtual=VIRTUAL)
def test_a_stages_gradients_are_added_in_the_order_of_one_process(ranks: int, micro: int, virtual: int) -> None:
    for name in SCHEDULES:
        program = program_of(name, ranks, micro, virtual)
        for row in program:
            for stage in {a.stage for a in row}:
                added = [a.microbatch for a in row if a.stage == stage and a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
                assert added == list(range(micro))


def test_bytes_held_are_weighed_by_stage() -> None:
    timeline = simulate(build("gpipe", ranks=2, micro=3))
    assert timeline.peak_activations(stage_sizes=[10, 100]) == (30, 300)


@many
@given(ranks=RANKS, micro=MICRO, data=st.data())
def test_forward_only_for_any_placement(ranks: int, micro: int, data: st.DataObject) -> None:
    more = data.draw(st.lists(st.integers(0, ranks - 1), max_size=8))
    owner = data.draw(st.permutations([*range(ranks), *more]))
    program = check(forward_only(rank_of_stage=owner, micro=micro))
    assert program.rank_of_stage == tuple(owner) and not program.has_backward
    timeline = simulate(program)
    assert set(timeline.peak_activations()) == {0}
    assert timeline.makespan >= max(micro * owner.count(rank) for rank in range(ranks))
    first = [s.stop for s in timeline.compute_spans if (s.action.stage, s.action.microbatch) == (len(owner) - 1, 0)]
    assert first == [len(owner)], "nothing stands in the first microbatch's way"
    if owner == list(range(ranks)):
        assert timeline.makespan == micro + ranks - 1


def test_torchs_names_and_others_spellings() -> None:
    for given_name, wanted in {
        "GPipe": "gpipe",
        "ScheduleGPipe": "gpipe",
        "1F1B": "1f1b",
        "Schedule1F1B": "1f1b",
        "Interleaved1F1B": "interleaved",
        "LoopedBFS": "breadth_first",
        "breadth-first": "breadth_first",
        "InterleavedZeroBubble": "zb_interleaved",
        "ScheduleZBVZeroBubble": "zbv",
        "ZB-H1": "zb_h1",
    }.items():
        assert build(given_name, ranks=2, micro=2).name == wanted


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(LayoutError, match="not a pipeline schedule") as found:
        build("1f1n", ranks=2, micro=2)
    assert "1f1b" in str(found.value)
    with pytest.raises(LayoutError, match="0 microbatches"):
        build("1f1b", ranks=2, micro=0)
    with pytest.raises(LayoutError, match="1 stage on each rank, but 2 are requested"):
        build("1f1b", ranks=2, micro=2, virtual=2)
    with pytest.raises(LayoutError, match="2 stages on each rank, but 3 are requested"):
        build("zbv", ranks=2, micro=2, virtual=3)


def test_who_holds_what() -> None:
    zbv = build("zbv", ranks=3, micro=2)
    assert zbv.rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert zbv.loss_rank == 0
    assert zbv.stages_of(1) == (1, 4)
    assert splits_backward(zbv) and zbv.has_backward
    loop = build("interleaved", ranks=3, micro=2)
    assert loop.rank_of_stage == (0, 1, 2, 0, 1, 2) and loop.loss_rank == 2
    assert not splits_backward(loop)


def test_a_neighbour_on_the_same_rank_is_sent_nothing() -> None:
    assert not any(a.peer == 2 for a in build("zbv", ranks=3, micro=2).actions[2])
    alone = build("interleaved", ranks=1, micro=3)
    assert all(a.op.is_compute for a in alone.actions[0])


@pytest.mark.parametrize("name", SCHEDULES)
@few
@given(ranks=RANKS, micro=MICRO)
def test_receives_in_the_order_of_their_sends(name: str, ranks: int, micro: int) -> None:
    """What a transport that matches by order relies on: per peer, the same messages, in the sender's order."""
    program = build(name, ranks=ranks, micro=micro)
    for rank in range(ranks):
        incoming = program.receives_by_peer(rank)
        assert {a for row in incoming.values() for a in row} == {a for a in program.actions[rank] if a.op.is_receive}
        for peer, row in incoming.items():
            sent = [a.message for a in program.actions[peer] if a.op.is_send and a.peer == rank]
            assert [a.message for a in row] == sent


def test_stages_of_different_lengths_and_slow_links() -> None:
    """By hand: forward takes 1 and 2, backward 4 and 5; a message occupies its link 3 and arrives 0.5 later."""
    program = build("gpipe", ranks=2, micro=2)
    costs = Costs(forward=(1.0, 2.0), backward=(4.0, 5.0), transfer=[3.0], latency=0.5)
    timeline = simulate(program, costs=costs)
    times = {str(s.action): (s.start, s.stop) for s in timeline.spans}
    assert times["F0.0"] == (0, 1) and times["F0.1"] == (1, 2)
    assert times["RF1.0<0"] == (0, 4.5) and times["F1.0"] == (4.5, 6.5)
    assert times["RF1.1<0"] == (6.5, 7.5) and times["F1.1"] == (
        7.5,
        9.5,
    )  # left at 4, since the link was busy, not at 2
    assert times["B1.0"] == (9.5, 14.5) and times["B1.1"] == (14.5, 19.5)
    assert times["B0.0"] == (18, 22) and times["B0.1"] == (23, 27)
    assert timeline.makespan == 27 and timeline.bubbles == pytest.approx((1 - 10 / 27, 1 - 14 / 27))
    assert timeline.bubble == pytest.approx(1 - 12 / 27)  # the mean of both ranks


def test_the_bubble_is_that_of_a_timeline_moved_in_time() -> None:
    timeline = simulate(build("1f1b", ranks=4, micro=8))
    moved = replace(timeline, spans=tuple(replace(s, start=s.start + 5, stop=s.stop + 5) for s in timeline.spans))
    assert moved.bubble == timeline.bubble and moved.makespan == timeline.makespan


def test_a_stage_that_is_ready_late() -> None:
    """By hand: the first stage may begin at 2, the second at 5; a forward takes 1 and a backward 2."""
    timeline = simulate(build("gpipe", ranks=2, micro=2), costs=Costs(ready=[2.0, 5.0]))
    times = {str(s.action): (s.start, s.stop) for s in timeline.compute_spans}
    assert times["F0.0"] == (2, 3) and times["F0.1"] == (3, 4)
    assert times["F1.0"] == (5, 6) and times["F1.1"] == (6, 7) and times["B1.1"] == (9, 11)
    assert timeline.start == 2 and timeline.makespan == 11


@many
@given(ranks=RANKS, micro=MICRO, late=st.lists(SECONDS, min_size=8, max_size=8))
def test_ready_at_once_changes_no_bit_and_late_is_never_earlier(ranks: int, micro: int, late: list[float]) -> None:
    program = build("1f1b", ranks=ranks, micro=micro)
    costs = Costs(forward=0.3, backward=0.7, transfer=0.11, latency=0.01)
    plain = simulate(program, costs=costs)
    assert simulate(program, costs=replace(costs, ready=[0.0] * ranks)) == plain
    held = simulate(program, costs=replace(costs, ready=late))
    ends = {span.action: span.stop for span in plain.spans}
    assert all(span.stop >= ends[span.action] for span in held.spans)
