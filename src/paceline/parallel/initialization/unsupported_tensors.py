"""Refuse tensors that no layout supports: overlapping parameters, sparse or nested tensors, NaN initial values."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import JobError
from paceline.torch_internals.private_api import storage_key


def refuse_tensors(model: nn.Module) -> None:
    """Check, before placement, that the model has no unsupported tensor.

    Raises:
        JobError: a tensor is not supported; the message names it.
    """
    _refuse_kinds(model)
    parameters = [(name, p) for name, p in model.named_parameters() if _has_elements(p)]
    _refuse_overlap([*parameters, *((name, buffer) for name, buffer in model.named_buffers() if _has_elements(buffer))])
    _refuse_nan(parameters)


def _has_elements(tensor: Tensor) -> bool:
    """Return False for an empty tensor, and for a lazy tensor, which is refused later by name."""
    return not is_lazy(tensor) and tensor.numel() > 0


def _refuse_kinds(model: nn.Module) -> None:
    tensors: list[tuple[str, str, Tensor]] = [("parameter", *named) for named in model.named_parameters()]
    tensors += [("buffer", *named) for named in model.named_buffers()]
    for kind, name, tensor in tensors:
        if tensor.is_nested:
            raise JobError(
                f"the {kind} {name} is a nested tensor, which can't be sent or saved.",
                cause="torch.nested.nested_tensor(...) kept in the model",
                hint="store its values and lengths as two tensors, and build the nested tensor in the forward",
            )
        if tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise JobError(
                f"the {kind} {name} is sparse ({layout}), which can't be sent or saved.",
                cause="an adjacency matrix or a pruned weight registered as a sparse tensor",
                hint="store its indices and values as two tensors, and torch.sparse_coo_tensor(indices, values, size) "
                "in the forward",
            )


def _refuse_overlap(tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise JobError if parameters share memory: a weight would have two gradients and two optimizer states.

    A buffer that shares memory with a parameter is refused too. Two buffers may share memory.
    """
    tensors_by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        tensors_by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
    for members in tensors_by_storage.values():
        for position, (second, second_tensor) in enumerate(members):
            for first, first_tensor in members[:position]:
                if isinstance(first_tensor, nn.Parameter) and _overlap(first_tensor, second_tensor):
                    raise _shared_memory_error(first, second, is_buffer=not isinstance(second_tensor, nn.Parameter))


def _shared_memory_error(first: str, second: str, *, is_buffer: bool) -> JobError:
    if is_buffer:
        return JobError(
            f"the buffer {second} shares the memory of the parameter {first}: layouts that move weights end this.",
            cause="register_buffer(name, parameter.data)",
            hint=f"self.{first} where it is used, or a clone of it",
        )
    return JobError(
        f"the parameters {first} and {second} share memory: one weight would have two gradients and two optimizer "
        "states, and layouts that move weights end the sharing.",
        cause="second.data = first.data, or nn.Parameter(first.data.view(...))",
        hint=f"one parameter under both names (self.{second} = self.{first}); to use a part or another view of "
        "it, slice or view it in the forward",
    )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of one storage have an element in common."""
    (low, high), (second_low, second_high) = _storage_range(first), _storage_range(second)
    size = first.element_size()
    if first.dtype != second.dtype or (first.shape, first.stride(), low) == (second.shape, second.stride(), second_low):
        return low * size < second_high * second.element_size() and second_low * second.element_size() < high * size
    if high <= second_low or second_high <= low:
        return False
    marks = torch.zeros(max(high, second_high), dtype=torch.bool)
    torch.as_strided(marks, first.shape, first.stride(), low).fill_(True)
    return bool(torch.as_strided(marks, second.shape, second.stride(), second_low).any())


def _storage_range(tensor: Tensor) -> tuple[int, int]:
    """Return the range of storage offsets that a tensor spans: its first element, and one past its last."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse_nan(parameters: Sequence[tuple[str, Tensor]]) -> None:
    for name, parameter in parameters:
        value = parameter.detach()
        if value.is_meta or not (value.is_floating_point() or value.is_complex()):
            continue
        if bool(torch.isnan(value.sum())) and bool(torch.isnan(value).any()):
            raise JobError(
                f"the initial weights of {name} contain NaN.",
                cause="torch.empty without an initialisation, or a checkpoint that contains NaN",
                hint=f"initialise it in model=: nn.init.normal_(self.{name}, std=0.02)",
            )
