"""Distribution of initial values from the one rank of each node that has built the model."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import DesyncError
from paceline.parallel.initialization.meta_model import described, digest, named_tensors, release_memory
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec


def nodes_of(world: World) -> list[list[int]]:
    """Return the ranks of each node; the first one builds the model.

    Two ranks are on the same node if global rank minus local rank is equal.
    """
    starts = world.gather_json(_global_rank(world) - world.local_rank)
    return [[rank for rank, start in enumerate(starts) if start == node] for node in dict.fromkeys(starts)]


def first_of_node(world: World) -> bool:
    """Return whether this rank builds the model for its node."""
    return any(ranks[0] == world.rank for ranks in nodes_of(world))


def same_models(
    model: nn.Module, *, build: Callable[[], nn.Module], is_plain: bool, reason: str, world: World
) -> tuple[nn.Module, list[str]]:
    """Return a model on the meta device that is equal to rank 0's.

    If the recorded model may differ, build a real one and free its memory.

    Raises:
        DesyncError: the models still differ.
    """
    told = world.gather_json([digest(described(model)), reason])
    if all(mark == told[0][0] for mark, _ in told) and not any(text for _, text in told):
        return model, []
    theirs = world.share_json(described(model) if world.rank == 0 else None)
    mine = described(model)
    if mine != theirs and not reason:
        name = _first_difference(mine, theirs)
        reason = f"{name} is {mine.get(name, 'absent')} without memory, and {theirs.get(name, 'absent')} with it"
    if reason and not is_plain:
        model = release_memory(build())
    _refuse_others(_tensors(described(model)), _tensors(theirs), world)
    reasons = [text for text in world.gather_json(reason) if text]
    return model, [f"start: every rank builds the whole model, because {reasons[0]}"] if reasons else []


def refuse_unequal(model: nn.Module, *, world: World) -> None:
    """Check that all ranks have recorded the same model.

    Raises:
        DesyncError: the models differ; the message names the difference.
    """
    mine = _tensors(described(model))
    if len(set(world.gather_json(digest(mine)))) > 1:
        _refuse_others(mine, world.share_json(mine if world.rank == 0 else None), world)


def _refuse_others(mine: dict[str, str], theirs: dict[str, str], world: World) -> None:
    told = world.gather_json(_first_difference(mine, theirs) if mine != theirs else "")
    rank = next((rank for rank, name in enumerate(told) if name), None)
    if rank is not None:
        raise DesyncError(
            f"the ranks have built different models: {told[rank]} on rank {rank} differs from rank 0.",
            cause="code that builds, ties or freezes layers on some ranks only, or in a different order",
            hint="build the same model on every rank",
        )


def _tensors(description: dict[str, str]) -> dict[str, str]:
    """Return only the tensors of a description; other values may be specific to a process (an id, a path)."""
    return {n: v for n, v in description.items() if v.startswith("tied to ") or v.endswith(("trainable", "constant"))}


def _first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    return next(
        (name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)), "the order of its parameters"
    )


@dataclass(frozen=True, kw_only=True)
class NodeBroadcast:
    """Initial values that the node's first rank holds, and frees as it sends them."""

    model: nn.Module
    held: dict[str, Tensor]
    world: World
    apiece: bool = False

    def values(self, parts: Parts) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, received one by one; only the node's first rank holds full tensors."""
        world = self.world
        if world.world_size == 1:
            return {name: self._own(name, part) for name, part in parts.items() if part.local is not None}, []
        nodes = nodes_of(world)
        mine = next(ranks for ranks in nodes if world.rank in ranks)
        self._level(nodes)
        everybody = self._asked(mine, parts)
        found = {}
        for name, part in parts.items():
            if world.rank == mine[0]:
                for rank in mine[1:]:
                    self._send(name, everybody[rank][name], to=rank)
                if part.local is not None:
                    found[name] = self._own(name, part)
                self.held.pop(name)
            elif part.local is not None:
                found[name] = self._receive(name, part, source=mine[0])
        return found, []

    def _asked(self, ranks: list[int], parts: Parts) -> dict[int, dict[str, ShardSpec]]:
        """Send this rank's shard specs to the node's first rank, which returns the specs of all its ranks."""
        if self.world.rank != ranks[0]:
            text = json.dumps({name: part.as_json() for name, part in parts.items()}).encode()
            self._to(torch.tensor([len(text)]), ranks[0])
            self._to(torch.frombuffer(bytearray(text), dtype=torch.uint8), ranks[0])
            return {}
        found = {}
        for rank in ranks[1:]:
            size = int(self._from(torch.empty(1, dtype=torch.int64), rank))
            text = bytes(self._from(torch.empty(size, dtype=torch.uint8), rank).numpy())
            found[rank] = {name: ShardSpec.from_json(value) for name, value in json.loads(text).items()}
        return found

    def _to(self, tensor: Tensor, rank: int) -> None:
        dist.send(_as_bytes(tensor.to(self._wire)), group=self.world.group, group_dst=rank)

    def _from(self, tensor: Tensor, rank: int) -> Tensor:
        found = tensor.to(self._wire)
        dist.recv(_as_bytes(found), group=self.world.group, group_src=rank)
        return found.to(tensor.device)

    @property
    def _wire(self) -> torch.device:
        """Return the device to send tensors from: the CPU for gloo, which supports no other device."""
        return torch.device("cpu") if "gloo" in self.world.backend else self.world.device

    def _own(self, name: str, part: ShardSpec) -> Tensor:
        return self._taken(name, part).to(self.world.device)

    def _taken(self, name: str, part: ShardSpec) -> Tensor:
        whole = self.held[name]
        return whole.contiguous() if part.is_all and len(part.boxes) == 1 else part.take(whole)

    def _send(self, name: str, part: ShardSpec, *, to: int) -> None:
        if part.local is not None and part.numel:
            self._to(self._taken(name, part), to)

    def _receive(self, name: str, part: ShardSpec, *, source: int) -> Tensor:
        assert part.local is not None
        found = torch.empty(part.local, dtype=named_tensors(self.model)[name].dtype)
        return (self._from(found, source) if part.numel else found).to(self.world.device)

    def _level(self, nodes: list[list[int]]) -> None:
        """Overwrite values that differ between nodes, where the CPU type changes random bits, by the first node's."""
        if len(nodes) == 1:
            return
        world, firsts = self.world, [ranks[0] for ranks in nodes]
        told = world.gather_json({name: _sum(tensor) for name, tensor in self.held.items()})
        for name in told[0]:
            for rank in firsts[1:]:
                if told[rank][name] == told[0][name]:
                    continue
                if world.rank == 0:
                    self._send(name, ShardSpec.all_of(self.held[name].shape), to=rank)
                elif world.rank == rank:
                    part = ShardSpec.all_of(self.held[name].shape)
                    self.held[name] = self._receive(name, part, source=0).cpu()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _sum(tensor: Tensor) -> str:
    array: Any = _as_bytes(tensor.contiguous()).numpy()
    return hashlib.blake2b(array, digest_size=16).hexdigest()


def _global_rank(world: World) -> int:
    return dist.get_rank() if world.group is not None else world.rank
