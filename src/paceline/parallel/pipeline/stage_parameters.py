"""Lookup of the stages that hold a parameter, for splits along a chain of blocks and along a graph."""

from collections.abc import Sequence
from typing import Protocol


class StageParameters(Protocol):
    """The parameters of a stage, in either kind of split."""

    @property
    def index(self) -> int: ...

    @property
    def parameters(self) -> frozenset[str]: ...


def stages_of_parameter(name: str, stages: Sequence[StageParameters]) -> tuple[int, ...]:
    """Return the indices of the stages that hold a parameter; `name` is its name in `named_parameters()`."""
    return tuple(stage.index for stage in stages if name in stage.parameters)


def parameters_of_several_stages(stages: Sequence[StageParameters]) -> dict[str, tuple[int, ...]]:
    """Return the names of the parameters that several stages hold, with the indices of these stages."""
    names = sorted({name for stage in stages for name in stage.parameters})
    return {name: indices for name in names if len(indices := stages_of_parameter(name, stages)) > 1}
