"""Send initial values from the rank that built the model to the other ranks of its node."""

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
from paceline.parallel.initialization.meta_model import describe_model, hash_description, named_tensors, release_memory
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs


def ranks_by_node(world: World) -> list[list[int]]:
    """Return the ranks of each node; the first of them builds the model."""
    node_ids = world.gather_json(_global_rank(world) - world.local_rank)  # the global rank of the node's first rank
    return [[rank for rank, node in enumerate(node_ids) if node == node_id] for node_id in dict.fromkeys(node_ids)]


def is_first_of_node(world: World) -> bool:
    """Return whether this rank builds the model for its node."""
    return any(ranks[0] == world.rank for ranks in ranks_by_node(world))


def match_rank_zero(
    model: nn.Module, *, build: Callable[[], nn.Module], is_plain: bool, reason: str, world: World
) -> tuple[nn.Module, list[str]]:
    """Return a model on the meta device that is equal to rank 0's.

    `is_plain`: whether `model` comes from a plain build, and not from a recorded one. `reason` says why this rank's
    recorded model may differ from a plain build; it is empty if there is no reason. A rank with a reason builds
    the real model and frees its memory.

    Raises:
        DesyncError: the models still differ.
    """
    gathered = world.gather_json([hash_description(describe_model(model)), reason])
    if all(digest == gathered[0][0] for digest, _ in gathered) and not any(text for _, text in gathered):
        return model, []
    expected = world.share_json(describe_model(model) if world.rank == 0 else None)
    description = describe_model(model)
    if description != expected and not reason:
        name = _first_difference(description, expected)
        reason = (
            f"{name} is {description.get(name, 'absent')} on the meta device, and {expected.get(name, 'absent')} in a "
            "plain build"
        )
    if reason and not is_plain:
        model = release_memory(build())
    _refuse_differences(_only_tensors(describe_model(model)), _only_tensors(expected), world)
    reasons = [text for text in world.gather_json(reason) if text]
    note = "start: ranks that are not the first of their node may also build the whole model, because"
    return model, [f"{note} {reasons[0]}"] if reasons else []


def refuse_unequal_models(model: nn.Module, *, world: World) -> None:
    """Check that all ranks have recorded the same model.

    Raises:
        DesyncError: the models differ; the message names the difference.
    """
    tensors = _only_tensors(describe_model(model))
    if len(set(world.gather_json(hash_description(tensors)))) > 1:
        _refuse_differences(tensors, world.share_json(tensors if world.rank == 0 else None), world)


def _refuse_differences(local_tensors: dict[str, str], expected: dict[str, str], world: World) -> None:
    differences = world.gather_json(_first_difference(local_tensors, expected) if local_tensors != expected else "")
    rank = next((rank for rank, name in enumerate(differences) if name), None)
    if rank is not None:
        raise DesyncError(
            f"the ranks have built different models: {differences[rank]} on rank {rank} differs from rank 0.",
            cause="code that builds, ties or freezes layers on some ranks only, or in a different order",
            hint="build the same model on every rank",
        )


def _only_tensors(description: dict[str, str]) -> dict[str, str]:
    """Return only the tensors of a description; other values may be specific to a process (an id, a path)."""
    return {n: v for n, v in description.items() if v.startswith("tied to ") or v.endswith(("trainable", "constant"))}


def _first_difference(local_description: dict[str, str], expected: dict[str, str]) -> str:
    return next(
        (name for name in {**expected, **local_description} if local_description.get(name) != expected.get(name)),
        "the order of its parameters",
    )


