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


def keep_shared_storage(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not blocks, contain no block and are not inside a block."""
    inside = {id(part) for block in blocks for part in block.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and not any(id(part) in inside for part in module.modules()):
            yield name, module


def free_other_chain_stages(
    model: nn.Module,
    *,
    split: StageSplit,
    owned_stages: Sequence[int],
    blocks: Sequence[nn.Module],
    device: torch.device | None = None,
) -> None:
    """Move parameters and buffers that none of this process's stages holds to the device "meta".

    Code around the blocks runs on every stage. Parameters that it reads become an expanded NaN (one element of memory)
    instead, so that the code can still run; they are on `device` if the model has no memory yet. Tied parameters remain
    tied.
    """
    held = frozenset().union(*(split.stages[stage].parameters for stage in owned_stages))
    first = {id(p): name for name, p in model.named_parameters()}
    outside = {id(module) for _, module in keep_shared_storage(model, blocks)}
    inside = {id(part) for block in blocks for part in block.modules()}
    new: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        around = id(module) not in outside and id(module) not in inside
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in first and first[id(parameter)] not in held:
                if id(parameter) not in new:
                    is_seen = around or first[id(parameter)] in split.read
                    new[id(parameter)] = _empty(parameter, device=(device or parameter.device) if is_seen else None)
                setattr(module, key, new[id(parameter)])
    theirs = [
        block for stage in split.stages if stage.index not in owned_stages for block in blocks[stage.start : stage.stop]
    ]
    _empty_buffers(model, split=split, own=owned_stages, theirs=theirs)


def free_other_graph_stages(model: nn.Module, *, split: GraphStageSplit, owned_stages: Sequence[int]) -> None:
    """Move the parameters and buffers that none of this process's stages uses to the device "meta"."""
    empty = {id(parameter) for parameter in absent_parameters(model, split=split, owned_stages=owned_stages)}
    new: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in empty:
                if id(parameter) not in new:
                    new[id(parameter)] = _empty(parameter, device=None)
                setattr(module, key, new[id(parameter)])
    mine = {name for stage in owned_stages for name in split.stages[stage].modules}
    theirs = {name for part in split.stages for name in part.modules} - mine
    _empty_buffers(model, split=split, own=owned_stages, theirs=[model.get_submodule(name) for name in sorted(theirs)])


def absent_parameters(
    model: nn.Module, *, split: StageSplit | GraphStageSplit, owned_stages: Sequence[int]
) -> set[nn.Parameter]:
    """Return the parameters that no stage of this process holds; sharding, optimizers and checkpoints skip them."""
    held = frozenset().union(*(split.stages[stage].parameters for stage in owned_stages))
    return {parameter for name, parameter in model.named_parameters() if name not in held}


def memoryless_copy(model: nn.Module, *, device: torch.device | None = None) -> nn.Module:
    """Return a copy of the model without memory for parameters and buffers, from which new shapes are exported later.

    Tensors that are on the device "meta" are on `device` in the copy.

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
            hint="create it in the forward, or remove it from the model",
        ) from error


def _empty_buffers(
    model: nn.Module, *, split: StageSplit | GraphStageSplit, own: Sequence[int], theirs: Sequence[nn.Module]
) -> None:
    """Move the buffers of modules that only other processes call to "meta", except for memory that is used here too.

    A buffer is used here if its module is also registered elsewhere in the model, if it shares memory with a buffer
    that is used here, or if a stage of this process computes with it.
    """
    kept = {storage_key(model.get_buffer(name)) for stage in own for name in split.stages[stage].buffers}
    kept |= {storage_key(buffer) for module in _outside(model, theirs) for buffer in module.buffers(recurse=False)}
    for module in {part: None for root in theirs for part in root.modules()}:
        for key, buffer in module._buffers.items():
            if buffer is not None and storage_key(buffer) not in kept:
                module._buffers[key] = torch.empty_like(buffer, device="meta")


def _outside(model: nn.Module, closed: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that can be reached without passing through the excluded modules."""
    seen, queue = {id(module) for module in closed}, [model]
    while queue:
        module = queue.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            queue += module.children()


def _empty(parameter: nn.Parameter, *, device: torch.device | None) -> nn.Parameter:
    if device is not None and parameter.is_floating_point():
        value: Tensor = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        value = value.expand(parameter.shape)
    else:
        value = torch.empty_like(parameter.detach(), device="meta")
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
