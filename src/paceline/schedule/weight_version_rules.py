"""Weight-version rules of pipelines that are never flushed.

A stage updates after each batch, while later batches are in flight. So a *rule*, not timing, must determine the weights
that a microbatch's forward and backward use. A rule counts updates, so it holds whatever the ranks wait for: pausing a
pipeline, saving, and resuming change no weight. `d = stages - 1 - stage` is how many microbatches of 1F1B are in flight
past a stage.

- `NEWEST`: the weights that 1F1B's own order has there, after all whole batches of the first k - d microbatches:
  weight stashing (Narayanan et al., "PipeDream", SOSP 2019). Early stages are later than late ones.
- `ENTRY`: the weights that the first stage uses, in every stage: PipeDream with vertical sync.
- `DOUBLE`: those of the batch before, in every stage; two versions suffice (Narayanan et al., "PipeDream-2BW", ICML
  2021).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.schedule.lowering import lower
from paceline.schedule.program import Action, Op, Program


class Rule(StrEnum):
    """The rule that determines which weights a microbatch is computed on."""

    NEWEST = "newest"
    ENTRY = "entry"
    DOUBLE = "double"


_NAMES = {Rule.NEWEST: "pipedream", Rule.ENTRY: "pipedream,vertical", Rule.DOUBLE: "2bw"}


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """A weight-version rule for a pipeline with this number of stages, one on each rank."""

    stages: int
    rule: Rule

    def depth(self, stage: int) -> int:
        """Return the number of microbatches that a stage forwards in 1F1B before its first backward."""
        return self.stages - 1 - stage

    def is_direct(self, stage: int) -> bool:
        """Return True if each microbatch uses the newest weights and finishes before they change."""
        return self.rule is Rule.NEWEST and not self.depth(stage)

    def version(self, *, stage: int, microbatch: int, stream: "Stream") -> int:
        """Return the number of updates in the weights that a microbatch is computed on in a stage."""
        if self.rule is Rule.DOUBLE:
            return max(0, stream.batch_of(microbatch) - 1)
        depth = self.depth(stage if self.rule is Rule.NEWEST else 0)
        return stream.whole_batches(microbatch - depth)


@dataclass(kw_only=True)
class Stream:
    """The batches of a run, end to end: the end of each batch, counted in one replica's microbatches.

    The first `gone` batches are no longer kept; `ends` are those after them.
    """

    ends: list[int] = field(default_factory=list)
    gone: int = 0

    @property
    def length(self) -> int:
        """Return the number of microbatches so far."""
        return self.ends[-1] if self.ends else 0

    @property
    def num_batches(self) -> int:
        """Return the number of batches so far."""
        return self.gone + len(self.ends)

    def add(self, size: int) -> None:
        """Append a batch of `size` microbatches."""
        self.ends.append(self.length + size)

    def whole_batches(self, microbatches: int) -> int:
        """Return the number of batches that lie completely within the first `microbatches`; 0 before the first."""
        return self.gone + bisect_right(self.ends, microbatches)

    def batch_of(self, microbatch: int) -> int:
        """Return the batch that a microbatch belongs to."""
        return self.gone + bisect_right(self.ends, microbatch)

    def is_end(self, microbatch: int) -> bool:
        """Return True if a batch ends with this microbatch."""
        place = bisect_right(self.ends, microbatch)
        return place < len(self.ends) and self.ends[place] == microbatch + 1

    def forget(self, *, keep: int) -> None:
        """Drop all but the last `keep` batches; earlier ones are not asked for again."""
        more = max(0, len(self.ends) - keep)
        self.ends, self.gone = self.ends[more:], self.gone + more


@dataclass(kw_only=True)
class StageVersions:
    """A stage's position in a stream, and its computes for each batch. `done` backwards are finished."""

    stash: VersionRule
    stage: int
    stream: Stream
    begun: int = 0
    done: int = 0

    def batch(self) -> Iterator[Action]:
        """Yield the computes for the last added batch: its forwards, each with the backward that it makes room for.

        If a rule needs an update that 1F1B would reach later (a batch shorter than the pipeline), the backwards for
        that update come first.
        """
        depth = self.stash.depth(self.stage)
        while self.begun < self.stream.length:
            while self.updates < self.stash.version(stage=self.stage, microbatch=self.begun, stream=self.stream):
                yield from self._backward()
            yield self._action(Op.FORWARD, self.begun)
            self.begun += 1
            while self.begun - self.done > depth:
                yield from self._backward()

    def rest(self) -> Iterator[Action]:
        """Yield the backwards of all microbatches in flight."""
        while self.done < self.begun:
            yield from self._backward()

    @property
    def updates(self) -> int:
        """Return the number of updates that the stage has made."""
        return self.stream.whole_batches(self.done)

    def _backward(self) -> Iterator[Action]:
        microbatch = self.done
        yield self._action(Op.BACKWARD, microbatch)
        self.done += 1
        if self.stream.is_end(microbatch):
            yield self._action(Op.UPDATE, microbatch)

    def _action(self, op: Op, microbatch: int) -> Action:
        return Action(op=op, stage=self.stage, microbatch=microbatch)


