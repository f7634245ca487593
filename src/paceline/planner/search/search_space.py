"""Generate the search space: all candidates for a model on a number of ranks, as a tree that a search can prune.

Each level of the tree decides more of a candidate: first the axes that split the model, then activation checkpointing
(a recompute node), the microbatch size (a microbatch node) and the schedule (a schedule node). A leaf also decides how
data parallelism shards the rest, so it is a complete candidate. Impossible candidates are not generated.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.planner.cost.layout_candidate import MICRO_BATCH_KEY, Candidate
from paceline.planner.cost.pipeline_formulas import SPLIT_BACKWARD_SCHEDULES, has_reliable_makespan
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.model_costs.model_profile import ModelProfile

Offload = tuple[str, ...]
FAMILY = "family"
"""The prefix of the keys of `ModelProfile.refused` that refuse a whole family, as in `family=pp`."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The values of each option that a search tries."""

    pp: tuple[int, ...] | None = None
    """The numbers of pipeline ranks; None for all that divide the ranks."""
    zero: tuple[int, ...] = (1, 2, 3)
    """The ZeRO stages of layouts that shard."""
    schedules: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zb_h1", "zbv")
    virtual: tuple[int, ...] = (2, 3, 4, 6, 8)
    """The numbers of stages per rank, for schedules that allow any number."""
    micro_batch_size: int | None = None
    """The only microbatch size; None for all sizes of `micro_batch_sizes`."""
    remat: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[Offload, ...] = ((), ("optimizer",), ("optimizer", "parameters"))
    """The sets of training state to offload together."""
    params: tuple[str, ...] = ("fp32",)
    """The dtypes in which fsdp gathers parameters.

    Parameters in bfloat16 round where a single process does not, so only the user can choose them.
    """
    sequence: tuple[bool, ...] = (False, True)
    """Whether tp uses sequence parallelism."""


