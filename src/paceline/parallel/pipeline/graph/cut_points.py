"""Choice of cut points along the exported graph, for models without a chain of blocks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import JobError, LayoutError
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.blocks import Block, find_blocks
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.parallel.pipeline.chain.external_reads import find_external_reads, refuse_external_reads
from paceline.parallel.pipeline.free_memory import memoryless_copy
from paceline.parallel.pipeline.graph.export import export_graph
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall, Step
from paceline.parallel.pipeline.graph.split import GraphStageSplit, split_graph
from paceline.parallel.pipeline.stage_bounds import balanced_bounds, bounds_from_counts
from paceline.torch_internals.private_api import CallInterceptor
from paceline.torch_internals.rng import random_blocks

_MIN_UNITS_PER_STAGE = 2
"""If no blocks are listed, modules with more than 1/2 of a stage's share of the parameters are split into children."""

_RecordedCall = tuple[tuple[Any, ...], dict[str, Any], dict[str, bool]]
"""The positional and the keyword arguments of a call, and whether each module was in training mode."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """The split, the memoryless copy from which new shapes are exported, and whether the forward prints."""

    split: GraphStageSplit
    empty_model: nn.Module
    has_print_calls: bool = False


def plan_graph(
    model: nn.Module,
    *,
    num_stages: int,
    call: Callable[[], Any],
    device: torch.device | None = None,
    blocks: Sequence[str] | None = None,
    bounds: Sequence[int] | None = None,
    time_modules: Callable[[Mapping[str, nn.Module]], Sequence[float]] | None = None,
    deferred_model: DeferredModel | None = None,
) -> GraphPlan:
    """Plan the split of a model along its exported graph.

    `call` runs the forward (and loss) on one example microbatch. If the model is on the meta device, the microbatch is
    on `device`, and `deferred_model` runs `call`; if the forward needs the parameters' values, `call` is run again with
    these values. `blocks` names the modules between whose calls a stage may end, and `bounds` gives the number of these
    calls in each stage. Without `bounds`, the stages are balanced by the modules' numbers of parameters or, with
    `time_modules`, by the seconds that it returns for each module.

    Raises:
        LayoutError: the forward can't be exported, has fewer calls than stages, or needs a value that can't be sent;
            the model is called twice; or the loss reads a value that the model does not return.
    """
    args, kwargs, module_modes = _record_first_call(model, call)
    empty_model = memoryless_copy(model, device=device)
    for name, module in empty_model.named_modules():
        module.training = module_modes[name]
    listed_blocks = [block.name for block in find_blocks(model, listed_names=blocks)] if blocks else []
    units = tuple(_unit_names(model, num_stages, listed_blocks))
    find_reads = partial(find_external_reads, model, module_names=units, call=call)
    external_reads = find_reads() if deferred_model is None else deferred_model.run_without_values(find_reads)
    graph = export_graph(empty_model, args, kwargs, units=units)
    block_steps = [index for index, step in enumerate(graph.steps) if _is_block_call(model, step, listed_blocks)]
    called_blocks = _called_blocks(model, graph, block_steps)
    if num_stages > len(called_blocks):
        raise _too_few_blocks(num_stages, called_blocks)
    if bounds:
        chosen_bounds = bounds_from_counts(bounds, num_stages, len(called_blocks))
    else:
        chosen_bounds = balanced_bounds(num_stages, called_blocks, _block_weights(called_blocks, time_modules))
    split = split_graph(model, graph, units=units, block_steps=block_steps, bounds=chosen_bounds)
    *earlier_modules, last_modules = (part.modules for part in split.stages)
    refuse_external_reads(external_reads, last_stage_modules=last_modules.difference(*earlier_modules))
    return GraphPlan(split=split, empty_model=empty_model, has_print_calls=graph.has_print_calls)


class _ModelCalled(BaseException):
    """The signal that the model was called.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """


def _record_first_call(model: nn.Module, call: Callable[[], Any]) -> _RecordedCall:
    """Return the arguments of the model's first call and each module's mode in it, without running the call."""
    recorded_calls: list[_RecordedCall] = []

    def record_call(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorded_calls.append((args, kwargs, {name: module.training for name, module in model.named_modules()}))
        raise _ModelCalled

    with side_effect_free(model, parameters=False):
        interceptor = CallInterceptor(model, record_call)
        try:
            call()
        except _ModelCalled:
            return recorded_calls[0]
        finally:
            interceptor.undo()
    raise JobError(
        "the forward ended without a call of the model, so there is nothing to cut into stages.",
        cause="a forward= that does not call the model, or calls a part of it",
        hint="forward=lambda model, batch: model(...)",
    )


def _unit_names(model: nn.Module, num_stages: int, listed_blocks: Collection[str]) -> Iterator[str]:
    """Yield the names of the units, which are the modules that a stage boundary never splits.

    The children of the model are units, except that some children are opened: their own children replace them. A
    child is opened if it is an `nn.ModuleList` or `nn.ModuleDict`, or if it contains a listed block. If no block is
    listed, a child that is too large for balanced stages is opened too, unless it is a module of torch or has hooks.
    Listed blocks and repeated blocks with dropout are never opened.
    """
    max_numel = sum(p.numel() for p in model.parameters()) / (_MIN_UNITS_PER_STAGE * num_stages)
    visited: set[int] = set()
    closed = {id(block) for block in random_blocks(model)}

    def units_of_children(module: nn.Module, prefix: str) -> Iterator[str]:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if id(child) in visited:
                continue
            visited.add(id(child))
            can_open = name not in listed_blocks and id(child) not in closed
            if can_open and _should_open(child, name, listed_blocks, max_numel):
                yield from units_of_children(child, f"{name}.")
            else:
                yield name

    yield from units_of_children(model, "")


def _should_open(module: nn.Module, name: str, listed_blocks: Collection[str], max_numel: float) -> bool:
    """Return whether the children of a module become units instead of the module itself."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or any(
        block.startswith(f"{name}.") for block in listed_blocks
    ):
        return True
    is_torch_module = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    is_large = sum(p.numel() for p in module.parameters()) > max_numel
    has_children = next(module.children(), None) is not None
    return is_large and has_children and not (listed_blocks or is_torch_module or has_hooks)


