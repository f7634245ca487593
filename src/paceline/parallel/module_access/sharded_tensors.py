"""Describe tensors that are sharded over several ranks, and gather full tensors with the same bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """This rank's shard of a model tensor. `get_tensor` returns the current tensor, as forwards may replace buffers."""

    name: str
    shard_spec: ShardSpec
    dtype: torch.dtype
    get_tensor: Callable[[], Tensor]
    is_buffer: bool = False

    @property
    def tensor(self) -> Tensor | None:
        """Return the detached tensor; None if the rank has no shard of it."""
        return None if self.shard_spec.local_shape is None else self.get_tensor().detach()


class ShardedTensors:
    """A model's tensors, sharded over the ranks of `world`.

    Every rank creates this object with the same tensor names. The constructor and the `gather_` methods are collective.
    """

    def __init__(self, *, world: World, tensors: Sequence[LocalTensor]) -> None:
        self._world = world
        self.local_tensors = {tensor.name: tensor for tensor in tensors}
        specs_by_rank = world.gather_json(
            [None if tensor.shard_spec.is_full else tensor.shard_spec.as_json() for tensor in tensors]
        )
        self._shard_specs = {
            tensor.name: _decode_specs(tensor, [specs[index] for specs in specs_by_rank])
            for index, tensor in enumerate(self.local_tensors.values())
        }

    @property
    def world(self) -> World:
        """Return the world whose ranks hold the tensors."""
        return self._world

    @property
    def names(self) -> list[str]:
        """Return the names in the model's order."""
        return list(self.local_tensors)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Return the names of the parameters."""
        return frozenset(name for name, tensor in self.local_tensors.items() if not tensor.is_buffer)

    @cached_property
    def is_unsharded(self) -> bool:
        """Return whether every rank holds all full tensors."""
        return all(spec.is_full for specs in self._shard_specs.values() for spec in specs)

    def shard_specs(self, name: str) -> list[ShardSpec]:
        """Return every rank's shard spec of a tensor."""
        return self._shard_specs[name]

    def copy_ranks(self, name: str) -> list[list[int]]:
        """Return for each copy of a tensor the ranks whose shards form the copy."""
        holders: dict[object, list[int]] = {}
        for rank, spec in enumerate(self._shard_specs[name]):
            if spec.boxes:
                holders.setdefault(spec.boxes, []).append(rank)
        num_copies = max(map(len, holders.values()), default=0)
        return [[ranks[copy % len(ranks)] for ranks in holders.values()] for copy in range(num_copies)]

    def owns(self, name: str) -> bool:
        """Return whether this rank owns its shard of a tensor, that is, whether the shard belongs to the first copy."""
        copies = self.copy_ranks(name)
        return bool(copies) and self._world.rank in copies[0]

    def gather_full_tensor(self, name: str, tensor: Tensor | None, *, copy: int = 0) -> Tensor:
        """Return the full tensor on every rank; `tensor` is this rank's shard, of a weight or its gradient."""
        local_tensor, ranks = self.local_tensors[name], self.copy_ranks(name)[copy]
        shard_spec = self._shard_specs[name][self._world.rank]
        full_tensor = torch.zeros(shard_spec.shape, dtype=local_tensor.dtype, device=self._world.device)
        if self._world.rank in ranks and tensor is not None:
            shard_spec.write_into(tensor.detach(), full_tensor=full_tensor)
        if len(ranks) == 1:
            return self._world.broadcast(full_tensor, source=ranks[0])
        if full_tensor.numel():  # each byte is zero on all ranks but one, so the sum is exact
            self._world.all_reduce(full_tensor.view(-1).view(torch.uint8))
        return full_tensor

    def gather_full_tensors(self, tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors one by one, so that no rank has to hold all of them at once."""
        for name in self.names:
            yield name, self.gather_full_tensor(name, tensors.get(name))

    def extract_shard(self, name: str, full_tensor: Tensor) -> Tensor | None:
        """Return this rank's shard of a full tensor; None if the rank has no shard of it."""
        shard_spec = self._shard_specs[name][self._world.rank]
        return None if shard_spec.local_shape is None else shard_spec.extract(full_tensor)


def model_tensors(model: nn.Module) -> list[LocalTensor]:
    """Return the parameters and buffers of an unsharded model."""
    buffers = [_full_local_tensor(model, name, tensor, is_buffer=True) for name, tensor in model.named_buffers()]
    return [
        *(_full_local_tensor(model, name, parameter, is_buffer=False) for name, parameter in model.named_parameters()),
        *buffers,
    ]


def param_tensors(named_parameters: Sequence[NamedParameter]) -> list[LocalTensor]:
    """Return the full tensors of parameters that are not sharded."""
    return [
        LocalTensor(
            name=m.name,
            shard_spec=ShardSpec.full(m.parameter.shape),
            dtype=m.parameter.dtype,
            get_tensor=partial(Tensor.detach, m.parameter),
        )
        for m in named_parameters
    ]


def _full_local_tensor(model: nn.Module, name: str, tensor: Tensor, *, is_buffer: bool) -> LocalTensor:
    shard_spec = ShardSpec.full(tensor.shape)
    return LocalTensor(
        name=name,
        shard_spec=shard_spec,
        dtype=tensor.dtype,
        get_tensor=partial(_current_tensor, model, name),
        is_buffer=is_buffer,
    )


def _current_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    return tensor


def _decode_specs(local_tensor: LocalTensor, gathered: Sequence[Sequence[Any] | None]) -> list[ShardSpec]:
    """Return every rank's spec; ranks whose gathered value is the same object share one spec."""
    distinct = {id(value): value for value in gathered}
    full = ShardSpec.full(local_tensor.shard_spec.shape)
    specs_by_id = {key: full if value is None else ShardSpec.from_json(value) for key, value in distinct.items()}
    return [specs_by_id[id(value)] for value in gathered]
