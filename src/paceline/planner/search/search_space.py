"""The search space: all candidates for a model on a number of ranks, as a tree that a search can prune.

A trunk is the axes that split the model; a bough adds activation checkpointing; a branch adds the microbatch size, a
twig the schedule; a leaf says how data parallelism shards the rest. The grid omits impossible candidates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.planner.cost.layout_candidate import MICRO, Candidate
from paceline.planner.cost.pipeline_formulas import SPLITS, is_sure
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.model_costs.model_profile import ModelProfile

Offload = tuple[str, ...]
FAMILY = "family"


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The options that a search tries.

    `virtual` applies to schedules that can have any number of stages per rank; `micro_batch_size` None tries all sizes
    that divide evenly. `params` stays at its default: with bfloat16, fsdp would round where one process does not, which
    is the user's choice.
    """

    pp: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zb_h1", "zbv")
    virtual: tuple[int, ...] = (2, 3, 4, 6, 8)
    micro_batch_size: int | None = None
    remat: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[Offload, ...] = ((), ("optimizer",), ("optimizer", "parameters"))
    params: tuple[str, ...] = ("fp32",)
    sequence: tuple[bool, ...] = (False, True)


def model_parallel_choices(facts: ModelProfile, fleet: Cluster, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield trunks: sizes of pp, tp, cp and ep. The remaining ranks are replicas, not yet sharded."""
    for pp in _divisors(fleet.ranks):
        if pp > max(1, len(facts.blocks)) or (grid.pp and pp not in grid.pp):
            continue
        for tp in _had(facts.tp_sizes, fleet.ranks // pp):
            for cp in _had(facts.cp_sizes, fleet.ranks // pp // tp):
                dp = fleet.ranks // pp // tp // cp
                if dp > facts.global_batch_size or 2 * cp > max(2, facts.length):
                    continue
                for ep in _had(facts.ep_sizes, dp):
                    found = Candidate(
                        pp=pp, tp=tp, cp=cp, ep=ep, dp_replicate=dp, precision=facts.precision, compiles=facts.compiles
                    )
                    if not (tp > 1 and facts.optimizer.whole_tensors) and not is_refused(found, facts):
                        yield found


def recompute_choices(trunk: Candidate, facts: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield boughs: what is recomputed in backward, which needs blocks, and `sequence`, which needs tp."""
    for remat in grid.remat if facts.blocks else ("none",):
        for sequence in grid.sequence if trunk.tp > 1 else (False,):
            found = trunk.but(remat=remat, sequence=sequence)
            if not is_refused(found, facts):
                yield found


def microbatch_choices(bough: Candidate, facts: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield branches: the microbatch sizes."""
    for size in micro_batch_sizes(facts.global_batch_size, bough.replicas, grid):
        if f"{MICRO}={size}" not in facts.refused:
            yield bough.but(micro_batch_size=size)


def schedule_choices(branch: Candidate, facts: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield twigs: the schedules, without those that gain nothing over 1f1b or lack a reliable forecast."""
    if branch.pp == 1:
        yield branch
        return
    micro = branch.num_micro(facts.global_batch_size)
    for schedule, virtual in _schedules(branch, facts, grid):
        if is_sure(schedule, ranks=branch.pp, micro=micro):
            found = branch.but(schedule=schedule, virtual=virtual)
            if not is_refused(found, facts):
                yield found


def data_parallel_choices(
    twig: Candidate, facts: ModelProfile, fleet: Cluster, grid: SearchSpace
) -> Iterator[Candidate]:
    """Yield leaves: replicas or shards, the ZeRO stage, and what is offloaded."""
    for shard in _divisors(twig.replicas):
        if shard == 1:
            if not is_lost(twig, facts):
                yield twig
            continue
        replicate = twig.replicas // shard
        for zero in grid.zero:
            if zero == 3 and (facts.optimizer.whole_tensors or twig.schedule in SPLITS):
                continue
            for offload in grid.offload if fleet.device.is_accelerator else ((),):
                if "parameters" in offload and zero < 3:
                    continue
                for params in grid.params if zero == 3 else ("fp32",):
                    found = twig.but(dp_shard=shard, dp_replicate=replicate, zero=zero, offload=offload, params=params)
                    if not is_refused(found, facts) and not is_lost(found, facts):
                        yield found


def candidates(facts: ModelProfile, fleet: Cluster, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield all candidates."""
    for trunk in model_parallel_choices(facts, fleet, grid):
        for bough in recompute_choices(trunk, facts, grid):
            for branch in microbatch_choices(bough, facts, grid):
                for twig in schedule_choices(branch, facts, grid):
                    yield from data_parallel_choices(twig, facts, fleet, grid)


def is_on(candidate: Candidate, facts: ModelProfile, fleet: Cluster, grid: SearchSpace) -> bool:
    """Return True if it is one of the candidates."""
    c = candidate
    return any(
        leaf == c
        for trunk in model_parallel_choices(facts, fleet, grid)
        if (trunk.pp, trunk.tp, trunk.cp, trunk.ep) == (c.pp, c.tp, c.cp, c.ep)
        for bough in recompute_choices(trunk, facts, grid)
        if (bough.remat, bough.sequence) == (c.remat, c.sequence)
        for branch in microbatch_choices(bough, facts, grid)
        if branch.micro_batch_size == c.micro_batch_size
        for twig in schedule_choices(branch, facts, grid)
        if (twig.schedule, twig.virtual) == (c.schedule, c.virtual)
        for leaf in data_parallel_choices(twig, facts, fleet, grid)
    )


def is_refused(candidate: Candidate, facts: ModelProfile) -> bool:
    """Return True if the model refuses one of the candidate's axes or options."""
    return any(word in facts.refused for word in words_of(candidate)) if facts.refused else False


def is_lost(candidate: Candidate, facts: ModelProfile) -> bool:
    """Return True if this layout was refused, with this microbatch size or any, or its whole family was."""
    if not facts.refused:
        return False
    return any(word in facts.refused for word in (candidate.layout, str(candidate), f"{FAMILY}={candidate.family}"))


def words_of(candidate: Candidate) -> Iterator[str]:
    """Yield the words by which a model can refuse a candidate, besides `micro_batch_size=1`.

    These are `pp`, `pp=4`, `remat`, `remat=full`, `zero=3`, `fsdp`, `offload`, `sequence`, and so on.
    """
    for axis in candidate.mesh.split:
        yield from (axis, f"{axis}={candidate.mesh.size(axis)}")
    if candidate.remat != "none":
        yield from ("remat", f"remat={candidate.remat}")
    if candidate.dp_shard > 1:
        yield from (f"zero={candidate.zero}", ("zero1", "zero2", "fsdp")[candidate.zero - 1])
    if candidate.offload:
        yield from ("offload", *(f"offload={what}" for what in candidate.offload))
    if candidate.sequence:
        yield "sequence"
    if candidate.pp > 1:
        yield from (candidate.schedule, f"schedule={candidate.schedule}")


def micro_batch_sizes(global_batch_size: int, replicas: int, grid: SearchSpace) -> list[int]:
    """Return the sizes that give every replica equal samples.

    If the replicas do not divide the batch, return one size for each number of microbatches.
    """
    share = -(-global_batch_size // replicas)
    if grid.micro_batch_size is not None:
        return [grid.micro_batch_size] if grid.micro_batch_size <= share else []
    if global_batch_size % replicas == 0:
        return _divisors(share)
    return sorted({-(-share // rounds) for rounds in range(1, share + 1)})


def _schedules(bough: Candidate, facts: ModelProfile, grid: SearchSpace) -> Iterator[tuple[str, int]]:
    """Yield schedules with their stages per rank.

    Blocks that are recomputed or tensor parallel run backward in one piece, so schedules that defer weight gradients
    are left out for them.
    """
    for name in grid.schedules:
        if name in SPLITS and (bough.remat != "none" or bough.tp > 1):
            continue
        many = {"zbv": (2,), "interleaved": grid.virtual, "breadth_first": grid.virtual, "zb_interleaved": grid.virtual}
        for virtual in many.get(name, (1,)):
            if bough.pp * virtual <= len(facts.blocks):
                yield name, virtual


def _had(sizes: tuple[int, ...], ranks: int) -> list[int]:
    """Return 1 and the sizes that divide the ranks."""
    return [1, *(size for size in sizes if size > 1 and ranks % size == 0)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
