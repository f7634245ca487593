"""Which stages hold a parameter, however the model was cut."""

from collections.abc import Sequence
from typing import Protocol


class StageParameters(Protocol):
    """What is known of every stage."""

    @property
    def index(self) -> int: ...

    @property
    def parameters(self) -> frozenset[str]: ...


def stages_of_parameters(name: str, parts: Sequence[StageParameters]) -> tuple[int, ...]:
    """The stages that hold a parameter, by its first name."""
    return tuple(part.index for part in parts if name in part.parameters)


def parameters_of_several_stages(parts: Sequence[StageParameters]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold, and which."""
    names = sorted({name for part in parts for name in part.parameters})
    return {name: held for name in names if len(held := stages_of_parameters(name, parts)) > 1}
