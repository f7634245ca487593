"""Simulate a planned step in virtual time, for any number of ranks, with collectives and slow ranks.

The pipeline of one replica without slow ranks is simulated action by action, and so is that of each replica with slow
ranks. All other replicas behave like the first one, so they are only counted.
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
    """A rank that computes slowly."""

    rank: int
    """The position of the rank in the pipeline of its replica."""
    factor: float
    """How many times as long the computes of the rank take, at least 1."""
    replica: int = 0
    """The number of the replica."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """A simulated step. The four `..._seconds` fields are averages over the ranks; they sum to `step_seconds`."""

    ranks: int
    """The number of ranks of all replicas."""
    compute_seconds: float
    """The time of computes and of the update, without slow ranks."""
    bubble_seconds: float
    """The time that a rank would be idle if communication took no time."""
    exposed_seconds: float
    """The time that communication adds."""
    slow_seconds: float
    """The time that slow ranks add."""
    walks: Mapping[int, WalkResult]
    """The simulated pipeline of each replica with slow ranks; under -1, that of all other replicas."""

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
        """The timeline of the first replica's pipeline. Its computes include exposed collectives."""
        return self.replica_timeline(0)

    def replica_timeline(self, replica: int) -> Timeline:
        """Return the timeline of a replica's pipeline."""
        walk = self.walks.get(replica, self.walks[-1])
        return Timeline(name=walk.program.name, num_ranks=walk.program.num_ranks, spans=walk.spans)

    def amount_per_day(self, *, amount_per_step: float, goodput: Goodput | None = None) -> float:
        """Return the samples or tokens per day that no failure discards; a step has `amount_per_step` of them."""
        useful_fraction = 1.0 if goodput is None else goodput.useful
        return amount_per_step * useful_fraction * DAY_SECONDS / self.step_seconds


def simulate_step(
    program: Program,
    *,
    costs: Costs,
    collectives: Sequence[Collective] = (),
    replicas: int = 1,
    ranks_per_stage: int = 1,
    slow_ranks: Sequence[SlowRank] = (),
    update_seconds: float = 0.0,
) -> SimulatedStep:
    """Simulate one step of a valid program on `replicas` replicas of its pipeline.

    Programs from `build` are valid, and `check` checks others. Each stage has `ranks_per_stage` ranks. `costs` has the
    times of computes without collectives, and of the messages between stages. A collective at the end of the step joins
    all replicas and waits for the slowest one; its `overlap` says how much of it may run during the last backward. Then
    every rank takes `update_seconds`. The step ends when the last rank has finished.

    Raises:
        UsageError: a time, a count or a slow rank is invalid.
        ScheduleError: the program does not run to its end.
    """
    refuse_bad_numbers(program, costs=costs, collectives=collectives)
    _refuse_bad_ranks(
        program,
        replicas=replicas,
        ranks_per_stage=ranks_per_stage,
        slow_ranks=slow_ranks,
        update_seconds=update_seconds,
    )

    def run_walk(step_costs: Costs) -> WalkResult:
        result = walk_actions(program, costs=step_costs)
        if not result.is_complete:
            check(program)
        return result

    def walk_with_slow_ranks(group: Iterable[SlowRank]) -> WalkResult:
        slow_costs = costs
        for slow_rank in group:
            slow_costs = slow_down_rank(program, costs=slow_costs, rank=slow_rank.rank, factor=slow_rank.factor)
        return run_walk(with_collectives(program, costs=slow_costs, collectives=collectives))

    free_walk = run_walk(replace(costs, transfer=0.0, latency=0.0, ready=0.0))  # communication takes no time
    slow_ranks_by_replica = _group_by_replica(slow_ranks)
    typical_walk = walk_with_slow_ranks(())
    walks_by_slow_ranks = {group: walk_with_slow_ranks(group) for group in set(slow_ranks_by_replica.values())}
    walks = {replica: walks_by_slow_ranks[key] for replica, key in slow_ranks_by_replica.items()} | {-1: typical_walk}
    free_step = max(free_walk.end_times) + update_seconds
    typical_step = finish_time([typical_walk], collectives) + update_seconds
    compute = _compute_seconds(program, costs) + update_seconds
    return SimulatedStep(
        ranks=replicas * program.num_ranks * ranks_per_stage,
        compute_seconds=compute,
        bubble_seconds=free_step - compute,
        exposed_seconds=typical_step - free_step,
        slow_seconds=finish_time([*walks_by_slow_ranks.values()] or [typical_walk], collectives)
        + update_seconds
        - typical_step,
        walks=walks,
    )


