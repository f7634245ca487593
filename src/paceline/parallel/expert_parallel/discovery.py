"""Discovery of the modules of a model that hold experts, and assignment of experts to ranks.

A module can be sharded if its forward is `(tokens, expert_index, expert_weight) -> tokens`. `tokens` has the shape
(tokens, width). `expert_index` and `expert_weight`, of shape (tokens, choices), are the experts chosen for each token
and their weights. The experts modules of transformers have this interface. The experts are either stacked along the
first dimension of the module's parameters, or are the modules of an `nn.ModuleList`.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise

from torch import nn

from paceline.errors import LayoutError

_INDEX_WORDS, _WEIGHT_WORDS = ("index", "indices", "expert"), ("weight", "score", "prob", "gate")


@dataclass(frozen=True, kw_only=True)
class ExpertsModule:
    """A module with `num_experts` experts.

    `stacked_parameters` are the names of the parameters with one row per expert, if the experts are stacked.
    `list_name` is the name of the `nn.ModuleList`, if the experts are modules.
    """

    name: str
    module: nn.Module
    num_experts: int
    stacked_parameters: tuple[str, ...] = ()
    list_name: str | None = None


def expert_ranges(num_experts: int, *, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return each rank's range of experts `[start, stop)`, of nearly equal sizes; with few experts, some are empty."""
    min_size, remainder = divmod(num_experts, ranks)
    starts = [rank * min_size + min(rank, remainder) for rank in range(ranks + 1)]
    return tuple(pairwise(starts))


def find_experts(model: nn.Module, *, pattern: str | None = None) -> list[ExpertsModule]:
    """Return the modules of a model that hold experts.

    They are the modules with a routed forward (see `has_routed_forward`). With a `pattern`, such as "*.mlp.experts",
    they are the modules whose names match the pattern; these must have a routed forward too.

    Raises:
        LayoutError: no module is found, or a module with experts cannot be sharded; the message names this module.
    """
    experts_modules: list[ExpertsModule] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{other.name}.") for other in experts_modules)
        is_match = fnmatch(name, pattern) if pattern is not None else has_routed_forward(module)
        if name and is_match and not is_nested:
            experts_modules.append(_describe_experts(name, module))
    if not experts_modules:
        raise _no_experts_found_error(model, pattern)
    for name, module in _expert_lists(model) if pattern is None else ():
        if not _is_covered(name, module, experts_modules):
            raise _unsupported_interface_error(name, module)
    return experts_modules


def has_routed_forward(module: nn.Module) -> bool:
    """Return whether the forward is `(tokens, expert_index, expert_weight)`, according to its parameter names."""
    names = [p.name.lower() for p in inspect.signature(module.forward).parameters.values() if p.kind < p.KEYWORD_ONLY]
    return (
        len(names) == 3
        and any(word in names[1] for word in _INDEX_WORDS)
        and any(word in names[2] for word in _WEIGHT_WORDS)
        and bool(list(module.parameters()))
    )


def _describe_experts(name: str, module: nn.Module) -> ExpertsModule:
    """Return how a module stores its experts; raise LayoutError if it cannot be sharded."""
    own_parameters = dict(module.named_parameters(recurse=False))
    lists = [(n, m) for n, m in module.named_children() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not has_routed_forward(module):
        raise _unsupported_interface_error(name, module)
    if len(lists) == 1 and not own_parameters:
        return ExpertsModule(name=name, module=module, num_experts=len(lists[0][1]), list_name=lists[0][0])
    sizes = {parameter.shape[0] for parameter in own_parameters.values() if parameter.dim()}
    nested_parameters = [n for n, _ in module.named_parameters() if n not in own_parameters]
    if len(sizes) != 1 or nested_parameters or not own_parameters:
        shapes = ", ".join(f"{n} {tuple(p.shape)}" for n, p in module.named_parameters())
        raise LayoutError(
            f"{name} ({type(module).__name__}) can't be split into experts: {shapes}.",
            cause="experts are one nn.ModuleList, or tensors with the same first dimension",
            hint="move shared parameters out of this module, or leave ep out",
        )
    return ExpertsModule(name=name, module=module, num_experts=sizes.pop(), stacked_parameters=tuple(own_parameters))


def _expert_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the full name and the list of each `nn.ModuleList` with several modules and "expert" in its own name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and "expert" in name.rsplit(".", 1)[-1].lower():
            yield name, module


def _is_covered(name: str, module: nn.Module, experts_modules: Sequence[ExpertsModule]) -> bool:
    """Return whether a module is one of the experts modules, or is inside one."""
    return any(name.startswith(f"{experts.name}.") or experts.module is module for experts in experts_modules)


def _unsupported_interface_error(name: str, module: nn.Module) -> LayoutError:
    return LayoutError(
        f"{name} ({type(module).__name__}) holds experts that are called one by one with their tokens.",
        cause="the routing of all tokens must be known before any expert runs, or ranks would wait for each other",
        hint="a module of its own around them: forward(self, tokens, expert_index, expert_weight) -> tokens, of shapes "
        "(n, width), (n, choices), (n, choices); or leave ep out",
    )


def _no_experts_found_error(model: nn.Module, pattern: str | None) -> LayoutError:
    lists = [name for name, _ in _expert_lists(model)]
    if lists and pattern is None:
        return _unsupported_interface_error(lists[0], model.get_submodule(lists[0]))
    return LayoutError(
        f"{type(model).__name__} has no module {pattern!r}."
        if pattern
        else f"{type(model).__name__} has no experts to split.",
        cause="only a module whose forward is (tokens, expert_index, expert_weight) can be split",
        hint="leave ep out, or --layout dp_replicate=2",
    )
