"""One world per axis of the mesh: whom a rank adds gradients with, whom it splits a layer with, whom it hands on to."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.mesh import DATA, SUMMED, Mesh
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class Worlds:
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
    def of(every: World, *, mesh: Mesh) -> "Worlds":
        """Every rank calls this, once."""
        replicate = every.part(mesh.groups(["dp_replicate"]))
        shard = every.part(mesh.groups(["dp_shard"]))
        cp = every.part(mesh.groups(["cp"]))
        data = every.part(mesh.groups(DATA)) if mesh.dp_replicate > 1 and mesh.dp_shard > 1 else None
        data = data or (shard if mesh.dp_shard > 1 else replicate)
        summed = data if mesh.cp == 1 else cp if mesh.replicas == 1 else every.part(mesh.groups(SUMMED))
        return Worlds(
            mesh=mesh,
            every=every,
            pp=every.part(mesh.groups(["pp"])),
            replicate=replicate,
            shard=shard,
            cp=cp,
            tp=every.part(mesh.groups(["tp"])),
            data=data,
            summed=summed,
            mirrors=every.part(mesh.groups(["dp_replicate", "cp"])) if mesh.cp > 1 else replicate,
            ep=every.part(_experts(mesh)),
            peers=every.part(_peers(mesh)) if mesh.ep > 1 else summed,
        )

    @staticmethod
    def of_replicas(world: World) -> "Worlds":
        """Replicas and nothing else, be they processes or threads of one."""
        alone = World(local_rank=world.local_rank, device=world.device)
        return Worlds(
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


def _experts(mesh: Mesh) -> list[list[int]]:
    """Neighbouring replicas share out the experts."""
    return [list(part) for group in mesh.groups(DATA) for part in _cut(group, mesh.ep)]


def _peers(mesh: Mesh) -> list[list[int]]:
    """Those that stand at the same place in each of these groups, on all slices of their sequences."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(mesh.ranks):
        at = mesh.place(rank)
        replica = at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]
        found.setdefault((at["pp"], at["tp"], replica % mesh.ep), []).append(rank)
    return list(found.values())


def _cut(group: Sequence[int], size: int) -> list[Sequence[int]]:
    return [group[start : start + size] for start in range(0, len(group), size)]
