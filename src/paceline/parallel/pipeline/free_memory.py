"""Release of the memory of parameters and buffers of other stages; names, shapes and dtypes don't change."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.chain.split import StageSplit
from paceline.parallel.pipeline.graph.split import GraphStageSplit
from paceline.torch_internals.private_api import storage_key


def modules_outside_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not blocks, contain no block and are not inside a block."""
    in_blocks = _module_ids(blocks)
    for name, module in model.named_modules():
        if id(module) not in in_blocks and not any(id(part) in in_blocks for part in module.modules()):
            yield name, module


def free_other_chain_stages(
    model: nn.Module,
    *,
    split: StageSplit,
    owned_stages: Sequence[int],
    blocks: Sequence[nn.Module],
    device: torch.device | None = None,
) -> None:
    """Move the parameters and buffers that no stage of this process holds to the device "meta".

    Modules that contain blocks run on every stage, and their code may read such parameters. A parameter that this
    code reads is replaced by a NaN, expanded to the parameter's shape (one element of memory), so that the code can
    still run. The NaN is on `device`; the default is the parameter's device. Tied parameters remain tied.
    """
    held_names = _held_parameter_names(split, owned_stages)
    first_names = {id(p): name for name, p in model.named_parameters()}
    outside_ids = {id(module) for _, module in modules_outside_blocks(model, blocks)}
    in_blocks = _module_ids(blocks)
    freed: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        has_block = id(module) not in outside_ids and id(module) not in in_blocks
        for key, parameter in list(module._parameters.items()):
            name = first_names.get(id(parameter))
            if parameter is not None and name is not None and name not in held_names:
                if id(parameter) not in freed:
                    is_read = has_block or name in split.parameters_read_outside
                    freed[id(parameter)] = _freed_copy(
                        parameter, device=(device or parameter.device) if is_read else None
                    )
                setattr(module, key, freed[id(parameter)])
    absent_blocks = [
        block for stage in split.stages if stage.index not in owned_stages for block in blocks[stage.start : stage.stop]
    ]
    _free_buffers(model, split=split, owned_stages=owned_stages, absent_modules=absent_blocks)


def free_other_graph_stages(model: nn.Module, *, split: GraphStageSplit, owned_stages: Sequence[int]) -> None:
    """Move the parameters and buffers that no stage of this process uses to the device "meta"."""
    absent_ids = {id(parameter) for parameter in absent_parameters(model, split=split, owned_stages=owned_stages)}
    freed: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in absent_ids:
                if id(parameter) not in freed:
                    freed[id(parameter)] = _freed_copy(parameter, device=None)
                setattr(module, key, freed[id(parameter)])
    owned_modules = {name for stage in owned_stages for name in split.stages[stage].modules}
    absent_names = {name for stage in split.stages for name in stage.modules} - owned_modules
    absent_modules = [model.get_submodule(name) for name in sorted(absent_names)]
    _free_buffers(model, split=split, owned_stages=owned_stages, absent_modules=absent_modules)


def absent_parameters(
    model: nn.Module, *, split: StageSplit | GraphStageSplit, owned_stages: Sequence[int]
) -> set[nn.Parameter]:
    """Return the parameters that no stage of this process holds; sharding, optimizers and checkpoints skip them."""
    held_names = _held_parameter_names(split, owned_stages)
    return {parameter for name, parameter in model.named_parameters() if name not in held_names}


def memoryless_copy(model: nn.Module, *, device: torch.device | None = None) -> nn.Module:
    """Return a copy of the model whose parameters and buffers have no memory.

    The graphs for new input shapes are exported from this copy. Tensors that are on the device "meta" are on `device`
    in the copy.

    Raises:
        LayoutError: the model can't be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor.detach(), device=device if tensor.is_meta else None)
        empty.untyped_storage().resize_(0)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise LayoutError(
            f"the model can't be copied ({type(error).__name__}: {error}), so its forward can't be exported.",
            cause="a lock, a file or a tensor with a graph that the model keeps as an attribute",
            hint="create this object in the forward, or remove it from the model",
        ) from error


def _module_ids(roots: Sequence[nn.Module]) -> set[int]:
    return {id(module) for root in roots for module in root.modules()}


def _held_parameter_names(split: StageSplit | GraphStageSplit, owned_stages: Sequence[int]) -> frozenset[str]:
    return frozenset().union(*(split.stages[stage].parameters for stage in owned_stages))


def _free_buffers(
    model: nn.Module,
    *,
    split: StageSplit | GraphStageSplit,
    owned_stages: Sequence[int],
    absent_modules: Sequence[nn.Module],
) -> None:
    """Move the buffers of `absent_modules` to "meta", except for buffers that this process uses.

    Only other processes call these modules. This process still uses a buffer if its module is also registered elsewhere
    in the model, if it shares memory with a used buffer, or if a stage of this process computes with it.
    """
    used_storages = {
        storage_key(model.get_buffer(name)) for stage in owned_stages for name in split.stages[stage].buffers
    }
    used_storages |= {
        storage_key(buffer)
        for module in _modules_without(model, absent_modules)
        for buffer in module.buffers(recurse=False)
    }
    for module in {part: None for root in absent_modules for part in root.modules()}:
        for key, buffer in module._buffers.items():
            if buffer is not None and storage_key(buffer) not in used_storages:
                module._buffers[key] = torch.empty_like(buffer, device="meta")


def _modules_without(model: nn.Module, excluded: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that can be reached without passing through the excluded modules."""
    seen_ids, stack = {id(module) for module in excluded}, [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen_ids:
            seen_ids.add(id(module))
            yield module
            stack += module.children()


def _freed_copy(parameter: nn.Parameter, *, device: torch.device | None) -> nn.Parameter:
    """Return a parameter of the same shape on "meta".

    If `device` is given and the parameter is floating point, return an expanded NaN on `device` instead.
    """
    if device is not None and parameter.is_floating_point():
        value: Tensor = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        value = value.expand(parameter.shape)
    else:
        value = torch.empty_like(parameter.detach(), device="meta")
    freed = nn.Parameter(value, requires_grad=parameter.requires_grad)
    freed.__dict__.update(parameter.__dict__)
    return freed
