"""Simulation of a planned step in virtual time, for any number of ranks, with collectives and slow ranks.

One replica's pipeline is simulated action by action. Replicas are alike, so others are only counted; one that has a
slow rank is simulated as well.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from paceline.errors import UsageError
from paceline.planner.simulation.goodput import DAY_SECONDS, Goodput
from paceline.planner.simulation.overlap import (
    Collective,
    gradient_ready_time,
    refuse_bad_numbers,
    slow_down_rank,
    with_collectives,
)
from paceline.schedule.action_walk import Costs, WalkResult, walk_actions
from paceline.schedule.program import Action, Program
from paceline.schedule.program_check import check
from paceline.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank of one replica's pipeline whose computes, and so its whole stage's, take `factor` times as long."""

    rank: int
    factor: float
    replica: int = 0


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A step of `ranks` ranks in seconds, as four parts of a mean rank's time that sum to `step_seconds`.

    `compute_seconds`: its own work. `bubble_seconds`: the waiting that remains if communication takes no time.
    `exposed_seconds`: what communication adds to that step. `slow_seconds`: what the slow ranks add.
    """

    ranks: int
    compute_seconds: float
    bubble_seconds: float
    exposed_seconds: float
    slow_seconds: float
    followed: Mapping[int, WalkResult]

    @property
    def step_seconds(self) -> float:
        """The seconds from the first rank's start until the last rank has its new weights."""
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds + self.slow_seconds

    @property
    def bubble(self) -> float:
        """The fraction of the step that the schedule alone leaves idle, 0 to 1."""
        return self.bubble_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def exposed(self) -> float:
        """The fraction of the step that communication adds, 0 to 1."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the first replica's pipeline, for `draw`; computes include exposed collectives."""
        return self.timeline_of(0)

    def timeline_of(self, replica: int) -> Timeline:
        """Return the timeline of a replica's pipeline."""
        found = self.followed.get(replica, self.followed[-1])
        return Timeline(name=found.program.name, num_ranks=found.program.num_ranks, spans=found.spans)

    def a_day(self, *, each_step: float, goodput: Goodput | None = None) -> float:
        """Return how many samples or tokens a day are trained and kept, with `each_step` of them per step."""
        kept = 1.0 if goodput is None else goodput.useful
        return each_step * kept * DAY_SECONDS / self.step_seconds


def simulate_step(
    program: Program,
    *,
    costs: Costs,
    collectives: Sequence[Collective] = (),
    replicas: int = 1,
    ranks_a_stage: int = 1,
    slow: Sequence[SlowRank] = (),
    update_seconds: float = 0.0,
) -> SimulatedStep:
    """Simulate one step of a valid program on replicas × pipeline × `ranks_a_stage` ranks.

    The program is as `build` or `check` returns it. `costs` are those of computes alone and of the messages between
    stages. A collective at the end joins all replicas: it begins when the slowest has its gradients. Then every rank
    takes `update_seconds`, and the step ends with the last.

    Raises:
        UsageError: a time, a count or a slow rank is invalid.
        ScheduleError: the program does not run to its end.
    """
    refuse_bad_numbers(program, costs=costs, collectives=collectives)
    _refuse_bad_ranks(program, replicas=replicas, each=ranks_a_stage, slow=slow, update_seconds=update_seconds)

    def walk(own: Costs) -> WalkResult:
        found = walk_actions(program, costs=own)
        if not found.is_whole:
            check(program)
        return found

    def with_slow(own: Iterable[SlowRank]) -> WalkResult:
        slower = costs
        for one in own:
            slower = slow_down_rank(program, costs=slower, rank=one.rank, factor=one.factor)
        return walk(with_collectives(program, costs=slower, collectives=collectives))

    alone = walk(replace(costs, transfer=0.0, latency=0.0, ready=0.0))
    kinds = _kinds(slow)
    alike = with_slow(())
    followed = {key: with_slow(key) for key in set(kinds.values())}
    by_replica = {replica: followed[key] for replica, key in kinds.items()} | {-1: alike}
    free_step = max(alone.ends) + update_seconds
    alike_step = last_done([alike], collectives) + update_seconds
    compute = _compute_seconds(program, costs) + update_seconds
    return SimulatedStep(
        ranks=replicas * program.num_ranks * ranks_a_stage,
        compute_seconds=compute,
        bubble_seconds=free_step - compute,
        exposed_seconds=alike_step - free_step,
        slow_seconds=last_done([*followed.values()] or [alike], collectives) + update_seconds - alike_step,
        followed=by_replica,
    )


def _kinds(slow: Iterable[SlowRank]) -> dict[int, tuple[SlowRank, ...]]:
    """Return each replica's slow ranks in a normal form, so that replicas with equal ones share a key."""
    found: dict[int, set[SlowRank]] = {}
    for one in slow:
        found.setdefault(one.replica, set()).add(replace(one, replica=0))
    return {replica: tuple(sorted(own, key=lambda one: (one.rank, one.factor))) for replica, own in found.items()}


def last_done(followed: Sequence[WalkResult], collectives: Sequence[Collective]) -> float:
    """Return when the last rank is done, including gradient collectives, if these are the slowest replicas."""
    program = followed[0].program
    last = [_last_computes(found) for found in followed]
    done = max(max(found.ends) for found in followed)
    for rank in range(program.num_ranks):
        free = 0.0
        times = [(max(one[s][1] for one in last), max(one[s][0] for one in last), s) for s in program.stages_of(rank)]
        for stop, start, stage in sorted(times):
            free = gradient_ready_time(collectives, stage=stage, start=start, stop=stop, free=free)
        done = max(done, free)
    return done


def _last_computes(followed: WalkResult) -> dict[int, tuple[float, float]]:
    """Return the start and stop of each stage's last compute."""
    wanted: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(followed.program.actions):
        missing = set(followed.program.stages_of(rank))
        place = len(row)
        while missing and place:
            place -= 1
            if row[place].op.is_compute and row[place].stage in missing:
                missing.remove(row[place].stage)
                wanted[rank, place] = row[place].stage
    return {wanted[rank, place]: (start, stop) for rank, place, start, stop in followed.done if (rank, place) in wanted}


def _compute_seconds(program: Program, costs: Costs) -> float:
    """Return the compute seconds of a mean rank."""
    counts = Counter((action.op, action.stage) for row in program for action in row)
    kinds = (Action(op=op, stage=stage, microbatch=0) for op, stage in counts if op.is_compute)
    return sum(counts[kind.op, kind.stage] * costs.seconds(kind) for kind in kinds) / program.num_ranks


def _refuse_bad_ranks(
    program: Program, *, replicas: int, each: int, slow: Iterable[SlowRank], update_seconds: float
) -> None:
    for word, value in (("replicas", replicas), ("ranks a stage", each)):
        if value < 1:
            raise UsageError(f"{value} {word}: at least 1 is needed.")
    if not (isfinite(update_seconds) and update_seconds >= 0):
        raise UsageError(f"update_seconds={update_seconds:g}: a time of 0 seconds or more is needed.")
    for one in slow:
        if not (0 <= one.rank < program.num_ranks and 0 <= one.replica < replicas):
            raise UsageError(
                f"there is no rank {one.rank} of replica {one.replica}.",
                cause=f"ranks are 0 to {program.num_ranks - 1} of the pipeline, replicas 0 to {replicas - 1}",
            )
        if not (isfinite(one.factor) and one.factor >= 1):
            raise UsageError(
                f"a slow rank takes {one.factor:g} times as long: 1 or more is needed.",
                hint="factor=1.2 for a rank that is a fifth slower",
            )
