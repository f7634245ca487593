"""Selective checkpointing (`remat=selective`): the results of expensive operations are saved, not recomputed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError

SAVED_OPERATIONS = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_grouped_mm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_recompute_state = threading.local()
Contexts = Callable[[], tuple[Any, Any]]


@contextmanager
def recompute_together() -> Iterator[None]:
    """Return a context in which `remat=selective` saves no results and so recomputes all operations.

    Ring attention needs it, because the saved results would be all blocks of attention scores, which do not fit in
    memory together.
    """
    _recompute_state.depth = getattr(_recompute_state, "depth", 0) + 1
    try:
        yield
    finally:
        _recompute_state.depth -= 1


def checkpoint_contexts(names: Sequence[str]) -> Contexts:
    """Return a `context_fn` for `torch.utils.checkpoint` that saves the results of these operations.

    Examples of names: `mm`, `aten.mm`, `mylib.attention`. An empty list selects `SAVED_OPERATIONS` and collectives.
    Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.

    Raises:
        LayoutError: there is no such operation.
    """
    saved = {_find_operation(name) for name in names} if names else _default_operations()

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet = getattr(func, "overloadpacket", func)
        if not getattr(_recompute_state, "depth", 0) and packet in saved and not is_random_call(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


def is_random_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if this call draws random numbers.

    The second run must repeat it, because otherwise later draws would differ.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    arguments = func._schema.arguments
    position = next((index for index, argument in enumerate(arguments) if argument.name == "dropout_p"), None)
    if position is None:
        return True
    rate = args[position] if position < len(args) else kwargs.get("dropout_p", arguments[position].default_value)
    return bool(rate)


def _default_operations() -> set[Any]:
    saved = {getattr(torch.ops.aten, name) for name in SAVED_OPERATIONS if hasattr(torch.ops.aten, name)}
    collectives = torch.ops._c10d_functional
    return saved | {getattr(collectives, name) for name in _COLLECTIVES if hasattr(collectives, name)}


def _find_operation(name: str) -> Any:
    library, _, operation = name.rpartition(".")
    packet = getattr(getattr(torch.ops, library or "aten"), operation, None) if operation else None
    if packet is None:
        raise LayoutError(
            f"remat=selective: torch has no operation {name!r}.",
            cause=did_you_mean(operation, SAVED_OPERATIONS),
            hint="remat=selective:mm+addmm+bmm, or mylib.attention for a custom op",
        )
    return packet
