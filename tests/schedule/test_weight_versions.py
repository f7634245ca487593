"""PipeDream programs as data: which weight version a microbatch reads, and that every program runs."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.schedule import Costs, Op, ScheduleError, check, simulate
from paceline.schedule.program import Action, Program
from paceline.schedule.weight_version_rules import (
    BatchBoundaries,
    Rule,
    VersionRule,
    build_continuous_program,
    weight_versions_used,
)

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=9)
STAGES = st.integers(1, 6)
RULES = st.sampled_from(list(Rule))
many = settings(max_examples=40, deadline=None)


def walked(program: Program, stage: int) -> list[int]:
    """How many updates a stage has taken when each forward comes."""
    taken, found = 0, {}
    for action in program.compute_actions(program.rank_of_stage[stage]):
        taken += action.op is Op.UPDATE
        if action.op is Op.FORWARD:
            found[action.microbatch] = taken
    return [found[k] for k in sorted(found)]


@many
@given(stages=STAGES, rule=RULES, sizes=SIZES, drained=st.sets(st.integers(0, 8)))
def test_every_program_can_be_run_and_has_the_weights_that_its_rule_names(
    stages: int, rule: Rule, sizes: Sequence[int], drained: set[int]
) -> None:
    stash = VersionRule(stages=stages, rule=rule)
    program = check(build_continuous_program(stash, sizes=sizes, drained_after=sorted(drained)))
    plain = build_continuous_program(stash, sizes=sizes)
    for one, other in zip(weight_versions_used(program, stash), weight_versions_used(plain, stash), strict=True):
        assert one.versions == other.versions, "emptying it in between changes no weight"
        assert all(used <= there for used, there in zip(one.versions, walked(program, one.stage), strict=True))


@many
@given(stages=STAGES, sizes=SIZES)
def test_weight_stashing_is_what_the_order_itself_has(stages: int, sizes: Sequence[int]) -> None:
    stash = VersionRule(stages=stages, rule=Rule.NEWEST)
    program = build_continuous_program(stash, sizes=sizes)
    for one in weight_versions_used(program, stash):
        assert list(one.versions) == walked(program, one.stage)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_versions_and_the_staleness_of_the_papers(stages: int) -> None:
    found = {
        rule: weight_versions_used(
            build_continuous_program(s := VersionRule(stages=stages, rule=rule), sizes=[1] * 30), s
        )
        for rule in list(Rule)[:2]
    }
    assert [one.num_versions for one in found[Rule.NEWEST]] == list(range(stages, 0, -1))
    assert [max(one.staleness) for one in found[Rule.NEWEST]] == list(range(stages - 1, -1, -1))
    assert {max(one.staleness) for one in found[Rule.ENTRY]} == {stages - 1}
    double = VersionRule(stages=stages, rule=Rule.DOUBLE)
    each = weight_versions_used(build_continuous_program(double, sizes=[stages] * 12), double)
    assert {one.num_versions for one in each} == {2}
    assert all(one.staleness == (0,) * stages + (1,) * (11 * stages) for one in each)


@pytest.mark.parametrize(("rule", "size"), [(Rule.NEWEST, 1), (Rule.ENTRY, 1), (Rule.DOUBLE, 4)])
def test_it_has_no_bubble_but_at_its_ends(rule: Rule, size: int) -> None:
    program = build_continuous_program(VersionRule(stages=4, rule=rule), sizes=[size] * (120 // size))
    timeline = simulate(program, costs=Costs(forward=1.0, backward_input=1.0, backward_weight=1.0))
    middle = [s for s in timeline.compute_spans if 60 <= s.start < 300 and s.seconds]
    busy = sum(min(s.stop, 300.0) - s.start for s in middle) / (4 * 240)
    assert busy > 0.995


def test_an_update_too_early_too_late_or_left_out_is_no_program() -> None:
    program = build_continuous_program(VersionRule(stages=2, rule=Rule.NEWEST), sizes=[1, 1, 1])
    row = list(program.actions[1])
    update = next(place for place, action in enumerate(row) if action.op is Op.UPDATE)
    swapped = [*row[: update - 2], row[update], *row[update - 2 : update], *row[update + 1 :]]
    for changed, what in ((row[:update] + row[update + 1 :], "missing"), (swapped, "before B1.0")):
        with pytest.raises(ScheduleError, match=what):
            check(_with(program, rank=1, row=changed))


def test_weights_that_are_not_there_yet_are_told() -> None:
    stash = VersionRule(stages=3, rule=Rule.NEWEST)
    late = build_continuous_program(VersionRule(stages=3, rule=Rule.NEWEST), sizes=[3, 3])
    assert weight_versions_used(late, stash)
    with pytest.raises(ValueError, match="needs update"):
        weight_versions_used(_as_gpipe(late), VersionRule(stages=3, rule=Rule.NEWEST))


def test_a_stream_that_forgets_answers_as_before() -> None:
    whole, short = BatchBoundaries(), BatchBoundaries()
    for size in (2, 1, 3, 1, 2, 2, 1):
        whole.add(size)
        short.add(size)
    short.drop_old_batches(num_kept=3)
    for k in range(whole.ends[3], whole.num_microbatches):
        assert (short.batch_of(k), short.is_end(k)) == (whole.batch_of(k), whole.is_end(k))
        assert short.num_complete_batches(k) == whole.num_complete_batches(k)
    assert short.num_batches == whole.num_batches == 7


def _with(program: Program, *, rank: int, row: Sequence[Action]) -> Program:
    rows = [tuple(row) if number == rank else old for number, old in enumerate(program.actions)]
    return _program(program, rows)


def _as_gpipe(program: Program) -> Program:
    """All forwards first."""
    return _program(program, [sorted(row, key=lambda a: a.op not in (Op.FORWARD, Op.RECV_F)) for row in program])


def _program(program: Program, rows: Sequence[Sequence[Action]]) -> Program:
    return Program(
        name=program.name,
        num_ranks=program.num_ranks,
        num_stages=program.num_stages,
        num_micro=program.num_micro,
        rank_of_stage=program.rank_of_stage,
        actions=tuple(tuple(row) for row in rows),
    )
