"""Names of ranks by their mesh coordinates, for messages, and which shards of a tensor the ranks hold."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.planner.layout.mesh import DATA_AXES, Mesh
from paceline.verification.tensor_distance import euclidean_norm

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RankNames:
    """Names of the ranks of a mesh, and each rank's shard of every tensor.

    For gradients, `sharded` describes the shards in the ranks' optimizers.
    """

    mesh: Mesh
    sharded: ShardedTensors

    @property
    def has_only_replicas(self) -> bool:
        """True if all ranks are replicas of the whole model."""
        return self.mesh.split_axes in ((), ("dp_replicate",))

    def holders(self, name: str) -> list[int]:
        """Return the ranks that hold elements of the tensor."""
        return [rank for rank, spec in enumerate(self.sharded.shard_specs(name)) if spec.boxes]

    def rank_shards(self, name: str, copies: Sequence[Tensors], *, like: Tensor) -> dict[int, Tensor]:
        """Return each rank's shard of the tensor, from the full tensor of its copy; zeros if the copy lacks it."""
        shards = {}
        for number, ranks in enumerate(self.sharded.copy_ranks(name)):
            full_tensor = copies[number].get(name) if number < len(copies) else None
            for rank in ranks:
                shards[rank] = self.sharded.shard_specs(name)[rank].extract(
                    torch.zeros_like(like) if full_tensor is None else full_tensor
                )
        return dict(sorted(shards.items()))

    def rank_shard(self, name: str, full_tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a full tensor."""
        return self.sharded.shard_specs(name)[rank].extract(full_tensor)

    def equal_shard_groups(self, name: str, axis: str) -> list[tuple[int, ...]]:
        """Return groups of ranks along an axis that hold the same elements of the tensor."""
        shard_specs = self.sharded.shard_specs(name)
        groups = set()
        for rank in self.holders(name):
            axis_ranks = self.mesh.group(rank, axes=[axis])
            groups.add(tuple(other for other in axis_ranks if shard_specs[other].boxes == shard_specs[rank].boxes))
        return sorted(group for group in groups if len(group) > 1)

    def describe(self, ranks: Collection[int], *, all_ranks: Collection[int]) -> str:
        """Return text such as `, on tp rank 1 (ranks 1, 3)`; empty if `ranks` has all of `all_ranks`.

        With pp, the text is empty only if `ranks` has all ranks of the mesh.
        """
        chosen = sorted(set(ranks))
        if not chosen:
            return ""
        if len(chosen) < len(set(all_ranks)) or (self.mesh.pp > 1 and len(chosen) < self.mesh.ranks):
            return f", on {self.name_ranks(chosen, all_ranks=all_ranks)}"
        return ""

    def name_ranks(self, ranks: Sequence[int], *, all_ranks: Collection[int]) -> str:
        """Return the mesh coordinate that only these ranks of `all_ranks` have; if there is none, list the ranks."""
        rank_list = _format_ranks(ranks)
        for axis in ("pp", "tp", "cp", *DATA_AXES):
            values = {self.mesh.coordinates(rank)[axis] for rank in ranks}
            other_values = {self.mesh.coordinates(rank)[axis] for rank in all_ranks if rank not in ranks}
            if self.mesh.size(axis) == 1 or len(values) != 1 or values & other_values:
                continue
            value = values.pop()
            if self.mesh.split_axes == (axis,):
                return {"pp": f"stage {value} (rank {value})"}.get(axis, self.member_name(value, axis))
            return f"{_axis_label(axis)} {value} ({rank_list})"
        if len(ranks) > 1 or len(self.mesh.split_axes) < 2:
            return rank_list
        coords = self.mesh.coordinates(ranks[0])
        return f"{rank_list} ({', '.join(f'{_axis_label(a)} {n}' for a, n in coords.items() if self.mesh.size(a) > 1)})"

    def member_name(self, value: int, axis: str) -> str:
        """Return the name of the rank with this coordinate on a mesh that has only this axis."""
        return f"rank {value}" if axis in DATA_AXES else f"{_axis_label(axis)} {value}"

    def replica_name(self, number: int) -> str:
        """Return the name of a replica, which is a rank or a group of ranks that run the same samples."""
        mesh = self.mesh
        if mesh.replicas == mesh.ranks:
            return f"rank {number}"
        replica_ranks = [r for r in range(mesh.ranks) if self._replica_index(r) == number]
        return f"replica {number} ({_format_ranks(replica_ranks)})"

    def norm_over_copies(self, tensors: Tensors) -> float | None:
        """Return the norm of all tensors together, each counted once per copy; None if all ranks are replicas."""
        if self.has_only_replicas:
            return None
        squares = {name: euclidean_norm(value) ** 2 for name, value in tensors.items()}
        return math.sqrt(math.fsum(len(self.sharded.copy_ranks(name)) * square for name, square in squares.items()))

    def weight_axes(self) -> dict[str, int]:
        """Return the degree of each axis that splits layers: every axis except those of data and pipeline."""
        return {axis: self.mesh.size(axis) for axis in self.mesh.split_axes if axis not in ("pp", *DATA_AXES)}

    def describe_axis_group(self, axis: str, ranks: Sequence[int]) -> str:
        """Return text such as `tp ranks 0 and 1 (ranks 2, 3)`."""
        values = " and ".join(str(self.mesh.coordinates(rank)[axis]) for rank in ranks)
        word = {"pp": "stages", "dp_replicate": "dp_replicate ranks", "dp_shard": "dp_shard ranks"}.get(
            axis, f"{axis} ranks"
        )
        return f"{word} {values}" + (
            "" if self.mesh.split_axes == (axis,) and axis != "pp" else f" ({_format_ranks(ranks)})"
        )

    def _replica_index(self, rank: int) -> int:
        coordinates = self.mesh.coordinates(rank)
        return coordinates["dp_replicate"] * self.mesh.dp_shard + coordinates["dp_shard"]


def _axis_label(axis: str) -> str:
    return "stage" if axis == "pp" else f"{axis} rank"


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
