"""Cast a model to another precision, keeping complex numbers complex and shared memory shared.

In contrast, `model.to(dtype)` gives each parameter its own memory and makes complex numbers real.
"""

import torch
from torch import Tensor, nn

_PLAIN_TYPES = (Tensor, nn.Parameter)


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor cast to this type: complex values to the matching complex type, integers unchanged."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast every floating or complex parameter and buffer of the model, and return the model."""
    tensors = [*model.parameters(), *model.buffers()]
    shared_storages = _shared_storages(tensors)
    if not shared_storages and not any(tensor.is_complex() for tensor in tensors):
        return model.to(dtype)
    cast_storages = {pointer: cast_tensor(storage, dtype) for pointer, storage in shared_storages.items()}

    def cast_keeping_sharing(tensor: Tensor) -> Tensor:
        """Return the tensor cast; a tensor in a shared storage becomes a view of the cast storage."""
        cast_storage = cast_storages.get(_storage_pointer(tensor))
        if cast_storage is None:
            return cast_tensor(tensor, dtype)
        return cast_storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    cast_by_id: dict[int, Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for _, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in cast_by_id:
                    cast_by_id[id(parameter)] = parameter
                    parameter.data = cast_keeping_sharing(parameter.data)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if id(buffer) not in cast_by_id:
                    cast_by_id[id(buffer)] = cast_keeping_sharing(buffer)
                setattr(module, name, cast_by_id[id(buffer)])
    return model


def _shared_storages(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return the storages that several tensors share, as flat tensors, by address."""
    first_by_pointer: dict[int, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        pointer = _storage_pointer(tensor)
        if (
            pointer
            and first_by_pointer.setdefault(pointer, tensor) is not tensor
            and first_by_pointer[pointer].dtype == tensor.dtype
        ):
            shared[pointer] = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    return shared


def _storage_pointer(tensor: Tensor) -> int:
    """Return the storage address of a tensor; 0 if it has no storage that can be shared."""
    has_storage = type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided and tensor.device.type != "meta"
    return tensor.untyped_storage().data_ptr() if has_storage else 0
