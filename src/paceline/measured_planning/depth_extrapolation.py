"""Depth extrapolation: compute a deep model's memory exactly from replays with few blocks per stage, to save time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from paceline.config.settings import Settings
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory
from paceline.measured_planning.memory_replay import StageMemory, replay
from paceline.measured_planning.profile.sample_batches import FEW_SAMPLES, make_profiling_plan
from paceline.measured_planning.profile.truncated_model import largest_tensor_per_block, set_num_blocks
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.layout.bucket_sizes import LARGE_PARAMETER_BYTES
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipeline_options import is_schedule_file
from paceline.profiling.model_tracing.memory_timeline import MemoryTimeline, extrapolate_peak, extrapolate_timeline
from paceline.profiling.model_tracing.memory_tracker import MemoryByKind
from paceline.schedule.registry import find_schedule

_MIN_BLOCKS = 4  # in a stage: its first two and last two blocks may depend on the layers before and after them
_MAX_REPLAYED_SHARE = 0.7  # of all blocks: if more are replayed, a replay of the whole model is as fast
_Run = tuple[list[MemoryTimeline], list[StageMemory]]  # the results of one replay; both lists are by pipeline rank


@dataclass(frozen=True, kw_only=True)
class _ExtrapolationPlan:
    """The replays from which to extrapolate: one with few blocks in each stage, and one for each group of stages.

    In the replay of a group, each stage of the group has one more block. `groups` has the stages of each group, and
    `stages_by_rank` the stages on each pipeline rank.
    """

    stages_by_rank: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class DepthExtrapolation:
    """The extrapolation for one job, whose model is built on fake tensors (`build_once`). Its properties are cached."""

    job: Job
    settings: Settings

    @cached_property
    def largest_tensor_per_block(self) -> int:
        """The elements of the largest trainable tensor of a block; 0 if the model is not one list of equal blocks."""
        return 0 if isinstance(self.job.model, PretrainedModel) else largest_tensor_per_block(self.job, _MIN_BLOCKS)

    @cached_property
    def is_representative(self) -> bool:
        """True if a few blocks of the model represent all of its blocks."""
        try:
            return are_blocks_representative(self.job, self.settings)
        except Exception as error:  # the replay of the whole model reports the error
            if is_out_of_memory(error):
                raise
            return False

    def replay(self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> list[StageMemory]:
        """Return the result of `memory_replay.replay`, extrapolated if the extrapolation is exact and faster.

        `blocks` has the number of blocks of each stage.

        Raises:
            PacelineError: the run itself would be refused.
        """
        extrapolation = self.plan_extrapolation(settings, plan, blocks)
        try:
            memory = None if extrapolation is None else self._extrapolate(settings, plan, blocks, extrapolation)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            memory = None
        return replay(self.job, settings, plan) if memory is None else memory

    def count_replayed_blocks(self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> int:
        """Return how many blocks `replay` runs, over all stages and replays."""
        extrapolation = self.plan_extrapolation(settings, plan, blocks)
        return sum(blocks) if extrapolation is None else sum(map(sum, _depth_lists(extrapolation)))

    def plan_extrapolation(
        self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]
    ) -> _ExtrapolationPlan | None:
        """Return the replays from which to extrapolate; None if the whole model must be replayed."""
        extrapolation = _plan_for_settings(settings, plan, blocks)
        return (
            extrapolation
            if extrapolation is not None
            and self.largest_tensor_per_block > _max_bucketed_elements(plan)
            and self.is_representative
            else None
        )

    def _extrapolate(
        self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int], extrapolation: _ExtrapolationPlan
    ) -> list[StageMemory] | None:
        """Return the extrapolated memory of each pipeline rank; None if the replays do not allow it."""
        runs = self.replay_depths(settings, plan, _depth_lists(extrapolation))
        return _combine_runs([run for run in runs if run], blocks, extrapolation) if all(runs) else None

    def replay_depths(
        self, settings: Settings, plan: ExecutionPlan, depth_lists: Sequence[tuple[int, ...]]
    ) -> list[_Run | None]:
        """Run a replay for each element of `depth_lists`, which has the number of blocks of each stage.

        An element of the result is None if the job can't be truncated to these numbers.
        """
        runs: list[_Run | None] = []
        for depths in depth_lists:
            truncated, timelines = (
                set_num_blocks(self.job, sum(depths)),
                [MemoryTimeline() for _ in range(plan.mesh.pp)],
            )
            run = (
                None
                if truncated is None
                else replay(truncated[0], _set_stage_depths(settings, depths), plan, timelines=timelines)
            )
            runs.append(None if run is None else (timelines, run))
        return runs


def are_blocks_representative(job: Job, settings: Settings) -> bool:
    """Return whether extrapolation from few blocks gives the exact memory of the whole model at every operation.

    The test is one microbatch in one process. It fails if blocks differ by their position (another activation, some
    without gradients), or if outputs grow from block to block.
    """
    single_plan = make_profiling_plan(settings, "single", 1, samples=FEW_SAMPLES)
    shorter, longer = set_num_blocks(job, _MIN_BLOCKS), set_num_blocks(job, _MIN_BLOCKS + 1)
    if shorter is None or longer is None:
        return False
    timelines = []
    for replayed_job in (shorter[0], longer[0], job):
        timelines.append(MemoryTimeline())
        replay(replayed_job, _set_stage_depths(settings, ()), single_plan, timelines=timelines[-1:], warm_up=False)
    extrapolated = extrapolate_timeline(timelines[0], timelines[1], shorter[1] - _MIN_BLOCKS)
    return extrapolated is not None and extrapolated.parts == timelines[2].parts


def _plan_for_settings(settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> _ExtrapolationPlan | None:
    """Return the replays from which to extrapolate. None if the settings exclude it, or if it would not save time."""
    ranks, place_settings = plan.mesh.pp, settings.place
    if (
        not plan.update_rule.has_cost_model
        or place_settings.blocks
        or place_settings.cut == "export"
        or is_schedule_file(plan.asked.schedule)
    ):
        return None
    if plan.asked.remat.startswith("every"):  # with so few blocks, none or all of them might be recomputed
        return None
    owners: tuple[int, ...] = (0,)
    if ranks > 1:
        rule = find_schedule(plan.asked.schedule)
        owners = rule.placement(ranks=ranks, virtual=plan.asked.virtual or rule.virtual)
    if len(blocks) != len(owners) or min(blocks) < _MIN_BLOCKS:
        return None
    stages_by_rank = tuple(tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(ranks))
    if all(len({blocks[stage] for stage in rank_stages}) == 1 for rank_stages in stages_by_rank):
        groups = [tuple(range(len(owners)))]
    else:
        groups = list(zip(*stages_by_rank, strict=True))
    extrapolation = _ExtrapolationPlan(stages_by_rank=stages_by_rank, groups=tuple(groups))
    return extrapolation if sum(map(sum, _depth_lists(extrapolation))) < _MAX_REPLAYED_SHARE * sum(blocks) else None


def _depth_lists(extrapolation: _ExtrapolationPlan) -> list[tuple[int, ...]]:
    """Return the number of blocks of each stage, for every replay."""
    stages = range(sum(map(len, extrapolation.stages_by_rank)))
    return [tuple(_MIN_BLOCKS + (stage in group) for stage in stages) for group in ((), *extrapolation.groups)]


def _combine_runs(
    runs: Sequence[_Run], blocks: Sequence[int], extrapolation: _ExtrapolationPlan
) -> list[StageMemory] | None:
    """Return the memory of each pipeline rank with `blocks` per stage, extrapolated from the runs, or None."""
    stages = []
    for rank, rank_stages in enumerate(extrapolation.stages_by_rank):
        base, *longer_runs = [(timelines[rank], memories[rank]) for timelines, memories in runs]
        added_blocks = [
            next(blocks[stage] for stage in rank_stages if stage in group) - _MIN_BLOCKS
            for group in extrapolation.groups
        ]
        peak = extrapolate_peak(
            base[0], [(timeline, n) for (timeline, _), n in zip(longer_runs, added_blocks, strict=True)]
        )
        if peak is None:
            return None
        between_steps = _extrapolate_memory(
            base[1].between_steps,
            [(memory.between_steps, n) for (_, memory), n in zip(longer_runs, added_blocks, strict=True)],
        )
        stages.append(StageMemory(between_steps=between_steps, peak=peak))
    return stages


def _max_bucketed_elements(plan: ExecutionPlan) -> int:
    """Return the number of elements above which a tensor gets its own bucket.

    If each block has a tensor above it, no bucket has gradients of two blocks.
    """
    item_bytes = 2 if plan.asked.params == "bf16" else 4
    return LARGE_PARAMETER_BYTES // item_bytes * plan.mesh.tp * plan.mesh.ep


def _set_stage_depths(settings: Settings, depths: tuple[int, ...]) -> Settings:
    """Return the settings with these numbers of blocks in the stages. A single stage needs no such setting."""
    stages = depths if len(depths) > 1 else ()
    return replace(settings, place=replace(settings.place, stages=stages))


def _extrapolate_memory(base: MemoryByKind, longer_runs: Sequence[tuple[MemoryByKind, int]]) -> MemoryByKind:
    def extrapolated(kind: str) -> int:
        base_bytes: int = getattr(base, kind)
        added_bytes: int = sum((getattr(memory, kind) - base_bytes) * blocks for memory, blocks in longer_runs)
        return base_bytes + added_bytes

    return MemoryByKind(**{field.name: extrapolated(field.name) for field in fields(MemoryByKind)})
