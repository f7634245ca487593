"""Positions of ranks on the mesh and their parts of tensors, to name in words where a fault lies."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.planner.layout.mesh import DATA, Mesh
from paceline.verification.tensor_distance import euclidean_norm

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RankNames:
    """The mesh, and the parts of each tensor that the ranks hold (for gradients: that their optimizers hold)."""

    mesh: Mesh
    holding: ShardedTensors

    @property
    def is_replicas(self) -> bool:
        """True if all ranks are replicas of the whole model."""
        return self.mesh.split in ((), ("dp_replicate",))

    def holders(self, name: str) -> list[int]:
        """Return the ranks that hold some part of the tensor."""
        return [rank for rank, part in enumerate(self.holding.parts(name)) if part.boxes]

    def pieces(self, name: str, copies: Sequence[Tensors], *, like: Tensor) -> dict[int, Tensor]:
        """Return each rank's part of the tensor, from every copy's whole tensor; zeros if a copy lacks it."""
        found = {}
        for number, ranks in enumerate(self.holding.copies(name)):
            whole = copies[number].get(name) if number < len(copies) else None
            for rank in ranks:
                found[rank] = self.holding.parts(name)[rank].take(torch.zeros_like(like) if whole is None else whole)
        return dict(sorted(found.items()))

    def piece(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor."""
        return self.holding.parts(name)[rank].take(whole)

    def alike(self, name: str, axis: str) -> list[tuple[int, ...]]:
        """Return groups of ranks along an axis that hold the same elements of the tensor."""
        parts = self.holding.parts(name)
        groups = set()
        for rank in self.holders(name):
            fellows = self.mesh.group(rank, axes=[axis])
            groups.add(tuple(other for other in fellows if parts[other].boxes == parts[rank].boxes))
        return sorted(group for group in groups if len(group) > 1)

    def words(self, ranks: Collection[int], *, of: Collection[int]) -> str:
        """Return text such as `, on tp rank 1 (ranks 1, 3)`; empty for all ranks, unless only one stage holds it."""
        chosen = sorted(set(ranks))
        if not chosen:
            return ""
        if len(chosen) < len(set(of)) or (self.mesh.pp > 1 and len(chosen) < self.mesh.ranks):
            return f", on {self.named(chosen, of=of)}"
        return ""

    def named(self, ranks: Sequence[int], *, of: Collection[int]) -> str:
        """Return the mesh coordinate that these ranks share and no other of `of` has, or the ranks themselves."""
        numbers = _ranks(ranks)
        for axis in ("pp", "tp", "cp", *DATA):
            values = {self.mesh.place(rank)[axis] for rank in ranks}
            others = {self.mesh.place(rank)[axis] for rank in of if rank not in ranks}
            if self.mesh.size(axis) == 1 or len(values) != 1 or values & others:
                continue
            value = values.pop()
            if self.mesh.split == (axis,):
                return {"pp": f"stage {value} (rank {value})"}.get(axis, self.member(value, axis))
            return f"{_word(axis)} {value} ({numbers})"
        if len(ranks) > 1 or len(self.mesh.split) < 2:
            return numbers
        place = self.mesh.place(ranks[0])
        return f"{numbers} ({', '.join(f'{_word(axis)} {n}' for axis, n in place.items() if self.mesh.size(axis) > 1)})"

    def member(self, value: int, axis: str) -> str:
        """Return the name of a rank on a mesh of one axis."""
        return f"rank {value}" if axis in DATA else f"{_word(axis)} {value}"

    def replica(self, number: int) -> str:
        """Return the name of the ranks that see one part of the samples."""
        mesh = self.mesh
        if mesh.replicas == mesh.ranks:
            return f"rank {number}"
        mine = [r for r in range(mesh.ranks) if self._replica(r) == number]
        return f"replica {number} ({_ranks(mine)})"

    def counted(self, tensors: Tensors) -> float | None:
        """Return the joint norm with each tensor counted once per copy; None if all ranks are replicas."""
        if self.is_replicas:
            return None
        squares = {name: euclidean_norm(value) ** 2 for name, value in tensors.items()}
        return math.sqrt(math.fsum(len(self.holding.copies(name)) * square for name, square in squares.items()))

    def axes(self) -> dict[str, int]:
        """Return the degree of each split axis, except those that only deal out samples or stages."""
        return {axis: self.mesh.size(axis) for axis in self.mesh.split if axis not in ("pp", *DATA)}

    def along(self, axis: str, ranks: Sequence[int]) -> str:
        """Return text such as `tp ranks 0 and 1 (ranks 2, 3)`."""
        values = " and ".join(str(self.mesh.place(rank)[axis]) for rank in ranks)
        word = {"pp": "stages", "dp_replicate": "dp_replicate ranks", "dp_shard": "dp_shard ranks"}.get(
            axis, f"{axis} ranks"
        )
        return f"{word} {values}" + ("" if self.mesh.split == (axis,) and axis != "pp" else f" ({_ranks(ranks)})")

    def _replica(self, rank: int) -> int:
        place = self.mesh.place(rank)
        return place["dp_replicate"] * self.mesh.dp_shard + place["dp_shard"]


def _word(axis: str) -> str:
    return "stage" if axis == "pp" else f"{axis} rank"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
