"""Model state outside the tensors of its `state_dict`: non-persistent buffers, and extra state.

Both belong to a run's state and not to its weights: a checkpoint holds them, the consolidated folder does not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.shard_ownership import owned_shards, read_part
from paceline.checkpoint.state_json import from_plain, job_created_kind, to_plain
from paceline.checkpoint.tensor_bytes import from_bytes, to_bytes
from paceline.comm.process_group import World
from paceline.errors import CheckpointError
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.private_api import tensor_version

_EXTRA = "_extra_state"
_MOST_COMPARED = 1 << 16


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the `state_dict` themselves, not copies."""
    found = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in found if isinstance(value, Tensor) and not _is_extra(name)}


class NonPersistentBuffers:
    """The buffers that the `state_dict` leaves out, with a record of how the model was built."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = {name: (tensor, tensor_version(tensor), _copy(tensor)) for name, tensor in self._all().items()}

    def changed(self, weights: ShardedTensors, world: World) -> list[Writable]:
        """Return what this rank writes of the buffers that were written to, or replaced, on any rank.

        Every rank calls this.

        Raises:
            CheckpointError: a sharded buffer was replaced by one of another shape.
        """
        now = {name: tensor for name, tensor in self._all().items() if self._is_changed(name, tensor)}
        mine = {name: self._fits(weights, name, tensor) for name, tensor in now.items() if _holds(weights, name)}
        if weights.is_whole:
            return [to_bytes(name, now[name]) for name in mine]
        told = world.gather_json(mine)
        found: list[Writable] = []
        for name in dict.fromkeys(name for said in told for name in said):
            said = [fits[name] for fits in told if name in fits]
            first = next(rank for rank, fits in enumerate(told) if name in fits)
            if all(fit == "cut" for fit in said):
                parts = weights.parts(name)
                held = weights.mine[name]
                found += owned_shards(name, dtype=held.dtype, find=held.find, parts=parts, rank=world.rank)
            elif "other" in said:
                raise CheckpointError(
                    f"{name} is sharded and its shape has changed since the model was built: it can't be saved.",
                    cause="a forward replaced the buffer by a tensor of a different shape",
                    hint="register_buffer(..., persistent=False) in a module that is not split",
                )
            elif first == world.rank:
                found.append(to_bytes(name, now[name]))
        return found

    def restore(self, stored: StoredTensors, weights: ShardedTensors) -> None:
        """Load the buffers' values; a buffer of another shape than was built is replaced, as the forward did."""
        now = dict(self._model.named_buffers())
        with torch.no_grad():
            for name in stored:
                held = weights.mine.get(name)
                if held is None or held.part.is_all or held.part.shape != stored.shape(name):
                    self._give(name, now.get(name), from_bytes(stored[name]))
                elif held.part.local is not None:
                    self._give(name, now.get(name), read_part(stored, name, part=held.part))

    @staticmethod
    def _fits(weights: ShardedTensors, name: str, tensor: Tensor) -> str:
        """Return how a buffer is saved: `cut` as its shard says, `whole`, or `other` if neither is right."""
        held = weights.mine.get(name)
        if held is not None and held.part.local == tuple(tensor.shape):
            return "cut"
        return "whole" if held is None or held.part.is_all else "other"

    def _give(self, name: str, held: Tensor | None, value: Tensor) -> None:
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            copy_into(held, value)
            if torch.equal(held, value.to(held.device)) or bool(value.isnan().any()):
                return
        path, _, leaf = name.rpartition(".")
        beside = held if held is not None else next(self._model.parameters())
        self._model.get_submodule(path).register_buffer(leaf, value.to(beside.device), persistent=False)

    def _all(self) -> dict[str, Tensor]:
        listed = tensors_of(self._model)
        return {name: tensor for name, tensor in self._model.named_buffers() if name not in listed}

    def _is_changed(self, name: str, tensor: Tensor) -> bool:
        built, number, copy = self._built.get(name, (None, 0, None))
        return (
            tensor is not built
            or tensor_version(tensor) != number
            or (copy is not None and not torch.equal(copy, tensor))
        )


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return the `get_extra_state` of the model's modules, as JSON.

    Raises:
        CheckpointError: something in it can't be written without pickle.
    """
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if _is_extra(name):
            found[name] = to_plain(value, where=name)
            kind = job_created_kind(found[name])
            if kind:
                raise CheckpointError(
                    f"{name} holds a value of type {kind}, which can't be saved.",
                    cause="get_extra_state() returns an object that only pickle could write",
                    hint="return numbers, text, lists, dicts and tensors",
                )
    return found


def load_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Pass the saved extra state to each module's `set_extra_state`."""
    for name, value in saved.items():
        module: Any = model.get_submodule(name.removesuffix(_EXTRA).removesuffix("."))
        module.set_extra_state(from_plain(value))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _holds(weights: ShardedTensors, name: str) -> bool:
    """Return whether this rank saves a buffer; one that a forward created is unknown to other ranks."""
    held = weights.mine.get(name)
    return held is None or held.part.local is not None


def _copy(tensor: Tensor) -> Tensor | None:
    """Return a copy of a small tensor, else None: a write through `.data` changes no version count."""
    return tensor.detach().clone() if tensor.numel() <= _MOST_COMPARED else None