def continuous(stash: VersionRule, *, sizes: Sequence[int], drained: Sequence[int] = ()) -> Program:
    """Return the program of batches of these sizes, in one replica's microbatches.

    The pipeline is drained after the batches in `drained`.
    """
    orders = []
    for stage in range(stash.stages):
        course = StageVersions(stash=stash, stage=stage, stream=Stream())
        order: list[Action] = []
        for number, size in enumerate(sizes):
            course.stream.add(size)
            order += course.batch()
            order += course.rest() if number in drained else ()
        orders.append([*order, *course.rest()])
    owner = range(stash.stages)
    return lower(orders, name=_NAMES[stash.rule], rank_of_stage=owner, num_micro=sum(sizes))


@dataclass(frozen=True, kw_only=True)
class WeightVersionUse:
    """The weight versions that a program uses in one stage.

    `versions[k]` is the number of updates in microbatch k's weights; `staleness[k]` is the number of updates between
    that version and its own batch's update; `alive` is the number of versions to hold at once, including the newest.
    """

    stage: int
    versions: tuple[int, ...]
    staleness: tuple[int, ...]
    alive: int


def weight_versions_used(program: Program, stash: VersionRule) -> tuple[WeightVersionUse, ...]:
    """Return the weight versions that each stage uses, from the program alone, by counting updates in each rank's line.

    Raises:
        ValueError: a microbatch comes before the weights that its rule names.
    """
    stream = Stream(ends=[last + 1 for last in program.updates])
    return tuple(_seen(program, stash, stage=stage, stream=stream) for stage in range(program.num_stages))


def _seen(program: Program, stash: VersionRule, *, stage: int, stream: Stream) -> WeightVersionUse:
    row = [a for a in program.computes(program.rank_of_stage[stage]) if a.stage == stage]
    used = [stash.version(stage=stage, microbatch=k, stream=stream) for k in range(program.num_micro)]
    taken, last_use = 0, {}
    for place, action in enumerate(row):
        if action.op is Op.FORWARD and used[action.microbatch] > taken:
            raise ValueError(f"{action} needs update {used[action.microbatch]}, but the stage has taken {taken}")
        if action.op is Op.BACKWARD:
            last_use[used[action.microbatch]] = place
        taken += action.op is Op.UPDATE
    return WeightVersionUse(
        stage=stage,
        versions=tuple(used),
        staleness=tuple(stream.batch_of(k) - version for k, version in enumerate(used)),
        alive=_most_alive(row, last_use),
    )


def _most_alive(row: Sequence[Action], last_use: dict[int, int]) -> int:
    """Return the largest number of versions held at once: the newest, and those that microbatches still need."""
    newest = most = 0
    for place, action in enumerate(row):
        newest += action.op is Op.UPDATE
        alive = sum(1 for version, last in last_use.items() if version < newest and last > place)
        most = max(most, alive + 1)
    return most
