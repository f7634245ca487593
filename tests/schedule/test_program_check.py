"""The checker names the place where a valid program was broken."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import LayoutError
from paceline.schedule import SCHEDULES, Action, Op, Program, ScheduleError, build, check, lower
from paceline.schedule.dependencies import find_requirements

many = settings(max_examples=40, deadline=None)
SIZES = {"name": st.sampled_from(sorted(SCHEDULES)), "ranks": st.integers(1, 6), "micro": st.integers(1, 9)}


def broken(program: Program, rank: int, change: Callable[[list[Action]], object]) -> Program:
    rows = [list(row) for row in program.actions]
    change(rows[rank])
    return replace(program, actions=tuple(tuple(row) for row in rows))


def fault_of(program: Program) -> ScheduleError:
    with pytest.raises(ScheduleError) as found:
        check(program)
    return found.value


@many
@given(**SIZES, data=st.data())
def test_a_dropped_action_is_missing(name: str, ranks: int, micro: int, data: st.DataObject) -> None:
    program = build(name, ranks=ranks, micro=micro)
    rank = data.draw(st.integers(0, ranks - 1))
    place = data.draw(st.integers(0, len(program.actions[rank]) - 1))
    action = program.actions[rank][place]
    changed = broken(program, rank, lambda row: row.pop(place))
    if ranks == micro == 1 and not changed.has_backward:  # of F and B only F is left: a program for evaluation
        check(changed)
        return
    fault = fault_of(changed).fault
    assert fault.rank == rank
    assert fault.action == action
    assert "missing" in fault.message


@many
@given(**SIZES, data=st.data())
def test_a_doubled_action_stands_twice(name: str, ranks: int, micro: int, data: st.DataObject) -> None:
    program = build(name, ranks=ranks, micro=micro)
    rank = data.draw(st.integers(0, ranks - 1))
    row = program.actions[rank]
    first = data.draw(st.integers(0, len(row) - 1))
    second = data.draw(st.integers(first + 1, len(row)))
    fault = fault_of(broken(program, rank, lambda r: r.insert(second, row[first]))).fault
    assert (fault.rank, fault.position, fault.action) == (rank, second, row[first])
    assert f"first as action {first + 1}" in fault.message


@many
@given(**SIZES, data=st.data())
def test_two_that_need_each_other_may_not_be_swapped(name: str, ranks: int, micro: int, data: st.DataObject) -> None:
    program = build(name, ranks=ranks, micro=micro)
    rank = data.draw(st.integers(0, ranks - 1))
    row = program.actions[rank]
    pairs = [(row.index(b), row.index(a)) for a, before in find_requirements(program, rank).items() for b in before]
    first, second = data.draw(st.sampled_from(pairs))

    def swap(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    error = fault_of(broken(program, rank, swap))
    assert error.fault.rank == rank and "comes before" in error.fault.message
    assert first <= error.fault.position <= second


@pytest.mark.parametrize(
    ("name", "rank", "first", "second"),
    [
        ("1f1b", 1, "RF1.2<0", "F1.2"),
        ("1f1b", 1, "F1.2", "SF1.2>2"),
        ("1f1b", 2, "F2.2", "B2.2"),
        ("1f1b", 1, "RB1.2<2", "B1.2"),
        ("1f1b", 1, "B1.2", "SB1.2>0"),
        ("zb_h1", 1, "RB1.2<2", "I1.2"),
        ("zb_h1", 1, "I1.2", "SB1.2>0"),
        ("zb_h1", 1, "I1.2", "W1.2"),
        ("zbv", 2, "F2.1", "F3.1"),
        ("zbv", 2, "I3.1", "I2.1"),
    ],
)
def test_each_rule_of_order(name: str, rank: int, first: str, second: str) -> None:
    """`second` moved to just before `first`, which it needs."""
    program = build(name, ranks=3, micro=4)
    words = [str(action) for action in program.actions[rank]]
    error = fault_of(broken(program, rank, lambda row: row.insert(words.index(first), row.pop(words.index(second)))))
    assert f"{second} comes before {first}, which it needs." in error.what and error.fault.rank == rank


@many
@given(**SIZES, data=st.data())
def test_any_two_actions_swapped_run_or_are_refused(name: str, ranks: int, micro: int, data: st.DataObject) -> None:
    """What `check` lets through ends: no order deadlocks behind its back, none is refused without its place."""
    program = build(name, ranks=ranks, micro=micro)
    rank = data.draw(st.integers(0, ranks - 1))
    places = st.integers(0, len(program.actions[rank]) - 1)
    first, second = data.draw(places), data.draw(places)

    def swap(actions: list[Action]) -> None:
        actions[first], actions[second] = actions[second], actions[first]

    changed = broken(program, rank, swap)
    try:
        check(changed)
    except ScheduleError as error:
        assert "^" in error.timeline and error.where
        assert ends(changed) is False or error.fault.rank == rank
    else:
        assert ends(changed)


def ends(program: Program) -> bool:
    """The naive way: whoever can, does its next action; a receive can once its send is done."""
    done: set[tuple[int, object]] = set()
    reached = [0] * program.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.actions):
            if reached[rank] == len(row):
                continue
            action = row[reached[rank]]
            if action.op.is_receive and (rank, action.message) not in done:
                continue
            if action.op.is_send:
                assert action.peer is not None
                done.add((action.peer, action.message))
            reached[rank] += 1
            moved = True
    return all(r == len(row) for r, row in zip(reached, program.actions, strict=True))


def orders(*texts: str) -> list[list[Action]]:
    return [[Action(op=Op(w[0]), stage=int(w[1]), microbatch=int(w[3])) for w in text.split()] for text in texts]


def test_a_deadlock_shows_its_circle() -> None:
    mine = lower(orders("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"), name="mine", rank_of_stage=(0, 1), num_micro=2)
    error = fault_of(mine)
    assert "deadlock: ranks 0, 1 wait for each other" in error.what
    assert error.where == "rank 0, action 3 of 8: RB0.0<1"
    assert "rank 0 waits at RB0.0<1 (action 3) for SB1.0>0, action 6 of rank 1" in error.cause
    assert "rank 1 waits at RF1.1<0 (action 3) for SF0.1>1, action 6 of rank 0" in error.cause
    assert error.timeline.splitlines() == [
        "rank 0   F0 B0 F1 B1",
        "            ^^",
        "rank 1   .  F0 F1 B0 B1",
        "               ^^",
    ]
    assert str(error).endswith(error.timeline)


def test_who_only_waits_for_the_circle_is_not_in_it() -> None:
    mine = lower(
        orders("F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1", "F2.0 F2.1 B2.0 B2.1"),
        name="mine",
        rank_of_stage=(0, 1, 2),
        num_micro=2,
    )
    error = fault_of(mine)
    assert "ranks 1, 2 wait for each other" in error.what and error.timeline.count("^^") == 2


def test_a_circle_of_three() -> None:
    mine = lower(
        orders("F0.0 F3.0 F0.1 F3.1", "F1.0 F1.1", "F2.1 F2.0"), name="mine", rank_of_stage=(0, 1, 2, 0), num_micro=2
    )
    error = fault_of(mine)
    assert "ranks 0, 1, 2 wait for each other" in error.what
    assert error.cause.count("waits at") == 3


def test_an_order_that_no_message_could_mend() -> None:
    loop = lower(orders("F0.0 B0.0", "F1.0 B1.0 F2.0 B2.0"), name="loop", rank_of_stage=(0, 1, 1), num_micro=1)
    assert "B1.0 comes before B2.0" in fault_of(loop).what


def test_both_ways_of_backward_at_once_are_too_many() -> None:
    program = build("1f1b", ranks=2, micro=2)
    extra = Action(op=Op.BACKWARD_WEIGHT, stage=0, microbatch=1)
    error = fault_of(broken(program, 0, lambda row: row.append(extra)))
    assert "W0.1: this rank's line already has the backward as B" in error.what


def test_weights_without_their_gradient() -> None:
    program = build("zb_h1", ranks=3, micro=4)
    place = next(n for n, a in enumerate(program.actions[1]) if str(a) == "W1.2")
    error = fault_of(broken(program, 1, lambda row: row.pop(place)))
    assert error.what.endswith("W1.2 is missing.") and "no gradient from this microbatch" in error.cause


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Action(op=Op.FORWARD, stage=7, microbatch=0), "there is no stage 7"),
        (Action(op=Op.FORWARD, stage=1, microbatch=0), "stage 1 is on rank 1"),
        (Action(op=Op.FORWARD, stage=0, microbatch=9), "there is no microbatch 9"),
        (Action(op=Op.SEND_F, stage=0, microbatch=0, peer=2), "is not a message"),
        (Action(op=Op.RECV_F, stage=0, microbatch=0, peer=1), "is not a message"),
    ],
    ids=str,
)
def test_what_does_not_belong_there(action: Action, words: str) -> None:
    program = build("1f1b", ranks=3, micro=2)
    error = fault_of(broken(program, 0, lambda row: row.insert(2, action)))
    assert words in error.what and error.fault.position == 2


def test_numbers_that_do_not_agree() -> None:
    program = build("1f1b", ranks=2, micro=2)
    for wrong in (
        replace(program, num_micro=0),
        replace(program, num_ranks=3),
        replace(program, rank_of_stage=(0, 0)),
        replace(program, rank_of_stage=(0, 2)),
        replace(program, num_stages=3),
    ):
        with pytest.raises(LayoutError, match="1f1b"):
            check(wrong)


def test_a_long_timeline_shows_the_part_around_the_mark() -> None:
    program = build("1f1b", ranks=4, micro=200)
    place = next(n for n, a in enumerate(program.actions[2]) if str(a) == "B2.150")
    error = fault_of(broken(program, 2, lambda row: row.pop(place)))
    lines = error.timeline.splitlines()
    assert max(map(len, lines)) <= 120 and any("^" in line for line in lines)
    assert "B149" in error.timeline and "F0 " not in error.timeline
