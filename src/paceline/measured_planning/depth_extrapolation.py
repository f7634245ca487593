"""Depth extrapolation: the memory of a deep model's step, from replays with few blocks per stage; exact and faster."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from paceline.config.settings import Settings
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory
from paceline.measured_planning.memory_replay import StageMemory, replay
from paceline.measured_planning.profile.sample_batches import FEW, plan_of
from paceline.measured_planning.profile.truncated_model import largest_of_each, with_blocks
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.parallel.module_access.parameters import LARGE_BYTES
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipeline_options import is_schedule_file
from paceline.profiling.model_tracing.memory_timeline import MemoryTimeline, extrapolate, peak_of
from paceline.profiling.model_tracing.memory_tracker import MemoryByKind
from paceline.schedule.registry import find_schedule

_KEPT = 4  # blocks of a stage: the two at each end may depend on the layers before and after the blocks
_WORTH = 0.7  # share of all blocks: above it, a replay of the whole model is as fast
_Run = tuple[list[MemoryTimeline], list[StageMemory]]


@dataclass(frozen=True, kw_only=True)
class _Way:
    """An extrapolation plan: each group of pipeline stages gets one more block, in a replay of its own."""

    stages_of: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class DepthExtrapolation:
    """A job whose model is a chain of equal blocks, of which a few may represent all; results are cached.

    Its model is built on fake tensors (`build_once`).
    """

    job: Job
    settings: Settings

    @cached_property
    def largest(self) -> int:
        """The elements of the largest tensor that each block trains; 0 if the blocks are not equal and in one list."""
        return 0 if isinstance(self.job.model, PretrainedModel) else largest_of_each(self.job, _KEPT)

    @cached_property
    def tells(self) -> bool:
        """Return whether few of its blocks represent all of them."""
        try:
            return tells_of_all(self.job, self.settings)
        except Exception as error:  # the whole replay reports the error
            if is_out_of_memory(error):
                raise
            return False

    def replay(self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> list[StageMemory]:
        """Return the result of `replay` for these blocks per stage, extrapolated if that is exact and faster.

        Raises:
            PacelineError: the run itself would be refused.
        """
        way = self.way(settings, plan, blocks)
        try:
            found = None if way is None else self._carried_on(settings, plan, blocks, way)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = None
        return replay(self.job, settings, plan) if found is None else found

    def replayed(self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> int:
        """Return how many blocks `replay` runs, over all stages and replays."""
        way = self.way(settings, plan, blocks)
        return sum(blocks) if way is None else sum(map(sum, _depths(way)))

    def way(self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> _Way | None:
        """Return the extrapolation plan; None if the whole model is replayed."""
        way = _way(settings, plan, blocks)
        return way if way is not None and self.largest > _least(plan) and self.tells else None

    def _carried_on(
        self, settings: Settings, plan: ExecutionPlan, blocks: Sequence[int], way: _Way
    ) -> list[StageMemory] | None:
        """Return the extrapolated result; None if few blocks are not enough."""
        runs = self.runs(settings, plan, _depths(way))
        return _joined([run for run in runs if run], blocks, way) if all(runs) else None

    def runs(self, settings: Settings, plan: ExecutionPlan, every: Sequence[tuple[int, ...]]) -> list[_Run | None]:
        """Return a replay for each list of blocks per stage; None if the job can't be shortened to it."""
        found: list[_Run | None] = []
        for depths in every:
            short, journals = with_blocks(self.job, sum(depths)), [MemoryTimeline() for _ in range(plan.mesh.pp)]
            run = None if short is None else replay(short[0], _cut(settings, depths), plan, journals=journals)
            found.append(None if run is None else (journals, run))
        return found


def tells_of_all(job: Job, settings: Settings) -> bool:
    """Return whether few blocks represent all of them in every operation of one microbatch in one process.

    They do not if blocks differ by their position (another activation, some without gradients), or if their outputs
    grow from block to block.
    """
    alone = plan_of(settings, "single", 1, samples=FEW)
    few, more = with_blocks(job, _KEPT), with_blocks(job, _KEPT + 1)
    if few is None or more is None:
        return False
    journals = []
    for each in (few[0], more[0], job):
        journals.append(MemoryTimeline())
        replay(each, _cut(settings, ()), alone, journals=journals[-1:], warm=False)
    found = extrapolate(journals[0], journals[1], few[1] - _KEPT)
    return found is not None and found.parts == journals[2].parts


def _way(settings: Settings, plan: ExecutionPlan, blocks: Sequence[int]) -> _Way | None:
    ranks, how = plan.mesh.pp, settings.place
    if (
        not plan.update_rule.has_cost_model
        or how.blocks
        or how.cut == "export"
        or is_schedule_file(plan.asked.schedule)
    ):
        return None
    if plan.asked.remat.startswith("every"):  # among so few blocks, none or all might be recomputed
        return None
    owners: tuple[int, ...] = (0,)
    if ranks > 1:
        rule = find_schedule(plan.asked.schedule)
        owners = rule.placement(ranks=ranks, virtual=plan.asked.virtual or rule.virtual)
    if len(blocks) != len(owners) or min(blocks) < _KEPT:
        return None
    stages_of = tuple(tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(ranks))
    if all(len({blocks[stage] for stage in own}) == 1 for own in stages_of):
        together = [tuple(range(len(owners)))]
    else:
        together = list(zip(*stages_of, strict=True))
    way = _Way(stages_of=stages_of, groups=tuple(together))
    return way if sum(map(sum, _depths(way))) < _WORTH * sum(blocks) else None


def _depths(way: _Way) -> list[tuple[int, ...]]:
    """Return the blocks in each stage, for every replay."""
    stages = range(sum(map(len, way.stages_of)))
    return [tuple(_KEPT + (stage in group) for stage in stages) for group in ((), *way.groups)]


def _joined(runs: Sequence[_Run], blocks: Sequence[int], way: _Way) -> list[StageMemory] | None:
    found = []
    for rank, own in enumerate(way.stages_of):
        base, *more = [(journals[rank], seen[rank]) for journals, seen in runs]
        further = [next(blocks[stage] for stage in own if stage in group) - _KEPT for group in way.groups]
        peak = peak_of(base[0], [(journal, n) for (journal, _), n in zip(more, further, strict=True)])
        if peak is None:
            return None
        between = _sum(base[1].between, [(seen.between, n) for (_, seen), n in zip(more, further, strict=True)])
        found.append(StageMemory(between=between, peak=peak))
    return found


def _least(plan: ExecutionPlan) -> int:
    """Return the elements above which a tensor gets a bucket of its own: then no bucket spans two blocks."""
    item = 2 if plan.asked.params == "bf16" else 4
    return LARGE_BYTES // item * plan.mesh.tp * plan.mesh.ep


def _cut(settings: Settings, depths: tuple[int, ...]) -> Settings:
    """Return the settings with these blocks in each stage."""
    stages = depths if len(depths) > 1 else ()
    return replace(settings, place=replace(settings.place, stages=stages))


def _sum(base: MemoryByKind, more: Sequence[tuple[MemoryByKind, int]]) -> MemoryByKind:
    def carried(kind: str) -> int:
        own: int = getattr(base, kind)
        further: int = sum((getattr(held, kind) - own) * blocks for held, blocks in more)
        return own + further

    return MemoryByKind(**{each.name: carried(each.name) for each in fields(MemoryByKind)})
