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
from paceline.parallel.pipeline.graph.export import export
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall
from paceline.parallel.pipeline.graph.split import GraphStageSplit, cut_graph
from paceline.parallel.pipeline.stage_bounds import balanced_bounds, bounds_from_counts
from paceline.torch_internals.private_api import CallInterceptor
from paceline.torch_internals.rng import random_blocks

_FINE = 2
"""A module with more than 1/`_FINE` of a stage's parameters is opened, so that stages can be balanced."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """The split, the memoryless copy from which new shapes are exported, and whether the forward prints."""

    split: GraphStageSplit
    empty_model: nn.Module
    prints: bool = False


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
    on `device`, and `late` provides the memory. `blocks` names the modules between whose calls a stage may
    end, and `bounds` the number of their calls in each stage. Without `bounds`, the stages are balanced by the numbers
    of parameters, or by the `seconds` of each module.

    Raises:
        LayoutError: the forward can't be exported, has fewer calls than stages, or needs a value that can't be sent;
            the model is called twice; or the loss reads a value that the model does not return.
    """
    args, kwargs, modes = _first_call(model, call)
    empty_model = memoryless_copy(model, device=device)
    for name, module in empty_model.named_modules():
        module.training = modes[name]
    listed = [block.name for block in find_blocks(model, listed_names=blocks)] if blocks else []
    units = tuple(_units(model, num_stages, listed))
    see = partial(find_external_reads, model, units=units, call=call)
    taken = see() if deferred_model is None else deferred_model.run_without_values(see)
    graph = export(empty_model, args, kwargs, units=units)
    places = [place for place, step in enumerate(graph.steps) if _is_block(model, step, listed)]
    found = _blocks(model, graph, places)
    if num_stages > len(found):
        raise _too_few(num_stages, found)
    if bounds:
        chosen = bounds_from_counts(bounds, num_stages, len(found))
    else:
        chosen = balanced_bounds(num_stages, found, _weights(graph, places, found, time_modules))
    split = cut_graph(model, graph, units=units, blocks=places, bounds=chosen)
    *others, last = (part.modules for part in split.stages)
    refuse_external_reads(taken, last_stage_units=last.difference(*others))
    return GraphPlan(split=split, empty_model=empty_model, prints=graph.prints)


class _Seen(BaseException):
    """The signal that the model was called.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """


def _first_call(model: nn.Module, call: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, bool]]:
    """Return the arguments of the model's first call and each module's mode in it, without running the call."""
    found: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, bool]]] = []

    def gate(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs, {name: module.training for name, module in model.named_modules()}))
        raise _Seen

    with side_effect_free(model, parameters=False):
        seen = CallInterceptor(model, gate)
        try:
            call()
        except _Seen:
            return found[0]
        finally:
            seen.undo()
    raise JobError(
        "the forward ended without a call of the model, so there is nothing to cut into stages.",
        cause="a forward= that does not call the model, or calls a part of it",
        hint="forward=lambda model, batch: model(...)",
    )


def _units(model: nn.Module, num_stages: int, listed: Collection[str]) -> Iterator[str]:
    """Yield the units, which are the modules that a stage boundary never splits.

    Units are the outermost modules; a module is opened into its children if it is too large for balanced stages, or
    contains a listed block.
    """
    share = sum(p.numel() for p in model.parameters()) / (_FINE * num_stages)
    seen: set[int] = set()
    whole = {id(block) for block in random_blocks(model)}

    def inside(module: nn.Module, prefix: str) -> Iterator[str]:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if id(child) in seen:
                continue
            seen.add(id(child))
            if name not in listed and id(child) not in whole and _opens(child, name, listed, share):
                yield from inside(child, f"{name}.")
            else:
                yield name

    yield from inside(model, "")


def _opens(module: nn.Module, name: str, listed: Collection[str], share: float) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or any(other.startswith(f"{name}.") for other in listed):
        return True
    known = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    known = known or bool(module._forward_hooks or module._forward_pre_hooks)
    large = sum(p.numel() for p in module.parameters()) > share
    return large and not listed and not known and next(module.children(), None) is not None


def _is_block(model: nn.Module, step: object, listed: Collection[str]) -> bool:
    if not isinstance(step, ModuleCall):
        return False
    return step.module in listed if listed else any(True for _ in model.get_submodule(step.module).parameters())


def _blocks(model: nn.Module, graph: Graph, places: Sequence[int]) -> list[Block]:
    found = []
    for index, place in enumerate(places):
        call = graph.steps[place]
        assert isinstance(call, ModuleCall)
        found.append(Block(index=index, name=call.name, module=model.get_submodule(call.module)))
    return found


def _weights(
    graph: Graph,
    places: Sequence[int],
    blocks: Sequence[Block],
    seconds: Callable[[Mapping[str, nn.Module]], Sequence[float]] | None,
) -> list[float]:
    """Return the weight of each call: its module's number of parameters, or its measured seconds."""
    if seconds is None:
        return [float(sum(p.numel() for p in block.module.parameters())) for block in blocks]
    modules: dict[str, nn.Module] = {}
    for block in blocks:
        modules.setdefault(block.name.partition("@")[0], block.module)
    each = dict(zip(modules, seconds(modules), strict=True))
    return [each[block.name.partition("@")[0]] for block in blocks]


def _too_few(num_stages: int, blocks: Sequence[Block]) -> LayoutError:
    names = ", ".join(block.name for block in blocks[:3]) or "none"
    return LayoutError(
        f"{num_stages} stages, but the forward calls only {len(blocks)} modules that hold parameters "
        f"({names}{', ...' * (len(blocks) > 3)}).",
        cause="each stage needs its own module call; parameters used outside a module are not cut points",
        hint=f"a smaller pp or virtual: {len(blocks)} stages at most; or --layout fsdp",
    )
