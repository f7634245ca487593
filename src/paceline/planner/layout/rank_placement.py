"""The check that the groups of ranks that talk most are not spread over more nodes than they need."""

from collections.abc import Sequence

from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh

_INNER_AXES = ("tp", "cp", "ep")


def refuse_scattered_ranks(mesh: Mesh, hosts: Sequence[str]) -> list[PacelineError]:
    """Return an error if another order of the ranks would keep the groups of an axis inside nodes.

    `hosts` has the host of each rank. A scheduler may deal the ranks out to the nodes in turn, as Slurm does with
    `-m cyclic`. Then neighbouring ranks are on different nodes, and tp, cp, ep and the shards of hsdp, which exchange
    most, use the network between them.
    """
    if len(hosts) != mesh.ranks:
        return []
    in_blocks = [host for first in dict.fromkeys(hosts) for host in hosts if host == first]
    axes = [axis for axis in _INNER_AXES if mesh.size(axis) > 1]
    axes += ["dp_shard"] if mesh.dp_shard > 1 and mesh.dp_replicate > 1 else []
    for axis in axes:
        for group in mesh.groups([axis]):
            own_hosts, fewest = {hosts[rank] for rank in group}, {in_blocks[rank] for rank in group}
            if len(own_hosts) > len(fewest):
                ranks, names = ", ".join(map(str, group)), ", ".join(sorted(own_hosts))
                return [
                    UsageError(
                        f"ranks {ranks}, a group of {axis}, are on {names}: the launcher deals the ranks out in turn.",
                        cause=f"neighbouring ranks on one node would keep the exchanges of {axis} inside it",
                        hint="srun --distribution=block; or mpirun --map-by slot",
                    )
                ]
    return []
