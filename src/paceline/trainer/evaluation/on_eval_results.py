"""The results of `on_eval`, made equal on every rank, because decisions depend on them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.comm.process_group import World
from paceline.errors import JobError
from paceline.torch_internals.scalars import as_number


def split_numbers_and_text(on_eval_result: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Split the result of `on_eval` into numbers by name, and all other values as text.

    Raises:
        JobError: the result is not a dict.
    """
    if on_eval_result is not None and not isinstance(on_eval_result, Mapping):
        raise JobError(
            f"on_eval= returned a {type(on_eval_result).__name__}, expected a dict of numbers or None.",
            hint='on_eval=lambda run: {"bleu": score}',
        )
    values = {str(name): value for name, value in (on_eval_result or {}).items()}
    converted = {name: as_number(value) for name, value in values.items()}
    numbers = {name: float(number) for name, number in converted.items() if number is not None}
    return numbers, {name: str(value) for name, value in values.items() if name not in numbers}


class SharedMetrics:
    """The metrics of all ranks, merged so that every rank has the same ones.

    Each metric has the value of the first rank that reports it. After `share`, `note` names the metrics that differ
    between ranks and were not named before.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._reported: set[str] = set()
        self.note = ""

    def share(self, local_metrics: Mapping[str, float]) -> dict[str, float]:
        """Return each metric as the first rank that has it reports it. Every rank must call this."""
        by_rank: Sequence[Mapping[str, float]] = self._world.gather_json(dict(local_metrics))
        shared: dict[str, float] = {}
        for rank_metrics in by_rank:
            shared = {**rank_metrics, **shared}
        differing = [
            name
            for name in shared
            if any(not _is_same_value(shared[name], rank_metrics.get(name, shared[name])) for rank_metrics in by_rank)
        ]
        unreported = [name for name in differing if name not in self._reported]
        self._reported |= set(unreported)
        self.note = "; ".join(_difference_note(name, by_rank) for name in unreported)
        return {name: shared[name] for name in sorted(shared, key=list({**local_metrics, **shared}).index)}


def _difference_note(name: str, by_rank: Sequence[Mapping[str, float]]) -> str:
    first_rank, value = next(
        (rank, rank_metrics[name]) for rank, rank_metrics in enumerate(by_rank) if name in rank_metrics
    )
    other_rank, differing = next(
        (r, rank_metrics[name])
        for r, rank_metrics in enumerate(by_rank)
        if not _is_same_value(value, rank_metrics.get(name, value))
    )
    return (
        f"{name} is {value:g} on rank {first_rank} and {differing:g} on rank {other_rank}: rank {first_rank}'s value "
        "is used (every rank calls on_eval and metrics, which should return the same value)"
    )


def _is_same_value(value: float, reference: float) -> bool:
    return value == reference or (math.isnan(value) and math.isnan(reference))
