"""The process groups of a mesh, one world per axis: gradient reduction, tensor parallelism, pipeline, and so on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.comm.process_group import World
from paceline.planner.layout.mesh import AXIS_ORDER, DATA_AXES, GRADIENT_AXES, Mesh


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """The process groups of this rank in a mesh; each includes the rank itself."""

    mesh: Mesh
    all_ranks: World
    pp: World
    replicate: World
    """The group of the axis dp_replicate."""
    shard: World
    """The group of the axis dp_shard."""
    cp: World
    tp: World
    data: World
    """The ranks that train the same weights on different samples."""
    summed: World
    """The ranks over which gradients are summed: `data` combined with `cp`."""
    shard_replicas: World
    """The ranks of `summed` that hold the same shards."""
    ep: World
    """The ranks of `data` that divide one set of experts."""
    expert_replicas: World
    """The ranks of `summed` that hold the same experts."""

    @staticmethod
    def from_mesh(all_ranks: World, *, mesh: Mesh) -> "MeshGroups":
        """Return the groups of this rank; every rank calls this once."""
        return MeshGroups._build(all_ranks, mesh, mesh, all_ranks.subgroup)

    @staticmethod
    def for_local_sgd_site(all_ranks: World, *, mesh: Mesh) -> "MeshGroups":
        """Return the groups of this rank's site of local SGD; their `all_ranks` are the ranks of this site only.

        Every rank of all sites calls this once.
        """
        site = all_ranks.subgroup(mesh.groups([axis for axis in AXIS_ORDER if axis != "dp_replicate"]))
        return MeshGroups._build(site, mesh, replace(mesh, dp_replicate=1), all_ranks.subgroup)

    @staticmethod
    def _build(
        all_ranks: World, full_mesh: Mesh, mesh: Mesh, split: Callable[[Sequence[Sequence[int]]], World]
    ) -> "MeshGroups":
        """Return the groups of `mesh`, which is `full_mesh` or one site of it.

        `split` creates a world from groups of ranks of `full_mesh`.
        """

        def group_over(*axes: str) -> World:
            return split(full_mesh.groups([axis for axis in axes if mesh.size(axis) > 1]))

        replicate, shard, cp, data = (
            group_over("dp_replicate"),
            group_over("dp_shard"),
            group_over("cp"),
            group_over(*DATA_AXES),
        )
        summed = data if mesh.cp == 1 else cp if mesh.replicas == 1 else group_over(*GRADIENT_AXES)
        return MeshGroups(
            mesh=mesh,
            all_ranks=all_ranks,
            pp=group_over("pp"),
            replicate=replicate,
            shard=shard,
            cp=cp,
            tp=group_over("tp"),
            data=data,
            summed=summed,
            shard_replicas=group_over("dp_replicate", "cp") if mesh.cp > 1 else replicate,
            ep=split(_expert_groups(full_mesh, mesh)),
            expert_replicas=split(_expert_replicas(full_mesh, mesh)) if mesh.ep > 1 else summed,
        )

    @staticmethod
    def from_replicas(world: World) -> "MeshGroups":
        """Return the groups of plain data parallelism, over processes or over threads of one process."""
        alone = World(local_rank=world.local_rank, device=world.device)
        return MeshGroups(
            mesh=Mesh(dp_replicate=world.world_size),
            all_ranks=world,
            pp=alone,
            replicate=world,
            shard=alone,
            cp=alone,
            tp=alone,
            data=world,
            summed=world,
            shard_replicas=world,
            ep=alone,
            expert_replicas=world,
        )


def _expert_groups(full_mesh: Mesh, mesh: Mesh) -> list[list[int]]:
    """Return the expert-parallel groups: neighbouring replicas divide the experts."""
    axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1]
    return [list(part) for group in full_mesh.groups(axes) for part in _chunks(group, mesh.ep)]


def _expert_replicas(full_mesh: Mesh, mesh: Mesh) -> list[list[int]]:
    """Return the groups of ranks that hold the same experts: those at one position of all expert-parallel groups.

    A group includes all cp ranks.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(full_mesh.ranks):
        coordinates = full_mesh.coordinates(rank)
        replica = coordinates["dp_replicate"] * full_mesh.dp_shard + coordinates["dp_shard"]
        site = coordinates["dp_replicate"] if mesh.dp_replicate < full_mesh.dp_replicate else 0
        groups.setdefault((site, coordinates["pp"], coordinates["tp"], replica % mesh.ep), []).append(rank)
    return list(groups.values())


def _chunks(group: Sequence[int], size: int) -> list[Sequence[int]]:
    return [group[start : start + size] for start in range(0, len(group), size)]
