"""Which stages hold a parameter, however the model was cut."""

from collections.abc import Sequence
from typing import Protocol


class Holds(Protocol):
    """What is known of every stage."""

    @property
    def index(self) -> int: ...

    @property
    def parameters(self) -> frozenset[str]: ...


def holding(name: str, parts: Sequence[Holds]) -> tuple[int, ...]:
    """The stages that hold a parameter, by its first name."""
    return tuple(part.index for part in parts if name in part.parameters)


def tied(parts: Sequence[Holds]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold, and which."""
    names = sorted({name for part in parts for name in part.parameters})
    return {name: held for name in names if len(held := holding(name, parts)) > 1}