def _is_block_call(model: nn.Module, step: Step, listed_blocks: Collection[str]) -> bool:
    """Return whether a step calls a listed block or, if none is listed, a module with parameters."""
    if not isinstance(step, ModuleCall):
        return False
    if listed_blocks:
        return step.module_name in listed_blocks
    return next(model.get_submodule(step.module_name).parameters(), None) is not None


def _called_blocks(model: nn.Module, graph: Graph, block_steps: Sequence[int]) -> list[Block]:
    """Return the module calls of these steps as blocks; a module that is called twice is two blocks."""
    blocks = []
    for index, step_index in enumerate(block_steps):
        call = graph.steps[step_index]
        assert isinstance(call, ModuleCall)
        blocks.append(Block(index=index, name=call.name, module=model.get_submodule(call.module_name)))
    return blocks


def _block_weights(
    blocks: Sequence[Block], time_modules: Callable[[Mapping[str, nn.Module]], Sequence[float]] | None
) -> list[float]:
    """Return the weight of each call: its module's number of parameters, or its measured seconds."""
    if time_modules is None:
        return [float(sum(p.numel() for p in block.module.parameters())) for block in blocks]
    modules: dict[str, nn.Module] = {}
    for block in blocks:
        modules.setdefault(block.name.partition("@")[0], block.module)
    seconds_of_module = dict(zip(modules, time_modules(modules), strict=True))
    return [seconds_of_module[block.name.partition("@")[0]] for block in blocks]


def _too_few_blocks(num_stages: int, blocks: Sequence[Block]) -> LayoutError:
    names = ", ".join(block.name for block in blocks[:3]) or "none"
    return LayoutError(
        f"{num_stages} stages, but the forward makes only {len(blocks)} module calls to divide among them "
        f"({names}{', ...' * (len(blocks) > 3)}).",
        cause="each stage needs a call of a block that place.blocks lists or, if it lists none, of a module with "
        "parameters; parameters used outside a module are not cut points",
        hint=f"a smaller pp or virtual: {len(blocks)} stages at most; or --layout fsdp",
    )
