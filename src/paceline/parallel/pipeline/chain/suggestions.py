"""Suggestions for a model that can't be split as requested: other bounds or blocks that work."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, pairwise

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace
from paceline.parallel.pipeline.stage_bounds import Bounds

_MAX_TRIES = 64


def suggest_split(
    model: nn.Module,
    *,
    trace: ForwardTrace,
    num_stages: int,
    try_split: Callable[[ForwardTrace, Bounds], object],
    trace_blocks: Callable[[Sequence[str]], ForwardTrace],
) -> str:
    """Return command-line options with which `try_split` succeeds, or "".

    The returned options contain bounds for the traced blocks. If no bounds work, they contain other blocks, which
    `trace_blocks` traces, and bounds for these blocks.
    """
    bounds = _find_bounds(trace, num_stages, try_split)
    if bounds:
        return f"--place.stages {_format_counts(bounds)}"
    try:
        other_trace = trace_blocks(list(_outermost_modules(model, "")))
    except LayoutError:
        return ""
    bounds = _find_bounds(other_trace, num_stages, try_split)
    names = ",".join(block.name for block in other_trace.blocks)
    return f"--place.blocks {names} --place.stages {_format_counts(bounds)}" if bounds else ""


def _find_bounds(
    trace: ForwardTrace, num_stages: int, try_split: Callable[[ForwardTrace, Bounds], object]
) -> Bounds | None:
    """Return bounds with which `try_split` succeeds, or None.

    The candidates are the first `_MAX_TRIES` of all possible bounds in lexicographic order. They are tried in the order
    of the size of their largest stage, smallest first.
    """
    num_blocks = len(trace.blocks)
    candidates = [
        (0, *inner, num_blocks) for inner in islice(combinations(range(1, num_blocks), num_stages - 1), _MAX_TRIES)
    ]
    for edges in sorted(candidates, key=lambda edges: max(stop - start for start, stop in pairwise(edges))):
        try:
            try_split(trace, tuple(pairwise(edges)))
        except LayoutError:
            continue
        return tuple(pairwise(edges))
    return None


def _format_counts(bounds: Bounds) -> str:
    return ",".join(str(stop - start) for start, stop in bounds)


def _outermost_modules(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the outermost submodules that hold parameters and can be called."""
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _outermost_modules(child, f"{prefix}{key}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{key}"
