"""Model state outside the tensors of its `state_dict`: non-persistent buffers, and extra state.

They are part of a run's state, but not of its weights: checkpoints contain them, the consolidated folder does not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.shard_ownership import owned_shards, read_shard
from paceline.checkpoint.state_json import decode_state, encode_state, unwritable_kind
from paceline.checkpoint.tensor_bytes import from_bytes, to_bytes
from paceline.comm.exchange import Exchange
from paceline.errors import CheckpointError
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.private_api import tensor_version

_EXTRA = "_extra_state"
_MAX_COPIED_ELEMENTS = 1 << 16  # larger buffers are not copied to find changes


def state_dict_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the `state_dict` themselves, not copies."""
    entries = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in entries if isinstance(value, Tensor) and not _is_extra(name)}


class NonPersistentBuffers:
    """The buffers that the `state_dict` leaves out, with a record of their initial values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # by name: the tensor, its version count, and a copy of its values if it is small
        self._initial = {
            name: (tensor, tensor_version(tensor), _copy_small(tensor)) for name, tensor in self._list_buffers().items()
        }

    def exchange_changed(self, weights: ShardedTensors, *, rank: int) -> Exchange[list[Writable]]:
        """Return this rank's part of the buffers that were modified or replaced on any rank, for a checkpoint.

        Raises:
            CheckpointError: a sharded buffer was replaced by one of another shape.
        """
        changed = {name: tensor for name, tensor in self._list_buffers().items() if self._is_changed(name, tensor)}
        local_modes = {
            name: self._save_mode(weights, name, tensor)
            for name, tensor in changed.items()
            if _is_saved_here(weights, name)
        }
        if weights.is_unsharded:
            return [to_bytes(name, changed[name]) for name in local_modes]
        modes_by_rank = yield local_modes
        writable: list[Writable] = []
        for name in dict.fromkeys(name for rank_modes in modes_by_rank for name in rank_modes):
            modes = [rank_modes[name] for rank_modes in modes_by_rank if name in rank_modes]
            first_rank = next(number for number, rank_modes in enumerate(modes_by_rank) if name in rank_modes)
            if all(mode == "sharded" for mode in modes):
                shard_specs, local = weights.shard_specs(name), weights.local_tensors[name]
                writable += owned_shards(
                    name, dtype=local.dtype, get_tensor=local.get_tensor, shard_specs=shard_specs, rank=rank
                )
            elif "impossible" in modes:
                raise CheckpointError(
                    f"the buffer {name} can't be saved: it is sharded, and its shape has changed since the model "
                    "was built.",
                    cause="a forward replaced the buffer by a tensor of a different shape",
                    hint="keep the buffer in a module that is not sharded",
                )
            elif first_rank == rank:
                writable.append(to_bytes(name, changed[name]))
        return writable

    def restore(self, stored: StoredTensors, weights: ShardedTensors) -> None:
        """Load the buffers' values. A buffer is replaced if the forward had changed its shape before the save."""
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name in stored:
                local = weights.local_tensors.get(name)
                if local is None or local.shard_spec.is_full or local.shard_spec.shape != stored.shape(name):
                    self._set_buffer(name, buffers.get(name), from_bytes(stored[name]))
                elif local.shard_spec.local_shape is not None:
                    self._set_buffer(name, buffers.get(name), read_shard(stored, name, shard=local.shard_spec))

    @staticmethod
    def _save_mode(weights: ShardedTensors, name: str, tensor: Tensor) -> str:
        """Return how a buffer is saved: `sharded` by its shard spec, `full`, or `impossible`."""
        local = weights.local_tensors.get(name)
        if local is not None and local.shard_spec.local_shape == tuple(tensor.shape):
            return "sharded"
        return "full" if local is None or local.shard_spec.is_full else "impossible"

    def _set_buffer(self, name: str, buffer: Tensor | None, value: Tensor) -> None:
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            copy_into(buffer, value)
            if torch.equal(buffer, value.to(buffer.device)) or bool(value.isnan().any()):
                return
        path, _, leaf = name.rpartition(".")
        reference_tensor = buffer if buffer is not None else next(self._model.parameters())
        self._model.get_submodule(path).register_buffer(leaf, value.to(reference_tensor.device), persistent=False)

    def _list_buffers(self) -> dict[str, Tensor]:
        persistent = state_dict_tensors(self._model)
        return {name: tensor for name, tensor in self._model.named_buffers() if name not in persistent}

    def _is_changed(self, name: str, tensor: Tensor) -> bool:
        initial, version, copy = self._initial.get(name, (None, 0, None))
        return (
            tensor is not initial
            or tensor_version(tensor) != version
            or (copy is not None and not torch.equal(copy, tensor))
        )


def get_extra_state(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of the model's modules as JSON, by the names in the `state_dict`.

    Raises:
        CheckpointError: something in it can't be written without pickle.
    """
    encoded = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if _is_extra(name):
            encoded[name] = encode_state(value, where=name)
            kind = unwritable_kind(encoded[name])
            if kind:
                raise CheckpointError(
                    f"{name} holds a value of type {kind}, which can't be saved.",
                    cause="get_extra_state() returns an object that only pickle could write",
                    hint="return numbers, text, lists, dicts and tensors",
                )
    return encoded


def load_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Pass the saved extra state to each module's `set_extra_state`."""
    for name, value in saved.items():
        module: Any = model.get_submodule(name.removesuffix(_EXTRA).removesuffix("."))
        module.set_extra_state(decode_state(value))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _is_saved_here(weights: ShardedTensors, name: str) -> bool:
    """Return whether this rank has elements of a buffer; a buffer that `weights` lacks was created by a forward."""
    local = weights.local_tensors.get(name)
    return local is None or local.shard_spec.local_shape is not None


def _copy_small(tensor: Tensor) -> Tensor | None:
    """Return a copy of a small tensor, else None. Writes through `.data` change values but no version count."""
    return tensor.detach().clone() if tensor.numel() <= _MAX_COPIED_ELEMENTS else None
