"""Giving up the memory of what other stages hold; names, shapes and types stay as they are."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.place.cut import Cut


def glue(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that neither are, hold nor stand in a block."""
    inside = {id(part) for block in blocks for part in block.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and not any(id(part) in inside for part in module.modules()):
            yield name, module


def hollow(
    model: nn.Module,
    *,
    cut: Cut,
    own: Sequence[int],
    blocks: Sequence[nn.Module],
    device: torch.device | None = None,
) -> None:
    """Move what none of this process's stages holds to the device "meta".

    A parameter that belongs to a module around the blocks, whose forward runs on every stage, becomes NaN without
    memory instead: its code can go on, on `device` where the model has none yet. Tied parameters stay tied.
    """
    held = frozenset().union(*(cut.parts[stage].parameters for stage in own))
    first = {id(p): name for name, p in model.named_parameters()}
    outside = {id(module) for _, module in glue(model, blocks)}
    inside = {id(part) for block in blocks for part in block.modules()}
    new: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        around = id(module) not in outside and id(module) not in inside
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in first and first[id(parameter)] not in held:
                if id(parameter) not in new:
                    new[id(parameter)] = _empty(parameter, device=(device or parameter.device) if around else None)
                setattr(module, key, new[id(parameter)])
    theirs = [block for stage in cut.parts if stage.index not in own for block in blocks[stage.start : stage.stop]]
    for block in theirs:
        for module in block.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty_like(buffer, device="meta")


def hollow_parameters(model: nn.Module, *, cut: Cut, own: Sequence[int]) -> set[nn.Parameter]:
    """The parameters without memory: what sharding, optimizers and checkpoints of this process leave out."""
    held = frozenset().union(*(cut.parts[stage].parameters for stage in own))
    return {parameter for name, parameter in model.named_parameters() if name not in held}


def _empty(parameter: nn.Parameter, *, device: torch.device | None) -> nn.Parameter:
    if device is not None and parameter.is_floating_point():
        value: Tensor = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
        value = value.expand(parameter.shape)
    else:
        value = torch.empty_like(parameter.detach(), device="meta")
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
