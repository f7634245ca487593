"""Tensors that are sharded over several ranks, and the bitwise exact gathering of full tensors."""

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
    """This rank's shard of a model tensor. `get_tensor` returns the current one, since forwards may replace buffers."""

    name: str
    part: ShardSpec
    dtype: torch.dtype
    find: Callable[[], Tensor]
    is_buffer: bool = False

    @property
    def tensor(self) -> Tensor | None:
        """Return the detached tensor; None if the rank has no shard of it."""
        return None if self.part.local is None else self.find().detach()


class ShardedTensors:
    """A model's tensors, sharded over the ranks of `world`.

    Every rank builds it with the same names. The constructor and the `gather_` methods are collective.
    """

    def __init__(self, *, world: World, held: Sequence[LocalTensor]) -> None:
        self._world = world
        self.mine = {one.name: one for one in held}
        told = world.gather_json([None if one.part.is_all else one.part.as_json() for one in held])
        self._parts = {
            one.name: _parts(one, [parts[place] for parts in told]) for place, one in enumerate(self.mine.values())
        }

    @property
    def world(self) -> World:
        """Return the ranks that hold the tensors."""
        return self._world

    @property
    def names(self) -> list[str]:
        """Return the names in the model's order."""
        return list(self.mine)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """Return the names of the parameters."""
        return frozenset(name for name, one in self.mine.items() if not one.is_buffer)

    @cached_property
    def is_whole(self) -> bool:
        """Return whether every rank holds all full tensors."""
        return all(part.is_all for parts in self._parts.values() for part in parts)

    def parts(self, name: str) -> list[ShardSpec]:
        """Return every rank's shard spec of a tensor."""
        return self._parts[name]

    def copies(self, name: str) -> list[list[int]]:
        """Return for each copy of a tensor the ranks whose shards form it."""
        holders: dict[object, list[int]] = {}
        for rank, part in enumerate(self._parts[name]):
            if part.boxes:
                holders.setdefault(part.boxes, []).append(rank)
        most = max(map(len, holders.values()), default=0)
        return [[ranks[copy % len(ranks)] for ranks in holders.values()] for copy in range(most)]

    def owns(self, name: str) -> bool:
        """Return whether this rank owns its shard of a tensor, that is, whether the shard belongs to the first copy."""
        copies = self.copies(name)
        return bool(copies) and self._world.rank in copies[0]

    def whole(self, name: str, tensor: Tensor | None, *, copy: int = 0) -> Tensor:
        """Return the full tensor on every rank; `tensor` is this rank's shard of it (of a weight, a gradient)."""
        held, ranks = self.mine[name], self.copies(name)[copy]
        part = self._parts[name][self._world.rank]
        found = torch.zeros(part.shape, dtype=held.dtype, device=self._world.device)
        if self._world.rank in ranks and tensor is not None:
            part.put(tensor.detach(), into=found)
        if len(ranks) == 1:
            return self._world.broadcast(found, source=ranks[0])
        if found.numel():  # each byte is zero on all ranks but one, so the sum is exact
            self._world.all_reduce(found.view(-1).view(torch.uint8))
        return found

    def wholes(self, tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors one by one, so that no rank has to hold all of them at once."""
        for name in self.names:
            yield name, self.whole(name, tensors.get(name))

    def take(self, name: str, whole: Tensor) -> Tensor | None:
        """Return this rank's shard of a full tensor, or None."""
        part = self._parts[name][self._world.rank]
        return None if part.local is None else part.take(whole)


def all_of(model: nn.Module) -> list[LocalTensor]:
    """Return the parameters and buffers of an unsharded model."""
    buffers = [_whole(model, name, tensor, is_buffer=True) for name, tensor in model.named_buffers()]
    return [
        *(_whole(model, name, parameter, is_buffer=False) for name, parameter in model.named_parameters()),
        *buffers,
    ]


def all_shares(named: Sequence[NamedParameter]) -> list[LocalTensor]:
    """Return the parameters of an unsharded optimizer."""
    return [
        LocalTensor(
            name=m.name,
            part=ShardSpec.all_of(m.parameter.shape),
            dtype=m.parameter.dtype,
            find=partial(Tensor.detach, m.parameter),
        )
        for m in named
    ]


def _whole(model: nn.Module, name: str, tensor: Tensor, *, is_buffer: bool) -> LocalTensor:
    part = ShardSpec.all_of(tensor.shape)
    return LocalTensor(name=name, part=part, dtype=tensor.dtype, find=partial(_live, model, name), is_buffer=is_buffer)


def _live(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found


def _parts(one: LocalTensor, told: Sequence[Sequence[Any] | None]) -> list[ShardSpec]:
    """Return every rank's spec; ranks that sent the same object share one spec."""
    words = {id(each): each for each in told}
    whole = ShardSpec.all_of(one.part.shape)
    found = {place: whole if each is None else ShardSpec.from_json(each) for place, each in words.items()}
    return [found[id(each)] for each in told]
