"""Metrics of an evaluation that are equal on every rank, because decisions depend on them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.comm.process_group import World
from paceline.errors import JobError
from paceline.torch_internals.scalars import as_number


def numbers_and_text(found: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Split the result of `on_eval` into numbers by name, and all other values as text.

    Raises:
        JobError: the result is not a dict.
    """
    if found is not None and not isinstance(found, Mapping):
        raise JobError(
            f"on_eval= returned a {type(found).__name__}, expected a dict of numbers or None.",
            hint='on_eval=lambda run: {"bleu": score}',
        )
    given = {str(name): value for name, value in (found or {}).items()}
    known = {name: as_number(value) for name, value in given.items()}
    numbers = {name: float(number) for name, number in known.items() if number is not None}
    return numbers, {name: str(value) for name, value in given.items() if name not in numbers}


class SharedMetrics:
    """The first rank's metrics, shared with all ranks. `note` names each metric that differed on other ranks, once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: set[str] = set()
        self.note = ""

    def share(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return each metric as the first rank that has it reports it. Every rank must call this."""
        told: Sequence[Mapping[str, float]] = self._world.gather_json(dict(own))
        found: dict[str, float] = {}
        for said in told:
            found = {**said, **found}
        apart = [name for name in found if any(not _same(found[name], said.get(name, found[name])) for said in told)]
        new = [name for name in apart if name not in self._told]
        self._told |= set(new)
        self.note = "; ".join(_words(name, told) for name in new)
        return {name: found[name] for name in sorted(found, key=list({**own, **found}).index)}


def _words(name: str, told: Sequence[Mapping[str, float]]) -> str:
    first, value = next((rank, said[name]) for rank, said in enumerate(told) if name in said)
    other, differing = next((r, said[name]) for r, said in enumerate(told) if not _same(value, said.get(name, value)))
    return (
        f"{name} is {value:g} on rank {first} and {differing:g} on rank {other}: rank {first}'s is used "
        "(every rank calls on_eval and metrics, which should return the same value)"
    )


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