def model_parallel_choices(profile: ModelProfile, cluster: Cluster, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield a node for each combination of sizes of pp, tp, cp and ep. The other ranks are unsharded replicas."""
    for pp in _divisors(cluster.ranks):
        if pp > max(1, len(profile.blocks)) or (grid.pp and pp not in grid.pp):
            continue
        for tp in _allowed_sizes(profile.tp_sizes, cluster.ranks // pp):
            for cp in _allowed_sizes(profile.cp_sizes, cluster.ranks // pp // tp):
                dp = cluster.ranks // pp // tp // cp
                if dp > profile.global_batch_size or 2 * cp > max(2, profile.length):
                    continue
                for ep in _allowed_sizes(profile.ep_sizes, dp):
                    node = Candidate(
                        pp=pp,
                        tp=tp,
                        cp=cp,
                        ep=ep,
                        dp_replicate=dp,
                        precision=profile.precision,
                        compiles=profile.compiles,
                    )
                    if not (tp > 1 and profile.optimizer.whole_tensors) and not has_refused_option(node, profile):
                        yield node


def recompute_choices(node: Candidate, profile: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield the node with each choice of activation checkpointing (needs blocks) and `sequence` (needs tp)."""
    for remat in grid.remat if profile.blocks else ("none",):
        for sequence in grid.sequence if node.tp > 1 else (False,):
            child = node.replace(remat=remat, sequence=sequence)
            if not has_refused_option(child, profile):
                yield child


def microbatch_choices(node: Candidate, profile: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield the node with each microbatch size."""
    for size in micro_batch_sizes(profile.global_batch_size, node.replicas, grid):
        if f"{MICRO_BATCH_KEY}={size}" not in profile.refused:
            yield node.replace(micro_batch_size=size)


def schedule_choices(node: Candidate, profile: ModelProfile, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield the node with each schedule that the cost model can forecast reliably."""
    if node.pp == 1:
        yield node
        return
    num_micro = node.num_micro(profile.global_batch_size)
    for schedule, virtual in _schedules(node, profile, grid):
        if has_reliable_makespan(schedule, ranks=node.pp, micro=num_micro):
            child = node.replace(schedule=schedule, virtual=virtual)
            if not has_refused_option(child, profile):
                yield child


def data_parallel_choices(
    node: Candidate, profile: ModelProfile, cluster: Cluster, grid: SearchSpace
) -> Iterator[Candidate]:
    """Yield the node with each choice of shards and copies, ZeRO stage, offloaded state and dtype of parameters."""
    for shard in _divisors(node.replicas):
        if shard == 1:
            if not is_layout_refused(node, profile):
                yield node
            continue
        replicate = node.replicas // shard
        for zero in grid.zero:
            if zero == 3 and (profile.optimizer.whole_tensors or node.schedule in SPLIT_BACKWARD_SCHEDULES):
                continue
            for offload in grid.offload if cluster.device.is_accelerator else ((),):
                if "parameters" in offload and zero < 3:
                    continue
                for params in grid.params if zero == 3 else ("fp32",):
                    leaf = node.replace(
                        dp_shard=shard, dp_replicate=replicate, zero=zero, offload=offload, params=params
                    )
                    if not has_refused_option(leaf, profile) and not is_layout_refused(leaf, profile):
                        yield leaf


def candidates(profile: ModelProfile, cluster: Cluster, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield all candidates of the search space, the leaves of its tree."""
    for model_parallel_node in model_parallel_choices(profile, cluster, grid):
        for recompute_node in recompute_choices(model_parallel_node, profile, grid):
            for microbatch_node in microbatch_choices(recompute_node, profile, grid):
                for schedule_node in schedule_choices(microbatch_node, profile, grid):
                    yield from data_parallel_choices(schedule_node, profile, cluster, grid)


def is_in_search_space(candidate: Candidate, profile: ModelProfile, cluster: Cluster, grid: SearchSpace) -> bool:
    """Return True if the search space contains the candidate."""
    c = candidate
    return any(
        leaf == c
        for model_parallel_node in model_parallel_choices(profile, cluster, grid)
        if (model_parallel_node.pp, model_parallel_node.tp, model_parallel_node.cp, model_parallel_node.ep)
        == (c.pp, c.tp, c.cp, c.ep)
        for recompute_node in recompute_choices(model_parallel_node, profile, grid)
        if (recompute_node.remat, recompute_node.sequence) == (c.remat, c.sequence)
        for microbatch_node in microbatch_choices(recompute_node, profile, grid)
        if microbatch_node.micro_batch_size == c.micro_batch_size
        for schedule_node in schedule_choices(microbatch_node, profile, grid)
        if (schedule_node.schedule, schedule_node.virtual) == (c.schedule, c.virtual)
        for leaf in data_parallel_choices(schedule_node, profile, cluster, grid)
    )


def has_refused_option(candidate: Candidate, profile: ModelProfile) -> bool:
    """Return True if the model refuses one of the candidate's axes or options."""
    return any(key in profile.refused for key in option_keys(candidate)) if profile.refused else False


def is_layout_refused(candidate: Candidate, profile: ModelProfile) -> bool:
    """Return True if the model refuses this layout, this layout with this microbatch size, or the whole family."""
    if not profile.refused:
        return False
    return any(key in profile.refused for key in (candidate.layout, str(candidate), f"{FAMILY}={candidate.family}"))


def option_keys(candidate: Candidate) -> Iterator[str]:
    """Yield the keys under which `ModelProfile.refused` may refuse an axis or an option of a candidate.

    Examples are `pp`, `pp=4`, `remat`, `remat=full`, `zero=3`, `fsdp`, `offload` and `sequence`.
    """
    for axis in candidate.mesh.split_axes:
        yield from (axis, f"{axis}={candidate.mesh.size(axis)}")
    if candidate.remat != "none":
        yield from ("remat", f"remat={candidate.remat}")
    if candidate.dp_shard > 1:
        yield from (f"zero={candidate.zero}", ("zero1", "zero2", "fsdp")[candidate.zero - 1])
    if candidate.offload:
        yield from ("offload", *(f"offload={state}" for state in candidate.offload))
    if candidate.sequence:
        yield "sequence"
    if candidate.pp > 1:
        yield from (candidate.schedule, f"schedule={candidate.schedule}")


def micro_batch_sizes(global_batch_size: int, replicas: int, grid: SearchSpace) -> list[int]:
    """Return the microbatch sizes to try, in ascending order.

    They divide a replica's samples evenly. If the number of replicas does not divide the batch, they are the smallest
    size for each number of microbatches. If the search space sets the size, it is the only one.
    """
    samples_per_replica = -(-global_batch_size // replicas)
    if grid.micro_batch_size is not None:
        return [grid.micro_batch_size] if grid.micro_batch_size <= samples_per_replica else []
    if global_batch_size % replicas == 0:
        return _divisors(samples_per_replica)
    return sorted({-(-samples_per_replica // num_micro) for num_micro in range(1, samples_per_replica + 1)})


def _schedules(node: Candidate, profile: ModelProfile, grid: SearchSpace) -> Iterator[tuple[str, int]]:
    """Yield each schedule with each number of stages per rank.

    Schedules that defer weight gradients are left out if blocks are recomputed or tensor parallel, because such blocks
    cannot split their backward.
    """
    for name in grid.schedules:
        if name in SPLIT_BACKWARD_SCHEDULES and (node.remat != "none" or node.tp > 1):
            continue
        virtual_choices = {
            "zbv": (2,),
            "interleaved": grid.virtual,
            "breadth_first": grid.virtual,
            "zb_interleaved": grid.virtual,
        }
        for virtual in virtual_choices.get(name, (1,)):
            if node.pp * virtual <= len(profile.blocks):
                yield name, virtual


def _allowed_sizes(sizes: tuple[int, ...], ranks: int) -> list[int]:
    """Return 1 and the sizes that divide the ranks."""
    return [1, *(size for size in sizes if size > 1 and ranks % size == 0)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
