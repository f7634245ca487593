"""Determine by a rule which weight version each microbatch uses, in pipelines that are never flushed.

A stage updates after each batch, while later batches are in flight. So a *rule*, not the timing, must determine the
weights that a microbatch's forward and backward use. A rule counts updates, so that pausing, saving and resuming a
pipeline change no weight. In 1F1B, d = stages - 1 - stage microbatches are in flight in the stages after a stage.

- `NEWEST` is weight stashing (Narayanan et al., "PipeDream", SOSP 2019). Before the forward of microbatch k, 1F1B has
  run the backwards of the first k - d microbatches. The forward uses the newest weights of this time: those after the
  last complete batch. Early stages use older weights than late stages.
- `ENTRY` is PipeDream with vertical sync. Every stage uses the version that the first stage uses.
- `DOUBLE` is PipeDream-2BW (Narayanan et al., ICML 2021). Every stage uses the weights before the previous batch's
  update, so that two versions suffice.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.schedule.lowering import lower
from paceline.schedule.program import Action, Op, Program


class Rule(StrEnum):
    """The rule that determines the weights that a microbatch uses."""

    NEWEST = "newest"
    ENTRY = "entry"
    DOUBLE = "double"


_PROGRAM_NAMES = {Rule.NEWEST: "pipedream", Rule.ENTRY: "pipedream,vertical", Rule.DOUBLE: "2bw"}


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """A weight-version rule for a pipeline of `stages` stages, one on each rank."""

    stages: int
    rule: Rule

    def num_warmup_forwards(self, stage: int) -> int:
        """Return the number of forwards of a stage in 1F1B before its forwards and backwards alternate."""
        return self.stages - 1 - stage

    def needs_no_stash(self, stage: int) -> bool:
        """Return True if each microbatch uses the newest weights and runs its backward before the next update."""
        return self.rule is Rule.NEWEST and not self.num_warmup_forwards(stage)

    def version(self, *, stage: int, microbatch: int, batches: "BatchBoundaries") -> int:
        """Return the version of the weights that a microbatch uses in a stage: the number of updates in them."""
        if self.rule is Rule.DOUBLE:
            return max(0, batches.batch_of(microbatch) - 1)
        num_in_flight = self.num_warmup_forwards(stage if self.rule is Rule.NEWEST else 0)
        return batches.num_complete_batches(microbatch - num_in_flight)


@dataclass(kw_only=True)
class BatchBoundaries:
    """The ends of a run's batches, counted in microbatches of one replica since the start.

    The first `num_dropped` batches are not in `ends`.
    """

    ends: list[int] = field(default_factory=list)
    num_dropped: int = 0

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches so far."""
        return self.ends[-1] if self.ends else 0

    @property
    def num_batches(self) -> int:
        """Return the number of batches so far."""
        return self.num_dropped + len(self.ends)

    def add(self, size: int) -> None:
        """Append a batch of `size` microbatches."""
        self.ends.append(self.num_microbatches + size)

    def num_complete_batches(self, microbatches: int) -> int:
        """Return the number of complete batches among the first `microbatches` microbatches."""
        return self.num_dropped + bisect_right(self.ends, microbatches)

    def batch_of(self, microbatch: int) -> int:
        """Return the index of the batch that a microbatch belongs to."""
        return self.num_dropped + bisect_right(self.ends, microbatch)

    def is_end(self, microbatch: int) -> bool:
        """Return True if a batch ends with this microbatch."""
        index = bisect_right(self.ends, microbatch)
        return index < len(self.ends) and self.ends[index] == microbatch + 1

    def drop_old_batches(self, *, num_kept: int) -> None:
        """Drop all but the last `num_kept` batches."""
        num_excess = max(0, len(self.ends) - num_kept)
        self.ends, self.num_dropped = self.ends[num_excess:], self.num_dropped + num_excess


