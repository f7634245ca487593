"""One world per axis of the mesh: whom a rank adds gradients with, whom it splits a layer with, whom it hands on to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.comm.process_group import World
from paceline.planner.layout.mesh import DATA, ORDER, SUMMED, Mesh


@dataclass(frozen=True, kw_only=True)
class MeshGroups:
    """This rank's fellows on each axis, itself among them.

    `data` have other samples of the same weights; `summed` are those and `cp`: their gradients add up; `mirrors` are
    those of them that hold the same rows where they are sharded. `ep` splits `data` into groups that share out the
    experts, and `peers` are those of `summed` that hold the same experts: the same place in every group.
    """

    mesh: Mesh
    every: World
    pp: World
    replicate: World
    shard: World
    cp: World
    tp: World
    data: World
    summed: World
    mirrors: World
    ep: World
    peers: World

    @staticmethod
    def of(every: World, *, mesh: Mesh) -> "MeshGroups":
        """Every rank calls this, once."""
        return MeshGroups._of(every, mesh, mesh, every.part)

    @staticmethod
    def for_local_sgd_site(every: World, *, mesh: Mesh) -> "MeshGroups":
        """One replica's, as if there were no other: `every` are the ranks of this site. Every rank calls this, once."""
        site = every.part(mesh.groups([axis for axis in ORDER if axis != "dp_replicate"]))
        return MeshGroups._of(site, mesh, replace(mesh, dp_replicate=1), every.part)

    @staticmethod
    def _of(every: World, whole: Mesh, mesh: Mesh, part: Callable[[Sequence[Sequence[int]]], World]) -> "MeshGroups":
        """The worlds of `mesh`, whose ranks `part` knows by their places in the `whole` one."""

        def among(*axes: str) -> World:
            return part(whole.groups([axis for axis in axes if mesh.size(axis) > 1]))

        replicate, shard, cp, data = among("dp_replicate"), among("dp_shard"), among("cp"), among(*DATA)
        summed = data if mesh.cp == 1 else cp if mesh.replicas == 1 else among(*SUMMED)
        return MeshGroups(
            mesh=mesh,
            every=every,
            pp=among("pp"),
            replicate=replicate,
            shard=shard,
            cp=cp,
            tp=among("tp"),
            data=data,
            summed=summed,
            mirrors=among("dp_replicate", "cp") if mesh.cp > 1 else replicate,
            ep=part(_experts(whole, mesh)),
            peers=part(_peers(whole, mesh)) if mesh.ep > 1 else summed,
        )

    @staticmethod
    def of_replicas(world: World) -> "MeshGroups":
        """Replicas and nothing else, be they processes or threads of one."""
        alone = World(local_rank=world.local_rank, device=world.device)
        return MeshGroups(
            mesh=Mesh(dp_replicate=world.world_size),
            every=world,
            pp=alone,
            replicate=world,
            shard=alone,
            cp=alone,
            tp=alone,
            data=world,
            summed=world,
            mirrors=world,
            ep=alone,
            peers=world,
        )


def _experts(whole: Mesh, mesh: Mesh) -> list[list[int]]:
    """Neighbouring replicas share out the experts."""
    axes = [axis for axis in DATA if mesh.size(axis) > 1]
    return [list(part) for group in whole.groups(axes) for part in _cut(group, mesh.ep)]


def _peers(whole: Mesh, mesh: Mesh) -> list[list[int]]:
    """Those that stand at the same place in each of these groups, on all slices of their sequences."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(whole.ranks):
        at = whole.place(rank)
        replica = at["dp_replicate"] * whole.dp_shard + at["dp_shard"]
        site = at["dp_replicate"] if mesh.dp_replicate < whole.dp_replicate else 0
        found.setdefault((site, at["pp"], at["tp"], replica % mesh.ep), []).append(rank)
    return list(found.values())


def _cut(group: Sequence[int], size: int) -> list[Sequence[int]]:
    return [group[start : start + size] for start in range(0, len(group), size)]
