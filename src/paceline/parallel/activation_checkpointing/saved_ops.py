"""Selective checkpointing (`remat=selective`): the results of expensive operations are saved, not recomputed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError

KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
_SENT = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_together = threading.local()
Contexts = Callable[[], tuple[Any, Any]]


@contextmanager
def run_again_together() -> Iterator[None]:
    """Save no result of the operations inside this context, so that `remat=selective` recomputes all of them.

    In ring attention these results are blocks of attention scores, which must never be in memory all at once.
    """
    _together.depth = getattr(_together, "depth", 0) + 1
    try:
        yield
    finally:
        _together.depth -= 1


def checkpoint_contexts(names: Sequence[str]) -> Contexts:
    """Return a `context_fn` for `torch.utils.checkpoint` that saves the results of these operations.

    `names` are such as `mm`, `aten.mm` or `mylib.attention`; an empty list selects `SAVED_OPERATIONS` and collectives.
    Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.

    Raises:
        LayoutError: there is no such operation.
    """
    kept = {_operation(name) for name in names} if names else _own()

    def choose(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet = getattr(func, "overloadpacket", func)
        if not getattr(_together, "depth", 0) and packet in kept and not is_random_call(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(choose)


def is_random_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if this call draws random numbers; if the second run skipped it, later draws would differ."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    arguments = func._schema.arguments
    place = next((at for at, each in enumerate(arguments) if each.name == "dropout_p"), None)
    if place is None:
        return True
    rate = args[place] if place < len(args) else kwargs.get("dropout_p", arguments[place].default_value)
    return bool(rate)


def _own() -> set[Any]:
    found = {getattr(torch.ops.aten, name) for name in KEPT if hasattr(torch.ops.aten, name)}
    sent = torch.ops._c10d_functional
    return found | {getattr(sent, name) for name in _SENT if hasattr(sent, name)}


def _operation(name: str) -> Any:
    library, _, own = name.rpartition(".")
    found = getattr(getattr(torch.ops, library or "aten"), own, None) if own else None
    if found is None:
        raise LayoutError(
            f"remat=selective: torch has no operation {name!r}.",
            cause=did_you_mean(own, KEPT),
            hint="remat=selective:mm+addmm+bmm, or mylib.attention for a custom op",
        )
    return found
