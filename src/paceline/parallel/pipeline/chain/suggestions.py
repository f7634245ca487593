"""Suggestions for a model that can't be split as requested: other bounds or blocks that work."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, pairwise

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace
from paceline.parallel.pipeline.stage_bounds import Bounds

_TRIES = 64


def suggest_split(
    model: nn.Module,
    *,
    flow: ForwardTrace,
    num_stages: int,
    cut: Callable[[ForwardTrace, Bounds], object],
    watch: Callable[[Sequence[str]], ForwardTrace],
) -> str:
    """Return command-line options with which `cut` succeeds, or "".

    The options list bounds for the traced blocks, or other blocks that `watch` traces, with bounds for these.
    """
    bounds = _first(flow, num_stages, cut)
    if bounds:
        return f"--place.stages {_counts(bounds)}"
    try:
        other = watch(list(_called(model, "")))
    except LayoutError:
        return ""
    bounds, names = _first(other, num_stages, cut), ",".join(block.name for block in other.blocks)
    return f"--place.blocks {names} --place.stages {_counts(bounds)}" if bounds else ""


def _first(flow: ForwardTrace, num_stages: int, cut: Callable[[ForwardTrace, Bounds], object]) -> Bounds | None:
    """Return the most even bounds for which `cut` succeeds, or None."""
    last = len(flow.blocks)
    found = [(0, *inner, last) for inner in islice(combinations(range(1, last), num_stages - 1), _TRIES)]
    for edges in sorted(found, key=lambda edges: max(stop - start for start, stop in pairwise(edges))):
        try:
            cut(flow, tuple(pairwise(edges)))
        except LayoutError:
            continue
        return tuple(pairwise(edges))
    return None


def _counts(bounds: Bounds) -> str:
    return ",".join(str(stop - start) for start, stop in bounds)


def _called(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the outermost submodules that hold parameters and can be called."""
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{key}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{key}"