@dataclass(frozen=True, kw_only=True)
class NodeBroadcast:
    """Initial values that the node's first rank holds, and frees as it sends them."""

    model: nn.Module
    tensors: dict[str, Tensor]
    world: World
    is_local: bool = False

    def values(self, shard_specs: ShardSpecs) -> tuple[dict[str, Tensor], list[str]]:
        """Return this rank's shards, received one by one; only the node's first rank holds full tensors."""
        world = self.world
        if world.world_size == 1:
            return {
                name: self._local_shard(name, shard_spec)
                for name, shard_spec in shard_specs.items()
                if shard_spec.local_shape is not None
            }, []
        nodes = ranks_by_node(world)
        node_ranks = next(ranks for ranks in nodes if world.rank in ranks)
        self._equalize_nodes(nodes)
        specs_by_rank = self._gather_specs(node_ranks, shard_specs)
        values = {}
        for name, shard_spec in shard_specs.items():
            if world.rank == node_ranks[0]:
                for rank in node_ranks[1:]:
                    self._send_shard(name, specs_by_rank[rank][name], target=rank)
                if shard_spec.local_shape is not None:
                    values[name] = self._local_shard(name, shard_spec)
                self.tensors.pop(name)
            elif shard_spec.local_shape is not None:
                values[name] = self._receive_shard(name, shard_spec, source=node_ranks[0])
        return values, []

    def _gather_specs(self, node_ranks: list[int], shard_specs: ShardSpecs) -> dict[int, dict[str, ShardSpec]]:
        """Return the other ranks' shard specs on the node's first rank; other ranks send theirs and return nothing."""
        if self.world.rank != node_ranks[0]:
            text = json.dumps({name: spec.as_json() for name, spec in shard_specs.items()}).encode()
            self._send_tensor(torch.tensor([len(text)]), node_ranks[0])
            self._send_tensor(torch.frombuffer(bytearray(text), dtype=torch.uint8), node_ranks[0])
            return {}
        specs_by_rank = {}
        for rank in node_ranks[1:]:
            size = int(self._receive_tensor(torch.empty(1, dtype=torch.int64), rank))
            text = bytes(self._receive_tensor(torch.empty(size, dtype=torch.uint8), rank).numpy())
            specs_by_rank[rank] = {name: ShardSpec.from_json(value) for name, value in json.loads(text).items()}
        return specs_by_rank

    def _send_tensor(self, tensor: Tensor, rank: int) -> None:
        dist.send(_as_bytes(tensor.to(self._message_device)), group=self.world.group, group_dst=rank)

    def _receive_tensor(self, tensor: Tensor, rank: int) -> Tensor:
        received = tensor.to(self._message_device)
        dist.recv(_as_bytes(received), group=self.world.group, group_src=rank)
        return received.to(tensor.device)

    @property
    def _message_device(self) -> torch.device:
        """Return the device to send tensors from: the CPU for gloo, which supports no other device."""
        return torch.device("cpu") if "gloo" in self.world.backend else self.world.device

    def _local_shard(self, name: str, shard_spec: ShardSpec) -> Tensor:
        return self._extract_shard(name, shard_spec).to(self.world.device)

    def _extract_shard(self, name: str, shard_spec: ShardSpec) -> Tensor:
        full_tensor = self.tensors[name]
        return (
            full_tensor.contiguous()
            if shard_spec.is_full and len(shard_spec.boxes) == 1
            else shard_spec.extract(full_tensor)
        )

    def _send_shard(self, name: str, shard_spec: ShardSpec, *, target: int) -> None:
        if shard_spec.local_shape is not None and shard_spec.numel:
            self._send_tensor(self._extract_shard(name, shard_spec), target)

    def _receive_shard(self, name: str, shard_spec: ShardSpec, *, source: int) -> Tensor:
        assert shard_spec.local_shape is not None
        shard = torch.empty(shard_spec.local_shape, dtype=named_tensors(self.model)[name].dtype)
        return (self._receive_tensor(shard, source) if shard_spec.numel else shard).to(self.world.device)

    def _equalize_nodes(self, nodes: list[list[int]]) -> None:
        """Give every node the first node's values, because random draws can differ in some bits between CPU types."""
        if len(nodes) == 1:
            return
        world, first_ranks = self.world, [ranks[0] for ranks in nodes]
        checksums = world.gather_json({name: _checksum(tensor) for name, tensor in self.tensors.items()})
        for name in checksums[0]:
            for rank in first_ranks[1:]:
                if checksums[rank][name] == checksums[0][name]:
                    continue
                if world.rank == 0:
                    self._send_shard(name, ShardSpec.full(self.tensors[name].shape), target=rank)
                elif world.rank == rank:
                    shard_spec = ShardSpec.full(self.tensors[name].shape)
                    self.tensors[name] = self._receive_shard(name, shard_spec, source=0).cpu()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _checksum(tensor: Tensor) -> str:
    array: Any = _as_bytes(tensor.contiguous()).numpy()
    return hashlib.blake2b(array, digest_size=16).hexdigest()


def _global_rank(world: World) -> int:
    return dist.get_rank() if world.group is not None else world.rank
