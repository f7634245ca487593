"""Lookup of the stages that hold a parameter, for both ways of cutting a model."""

from collections.abc import Sequence
from typing import Protocol


class StageParameters(Protocol):
    """The data that every kind of stage has."""

    @property
    def index(self) -> int: ...

    @property
    def parameters(self) -> frozenset[str]: ...


def stages_of_parameters(name: str, parts: Sequence[StageParameters]) -> tuple[int, ...]:
    """Return the stages that hold a parameter, given by its first name."""
    return tuple(part.index for part in parts if name in part.parameters)


def parameters_of_several_stages(parts: Sequence[StageParameters]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages hold, with these stages."""
    names = sorted({name for part in parts for name in part.parameters})
    return {name: held for name in names if len(held := stages_of_parameters(name, parts)) > 1}
