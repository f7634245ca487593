"""Cast a model to another precision, keeping complex numbers complex and shared memory shared.

In contrast, `model.to(dtype)` gives each parameter its own memory and makes complex numbers real.
"""

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this type; a complex tensor in its complex type, an integer tensor unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast every floating or complex parameter and buffer of the model, and return the model."""
    tensors = [*model.parameters(), *model.buffers()]
    shared = _shared(tensors)
    if not shared and not any(tensor.is_complex() for tensor in tensors):
        return model.to(dtype)
    wholes = {pointer: as_type(whole, dtype) for pointer, whole in shared.items()}

    def cast(tensor: Tensor) -> Tensor:
        whole = wholes.get(_pointer(tensor))
        if whole is None:
            return as_type(tensor, dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for _, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:
                    done[id(parameter)] = parameter
                    parameter.data = cast(parameter.data)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if id(buffer) not in done:
                    done[id(buffer)] = cast(buffer)
                setattr(module, name, done[id(buffer)])
    return model


def _shared(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return whole storages that several tensors share, by address."""
    found: dict[int, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        pointer = _pointer(tensor)
        if pointer and found.setdefault(pointer, tensor) is not tensor and found[pointer].dtype == tensor.dtype:
            shared[pointer] = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    return shared


def _pointer(tensor: Tensor) -> int:
    """Return the storage address of a tensor; 0 if it has no storage that can be shared."""
    plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.device.type != "meta"
    return tensor.untyped_storage().data_ptr() if plain else 0