def _group_by_replica(slow_ranks: Iterable[SlowRank]) -> dict[int, tuple[SlowRank, ...]]:
    """Return the sorted slow ranks of each replica, with `replica` set to 0.

    Replicas with equal slow ranks have equal values, so that one simulation serves all of them.
    """
    by_replica: dict[int, set[SlowRank]] = {}
    for slow_rank in slow_ranks:
        by_replica.setdefault(slow_rank.replica, set()).add(replace(slow_rank, replica=0))
    return {
        replica: tuple(sorted(ranks, key=lambda slow_rank: (slow_rank.rank, slow_rank.factor)))
        for replica, ranks in by_replica.items()
    }


def finish_time(walks: Sequence[WalkResult], collectives: Sequence[Collective]) -> float:
    """Return the time at which the last rank has finished the step, without the update.

    Each walk is the pipeline of one replica. The gradient collectives join these replicas.
    """
    program = walks[0].program
    last_computes = [_last_computes(walk) for walk in walks]
    finish = max(max(walk.end_times) for walk in walks)
    for rank in range(program.num_ranks):
        link_free_time = 0.0
        times = [
            (max(computes[s][1] for computes in last_computes), max(computes[s][0] for computes in last_computes), s)
            for s in program.stages_of(rank)
        ]
        for stop, start, stage in sorted(times):
            link_free_time = gradient_ready_time(
                collectives, stage=stage, start=start, stop=stop, link_free_time=link_free_time
            )
        finish = max(finish, link_free_time)
    return finish


def _last_computes(walk: WalkResult) -> dict[int, tuple[float, float]]:
    """Return, by stage, the start and the stop of its last compute."""
    last_actions: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(walk.program.actions):
        missing = set(walk.program.stages_of(rank))
        position = len(row)
        while missing and position:
            position -= 1
            if row[position].op.is_compute and row[position].stage in missing:
                missing.remove(row[position].stage)
                last_actions[rank, position] = row[position].stage
    return {
        last_actions[rank, index]: (start, stop)
        for rank, index, start, stop in walk.finished
        if (rank, index) in last_actions
    }


def _compute_seconds(program: Program, costs: Costs) -> float:
    """Return the compute seconds of the program, averaged over the ranks."""
    counts = Counter((action.op, action.stage) for row in program for action in row)
    distinct_actions = (Action(op=op, stage=stage, microbatch=0) for op, stage in counts if op.is_compute)
    return sum(counts[kind.op, kind.stage] * costs.seconds(kind) for kind in distinct_actions) / program.num_ranks


def _refuse_bad_ranks(
    program: Program, *, replicas: int, ranks_per_stage: int, slow_ranks: Iterable[SlowRank], update_seconds: float
) -> None:
    """Raise UsageError if a count, the update time or a slow rank is invalid."""
    for label, value in (("replicas", replicas), ("ranks a stage", ranks_per_stage)):
        if value < 1:
            raise UsageError(f"{value} {label}: at least 1 is needed.")
    if not (isfinite(update_seconds) and update_seconds >= 0):
        raise UsageError(f"update_seconds={update_seconds:g}: a time of 0 seconds or more is needed.")
    for slow_rank in slow_ranks:
        if not (0 <= slow_rank.rank < program.num_ranks and 0 <= slow_rank.replica < replicas):
            raise UsageError(
                f"there is no rank {slow_rank.rank} of replica {slow_rank.replica}.",
                cause=f"ranks are 0 to {program.num_ranks - 1} of the pipeline, replicas 0 to {replicas - 1}",
            )
        if not (isfinite(slow_rank.factor) and slow_rank.factor >= 1):
            raise UsageError(
                f"a slow rank takes {slow_rank.factor:g} times as long: 1 or more is needed.",
                hint="factor=1.2 for a rank that is a fifth slower",
            )
