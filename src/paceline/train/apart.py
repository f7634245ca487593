"""What a model holds beside the tensors of its `state_dict`: buffers that are left out of it, and extra state.

Both are part of where a run stands and not of its weights: a checkpoint holds them, the consolidated folder does not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.place.views import write
from paceline.store.tensors import TensorBytes
from paceline.torch_private import version
from paceline.train.convert import from_bytes, to_bytes
from paceline.train.plain import from_plain, made_anew, to_plain

_EXTRA = "_extra_state"
_MOST_COMPARED = 1 << 16


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the `state_dict`, themselves."""
    found = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in found if isinstance(value, Tensor) and not _is_extra(name)}


class Unlisted:
    """The buffers that the `state_dict` leaves out, and which of them are no longer as the model was built."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built = {name: (tensor, version(tensor), _copy(tensor)) for name, tensor in self._all().items()}

    def changed(self) -> list[TensorBytes]:
        """Those that were written to, or put in another's place, since."""
        return [to_bytes(name, tensor) for name, tensor in self._all().items() if not self._is_as_built(name, tensor)]

    def restore(self, stored: Mapping[str, TensorBytes]) -> None:
        """Give them their values back; one of another shape than was built is put in its place, as the forward did."""
        now = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, value in stored.items():
                self._give(name, now.get(name), from_bytes(value))

    def _give(self, name: str, held: Tensor | None, value: Tensor) -> None:
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            write(held, value)
            if torch.equal(held, value.to(held.device)) or bool(value.isnan().any()):
                return
        path, _, leaf = name.rpartition(".")
        beside = held if held is not None else next(self._model.parameters())
        self._model.get_submodule(path).register_buffer(leaf, value.to(beside.device), persistent=False)

    def _all(self) -> dict[str, Tensor]:
        listed = tensors_of(self._model)
        return {name: tensor for name, tensor in self._model.named_buffers() if name not in listed}

    def _is_as_built(self, name: str, tensor: Tensor) -> bool:
        built, number, copy = self._built.get(name, (None, 0, None))
        return tensor is built and version(tensor) == number and (copy is None or torch.equal(copy, tensor))


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What `get_extra_state` of its modules gives, as JSON.

    Raises:
        CheckpointError: something in it can't be written without pickle.
    """
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if _is_extra(name):
            found[name] = to_plain(value, where=name)
            kind = made_anew(found[name])
            if kind:
                raise CheckpointError(
                    f"{name} holds a value of type {kind}, which can't be saved.",
                    cause="get_extra_state() gives an object that only pickle could write",
                    hint="return numbers, text, lists, dicts and tensors",
                )
    return found


def load_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Hand it back to each module's `set_extra_state`."""
    for name, value in saved.items():
        module: Any = model.get_submodule(name.removesuffix(_EXTRA).removesuffix("."))
        module.set_extra_state(from_plain(value))


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _copy(tensor: Tensor) -> Tensor | None:
    """Of small ones the value too: a write through `.data` leaves no trace."""
    return tensor.detach().clone() if tensor.numel() <= _MOST_COMPARED else None