@dataclass(kw_only=True)
class StageProgress:
    """The progress of a stage through the batches. It yields the stage's computes.

    `num_forwards` and `num_backwards` count the forwards and backwards that were yielded.
    """

    version_rule: VersionRule
    stage: int
    batches: BatchBoundaries
    num_forwards: int = 0
    num_backwards: int = 0

    def batch_actions(self) -> Iterator[Action]:
        """Yield the computes until all forwards of the last added batch have run, in the order of 1F1B.

        If the batch is shorter than the pipeline, a forward may need an update that 1F1B runs later. The backwards for
        this update then come before the forward.
        """
        num_warmup = self.version_rule.num_warmup_forwards(self.stage)
        while self.num_forwards < self.batches.num_microbatches:
            while self.num_updates < self.version_rule.version(
                stage=self.stage, microbatch=self.num_forwards, batches=self.batches
            ):
                yield from self._backward()
            yield self._action(Op.FORWARD, self.num_forwards)
            self.num_forwards += 1
            while self.num_forwards - self.num_backwards > num_warmup:
                yield from self._backward()

    def remaining_backwards(self) -> Iterator[Action]:
        """Yield the backwards of all microbatches in flight."""
        while self.num_backwards < self.num_forwards:
            yield from self._backward()

    @property
    def num_updates(self) -> int:
        """Return the number of updates that the stage has made."""
        return self.batches.num_complete_batches(self.num_backwards)

    def _backward(self) -> Iterator[Action]:
        microbatch = self.num_backwards
        yield self._action(Op.BACKWARD, microbatch)
        self.num_backwards += 1
        if self.batches.is_end(microbatch):
            yield self._action(Op.UPDATE, microbatch)

    def _action(self, op: Op, microbatch: int) -> Action:
        return Action(op=op, stage=self.stage, microbatch=microbatch)


def build_continuous_program(
    version_rule: VersionRule, *, sizes: Sequence[int], drained_after: Sequence[int] = ()
) -> Program:
    """Return the program of several batches. `sizes` are in microbatches of one replica.

    After the batches with the indices `drained_after`, the pipeline runs all its remaining backwards.
    """
    orders = []
    for stage in range(version_rule.stages):
        progress = StageProgress(version_rule=version_rule, stage=stage, batches=BatchBoundaries())
        order: list[Action] = []
        for number, size in enumerate(sizes):
            progress.batches.add(size)
            order += progress.batch_actions()
            order += progress.remaining_backwards() if number in drained_after else ()
        orders.append([*order, *progress.remaining_backwards()])
    rank_of_stage = range(version_rule.stages)
    return lower(orders, name=_PROGRAM_NAMES[version_rule.rule], rank_of_stage=rank_of_stage, num_micro=sum(sizes))


@dataclass(frozen=True, kw_only=True)
class WeightVersionUse:
    """The weight versions that a program uses in one stage.

    `versions[k]` is the number of updates in the weights that microbatch k uses. `staleness[k]` is the number of
    updates between this version and the update of the microbatch's batch. `num_versions` is the largest number of
    versions that exist at once, including the newest.
    """

    stage: int
    versions: tuple[int, ...]
    staleness: tuple[int, ...]
    num_versions: int


def weight_versions_used(program: Program, version_rule: VersionRule) -> tuple[WeightVersionUse, ...]:
    """Return the weight versions that each stage uses under the rule, and how many of them exist at once.

    Raises:
        ValueError: a microbatch needs weights that its stage has not computed yet.
    """
    batches = BatchBoundaries(ends=[last + 1 for last in program.update_microbatches])
    return tuple(
        _stage_version_use(program, version_rule, stage=stage, batches=batches) for stage in range(program.num_stages)
    )


def _stage_version_use(
    program: Program, version_rule: VersionRule, *, stage: int, batches: BatchBoundaries
) -> WeightVersionUse:
    row = [a for a in program.compute_actions(program.rank_of_stage[stage]) if a.stage == stage]
    versions = [version_rule.version(stage=stage, microbatch=k, batches=batches) for k in range(program.num_micro)]
    num_updates, last_use = 0, {}
    for index, action in enumerate(row):
        if action.op is Op.FORWARD and versions[action.microbatch] > num_updates:
            raise ValueError(
                f"{action} needs update {versions[action.microbatch]}, but the stage has run {num_updates} updates"
            )
        if action.op is Op.BACKWARD:
            last_use[versions[action.microbatch]] = index
        num_updates += action.op is Op.UPDATE
    return WeightVersionUse(
        stage=stage,
        versions=tuple(versions),
        staleness=tuple(batches.batch_of(k) - version for k, version in enumerate(versions)),
        num_versions=_max_versions_held(row, last_use),
    )


def _max_versions_held(row: Sequence[Action], last_use: dict[int, int]) -> int:
    """Return the largest number of versions that exist at once: the newest, and those that microbatches still need.

    `last_use` has the index in `row` of the last backward that needs each version.
    """
    newest = max_versions = 0
    for index, action in enumerate(row):
        newest += action.op is Op.UPDATE
        num_needed = sum(1 for version, last in last_use.items() if version < newest and last > index)
        max_versions = max(max_versions, num_needed + 1)
    return max_versions
