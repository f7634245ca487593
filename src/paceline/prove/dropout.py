"""Dropout, wherever a model keeps its rates; and how to do without it for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def draws(model: nn.Module) -> bool:
    """Whether dropout is on anywhere in it."""
    return any(value > 0.0 for module in model.modules() for _, value in rates(module))


def rates(module: nn.Module) -> list[tuple[str, float]]:
    """The names and values of a module's own dropout rates."""
    found = [(name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    rate = getattr(module, "p", None)
    return [*found, ("p", rate)] if isinstance(rate, float) and "drop" in type(module).__name__.lower() else found


@contextmanager
def quiet(models: Sequence[nn.Module]) -> Iterator[None]:
    """Every dropout rate at zero for a while."""
    kept = [(module, name, value) for model in models for module in model.modules() for name, value in rates(module)]
    for module, name, _ in kept:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
