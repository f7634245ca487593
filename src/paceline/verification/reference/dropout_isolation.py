"""Find a model's dropout rates, and disable dropout within a context."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from paceline.parallel.context_parallel.random_ops import NoAttentionDropout

_DROPOUT_FUNCTIONS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
)


class NoDropout(NoAttentionDropout):
    """A torch function mode in which dropout functions that a forward calls directly drop nothing."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the input of a dropout function unchanged."""
        if func in _DROPOUT_FUNCTIONS:
            return args[0] if args else (kwargs or {})["input"]
        return super().__torch_function__(func, types, args, kwargs)


def has_dropout(model: nn.Module) -> bool:
    """Return True if any module has a dropout rate above 0."""
    return any(value > 0.0 for module in model.modules() for _, value in dropout_rates(module))


def dropout_rates(module: nn.Module) -> list[tuple[str, float]]:
    """Return the names and values of a module's own dropout rates."""
    rates = [(name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    rate = getattr(module, "p", None)
    return [*rates, ("p", rate)] if isinstance(rate, float) and "drop" in type(module).__name__.lower() else rates


@contextmanager
def without_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Set every dropout rate to zero within the context."""
    saved_rates = [
        (module, name, value) for model in models for module in model.modules() for name, value in dropout_rates(module)
    ]
    for module, name, _ in saved_rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in saved_rates:
            setattr(module, name, value)
