"""Row shards: the rows of each parameter that this rank's optimizer updates, as plain local tensors.

A parameter is split along its first dimension, as by `torch.chunk` and `fully_shard`. If its update rule needs the full
tensor, one rank owns all rows. A scalar counts as one row, which belongs to rank 0 of the shard group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.parameters import NamedParameter, num_bytes
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec, row_range

Rows = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """The split of one parameter over the ranks of the shard group: for each rank its rows `[start, stop)`.

    `owner` is the rank that has all rows, if the parameter is not split.
    """

    shape: tuple[int, ...]
    ranges: tuple[Rows, ...]
    owner: int | None = None

    @property
    def row_numel(self) -> int:
        """Return the number of elements in one row."""
        return int(torch.Size(self.shape[1:]).numel()) if self.shape else 1

    def numel(self, place: int) -> int:
        """Return the number of elements in a rank's shard."""
        start, stop = self.ranges[place]
        return (stop - start) * self.row_numel

    def shape_of(self, place: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard; (0,) for a scalar that another rank has."""
        start, stop = self.ranges[place]
        if not self.shape:
            return () if stop > start else (0,)
        return (stop - start, *self.shape[1:])

    def rows(self, tensor: Tensor, place: int) -> Tensor:
        """Return the view of a rank's rows in a tensor of the parameter's shape."""
        start, stop = self.ranges[place]
        if not self.shape:
            return tensor if stop > start else tensor.view(1).narrow(0, 0, 0)
        return tensor.narrow(0, start, stop - start)

    def part(self, base: ShardSpec, place: int) -> ShardSpec:
        """Return the spec of a rank's rows in the full tensor; `base_spec` is the parameter's spec before the split."""
        start, stop = self.ranges[place]
        if not self.shape:
            return base if stop > start else ShardSpec.none_of(base.shape)
        return base.narrowed(dim=0, start=start, stop=stop)


@dataclass(frozen=True, kw_only=True)
class RowShard(NamedParameter):
    """The rows of one parameter that this rank's optimizer updates.

    `index` is the parameter's position in the full model; `parameter` contains this rank's rows, possibly none;
    `shard_spec` locates them in the full tensor; `model_parameter` is the parameter in the model.
    """

    part: ShardSpec
    holder: nn.Parameter


def cut_rows(named: Sequence[NamedParameter], *, places: int, whole: Collection[str] = ()) -> dict[str, RowSplit]:
    """Split parameters by rows. Those in `full_tensor_names` get one owner each, to balance the bytes per rank."""
    found = {m.name: _by_rows(tuple(m.parameter.shape), places) for m in named if m.name not in whole}
    load = [0] * places
    for member in sorted((m for m in named if m.name in whole), key=lambda m: (-num_bytes(m.parameter), m.index)):
        owner = load.index(min(load))
        load[owner] += num_bytes(member.parameter)
        shape = tuple(member.parameter.shape)
        rows = shape[0] if shape else 1
        ranges = tuple((0, rows) if place == owner else (0, 0) for place in range(places))
        found[member.name] = RowSplit(shape=shape, ranges=ranges, owner=owner)
    return found


def _by_rows(shape: tuple[int, ...], places: int) -> RowSplit:
    rows = shape[0] if shape else 1
    return RowSplit(shape=shape, ranges=tuple(row_range(rows, place=place, places=places) for place in range(places)))


def shares_of(
    named: Sequence[NamedParameter], *, cut: dict[str, RowSplit], place: int, parts: Parts | None = None
) -> list[RowShard]:
    """Return views of this rank's rows, in the storage of the model's parameters.

    `base_specs`: the parameters' shard specs after tensor parallelism; None: all are full tensors.
    """
    return [
        RowShard(
            index=member.index,
            name=member.name,
            parameter=view_of(cut[member.name].rows(member.parameter.detach(), place)),
            part=cut[member.name].part(_base(member, parts), place),
            holder=member.parameter,
        )
        for member in named
    ]


def view_of(tensor: Tensor) -> nn.Parameter:
    """Return a trainable parameter in the tensor's storage."""
    return nn.Parameter(tensor.detach(), requires_grad=True)


def _base(member: NamedParameter, parts: Parts | None) -> ShardSpec:
    return ShardSpec.all_of(member.parameter.shape) if parts is None else parts[member.name]
