"""A deep model's step, by replays of it with few blocks in each stage: as exact, and in a fraction of the time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from paceline.job import Job
from paceline.measure.held import Held
from paceline.measure.journal import Journal, carried_on, peak_of
from paceline.place.start.stored import Stored
from paceline.place.units import LARGE_BYTES
from paceline.plan.pipeline import is_file
from paceline.plan.settle import Plan
from paceline.schedule.table import schedule_named
from paceline.spec.settings import Settings
from paceline.spec.update import Kind
from paceline.survive.short import is_shortage
from paceline.train.replay import Replayed, replay
from paceline.train.samples import FEW, plan_of
from paceline.train.shallow import with_blocks

_KEPT = 4  # blocks of a stage: two at each end see what comes before and after the chain
_WORTH = 0.7  # of the blocks of a whole replay


@dataclass(frozen=True, kw_only=True)
class _Way:
    """`groups` of a pipeline's stages get a block more together, each in a replay of its own."""

    num_ranks: int
    stages_of: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]


def replay_deep(
    job: Job, settings: Settings, plan: Plan, *, blocks: Sequence[int], known: dict[int, bool] | None = None
) -> list[Replayed]:
    """As `replay`, of a model with so many like blocks in each stage; whole where that is not longer.

    `known` remembers of a job whether few blocks tell of so many.

    Raises:
        PacelineError: what the run itself would refuse.
    """
    way = _way(settings, plan, blocks)
    known = {} if known is None else known
    if way is not None and not isinstance(job.model, Stored) and known.get(sum(blocks), True):
        try:
            known.setdefault(sum(blocks), tells_of_all(job, settings, sum(blocks)))
            found = _carried_on(job, settings, plan, blocks, way) if known[sum(blocks)] else None
        except Exception as error:  # the whole replay says what there is to say
            if is_shortage(error):
                raise
            found = None
        if found is not None:
            return found
    return replay(job, settings, plan)


def tells_of_all(job: Job, settings: Settings, blocks: int) -> bool:
    """Whether few of the blocks tell of so many, operation by operation: in one process, of one microbatch.

    They do not where blocks differ by their place (another activation, some without gradients), or where what one gives
    to the next grows as they go.
    """
    alone = plan_of(settings, "single", 1, samples=FEW)
    journals = []
    for count in (_KEPT, _KEPT + 1, blocks):
        short = job if count == blocks else with_blocks(job, count)
        if short is None:
            return False
        journals.append(Journal())
        replay(short, _cut(settings, ()), alone, journals=journals[-1:], warm=False)
    few, more, whole = journals
    found = carried_on(few, more, blocks - _KEPT)
    return found is not None and found.parts == whole.parts


def blocks_replayed(settings: Settings, plan: Plan, blocks: Sequence[int]) -> int:
    """Of all stages, and all replays."""
    way = _way(settings, plan, blocks)
    return sum(blocks) if way is None else sum(map(sum, _depths(way)))


def _way(settings: Settings, plan: Plan, blocks: Sequence[int]) -> _Way | None:
    ranks, how = plan.mesh.pp, settings.place
    if plan.rule.kind is not Kind.SYNC or how.blocks or how.cut == "export" or is_file(plan.asked.schedule):
        return None
    owners: tuple[int, ...] = (0,)
    if ranks > 1:
        rule = schedule_named(plan.asked.schedule)
        owners = rule.placement(ranks=ranks, virtual=plan.asked.virtual or rule.virtual)
    if len(blocks) != len(owners) or min(blocks) < _KEPT:
        return None
    stages_of = tuple(tuple(s for s, owner in enumerate(owners) if owner == rank) for rank in range(ranks))
    if all(len({blocks[stage] for stage in own}) == 1 for own in stages_of):
        together = [tuple(range(len(owners)))]
    else:
        together = list(zip(*stages_of, strict=True))
    way = _Way(num_ranks=ranks, stages_of=stages_of, groups=tuple(together))
    return way if sum(map(sum, _depths(way))) < _WORTH * sum(blocks) else None


def _depths(way: _Way) -> list[tuple[int, ...]]:
    """Blocks in each stage, of every replay."""
    stages = range(sum(map(len, way.stages_of)))
    return [tuple(_KEPT + (stage in group) for stage in stages) for group in ((), *way.groups)]


def _carried_on(job: Job, settings: Settings, plan: Plan, blocks: Sequence[int], way: _Way) -> list[Replayed] | None:
    runs: list[tuple[list[Journal], list[Replayed]]] = []
    for depths in _depths(way):
        short = with_blocks(job, sum(depths), least=_least(plan))
        if short is None:
            return None
        journals = [Journal() for _ in range(way.num_ranks)]
        runs.append((journals, replay(short, _cut(settings, depths), plan, journals=journals)))
    found = []
    for rank, own in enumerate(way.stages_of):
        base, *more = [(journals[rank], seen[rank]) for journals, seen in runs]
        further = [next(blocks[stage] for stage in own if stage in group) - _KEPT for group in way.groups]
        peak = peak_of(base[0], [(journal, n) for (journal, _), n in zip(more, further, strict=True)])
        if peak is None:
            return None
        between = _sum(base[1].between, [(seen.between, n) for (_, seen), n in zip(more, further, strict=True)])
        found.append(Replayed(between=between, peak=peak))
    return found


def _least(plan: Plan) -> int:
    """Elements of a tensor that travels alone: where a block has one, what travels together ends in every block."""
    item = 2 if plan.asked.params == "bf16" else 4
    return LARGE_BYTES // item * plan.mesh.tp * plan.mesh.ep + 1


def _cut(settings: Settings, depths: tuple[int, ...]) -> Settings:
    """With these stages, and no weights of others."""
    stages = depths if len(depths) > 1 else ()
    return replace(settings, place=replace(settings.place, stages=stages))


def _sum(base: Held, more: Sequence[tuple[Held, int]]) -> Held:
    def carried(kind: str) -> int:
        own: int = getattr(base, kind)
        further: int = sum((getattr(held, kind) - own) * blocks for held, blocks in more)
        return own + further

    return Held(**{each.name: carried(each.name) for each in fields(Held)})
