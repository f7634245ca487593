"""Row shards: the rows of each parameter that this rank's optimizer updates, as plain local tensors.

A parameter is split along its first dimension, in the same way as by `torch.chunk` and `fully_shard`. If its update
rule needs the full tensor, one rank owns all rows. A scalar counts as one row, which rank 0 of the shard group owns.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs, row_range

RowRange = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """The split of one parameter over the ranks of the shard group: for each rank its rows `[start, stop)`.

    `owner` is the rank that has all rows, if the parameter is not split.
    """

    shape: tuple[int, ...]
    ranges: tuple[RowRange, ...]
    owner: int | None = None

    @property
    def row_numel(self) -> int:
        """Return the number of elements in one row."""
        return int(torch.Size(self.shape[1:]).numel()) if self.shape else 1

    def numel(self, shard_rank: int) -> int:
        """Return the number of elements in a rank's shard."""
        start, stop = self.ranges[shard_rank]
        return (stop - start) * self.row_numel

    def shard_shape(self, shard_rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard; (0,) for a scalar that another rank owns."""
        start, stop = self.ranges[shard_rank]
        if not self.shape:
            return () if stop > start else (0,)
        return (stop - start, *self.shape[1:])

    def shard_view(self, tensor: Tensor, shard_rank: int) -> Tensor:
        """Return the view of a rank's rows in a tensor of the parameter's shape."""
        start, stop = self.ranges[shard_rank]
        if not self.shape:
            return tensor if stop > start else tensor.view(1).narrow(0, 0, 0)
        return tensor.narrow(0, start, stop - start)

    def shard_spec(self, base_spec: ShardSpec, shard_rank: int) -> ShardSpec:
        """Return the spec of a rank's rows in the full tensor; `base_spec` is the parameter's spec before the split."""
        start, stop = self.ranges[shard_rank]
        if not self.shape:
            return base_spec if stop > start else ShardSpec.empty(base_spec.shape)
        return base_spec.narrow(dim=0, start=start, stop=stop)


@dataclass(frozen=True, kw_only=True)
class RowShard(NamedParameter):
    """The rows of one parameter that this rank's optimizer updates.

    `index` is the parameter's position in the full model. `parameter` contains this rank's rows, possibly none, and
    `shard_spec` locates these rows in the full tensor. `model_parameter` is the parameter in the model.
    """

    shard_spec: ShardSpec
    model_parameter: nn.Parameter


def make_row_splits(
    named_parameters: Sequence[NamedParameter], *, num_shards: int, full_tensor_names: Collection[str] = ()
) -> dict[str, RowSplit]:
    """Return the row split of each parameter, by name.

    Each parameter in `full_tensor_names` gets one owner, chosen so that the ranks own similar numbers of bytes.
    """
    row_splits = {
        m.name: _split_by_rows(tuple(m.parameter.shape), num_shards)
        for m in named_parameters
        if m.name not in full_tensor_names
    }
    bytes_by_rank = [0] * num_shards
    for member in sorted(
        (m for m in named_parameters if m.name in full_tensor_names),
        key=lambda m: (-m.parameter.nbytes, m.index),
    ):
        owner = bytes_by_rank.index(min(bytes_by_rank))
        bytes_by_rank[owner] += member.parameter.nbytes
        shape = tuple(member.parameter.shape)
        num_rows = shape[0] if shape else 1
        ranges = tuple((0, num_rows) if rank == owner else (0, 0) for rank in range(num_shards))
        row_splits[member.name] = RowSplit(shape=shape, ranges=ranges, owner=owner)
    return row_splits


def _split_by_rows(shape: tuple[int, ...], num_shards: int) -> RowSplit:
    num_rows = shape[0] if shape else 1
    ranges = tuple(row_range(num_rows, shard_rank=rank, num_shards=num_shards) for rank in range(num_shards))
    return RowSplit(shape=shape, ranges=ranges)


def make_row_shards(
    named_parameters: Sequence[NamedParameter],
    *,
    row_splits: dict[str, RowSplit],
    shard_rank: int,
    base_specs: ShardSpecs | None = None,
) -> list[RowShard]:
    """Return views of this rank's rows, in the storage of the model's parameters.

    `base_specs` are the parameters' shard specs after tensor parallelism; None means that all are full tensors.
    """
    return [
        RowShard(
            index=member.index,
            name=member.name,
            parameter=parameter_view(row_splits[member.name].shard_view(member.parameter.detach(), shard_rank)),
            shard_spec=row_splits[member.name].shard_spec(_base_spec(member, base_specs), shard_rank),
            model_parameter=member.parameter,
        )
        for member in named_parameters
    ]


def parameter_view(tensor: Tensor) -> nn.Parameter:
    """Return a trainable parameter in the tensor's storage."""
    return nn.Parameter(tensor.detach(), requires_grad=True)


def _base_spec(member: NamedParameter, base_specs: ShardSpecs | None) -> ShardSpec:
    return ShardSpec.full(member.parameter.shape) if base_specs is None else base_specs[member.name]
