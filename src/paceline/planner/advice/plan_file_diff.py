"""Comparison of two plan.json files: their inputs, and the layouts that they recommend."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.planner.advice.layout_diff import layout_differences
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.search.evaluate_named_layout import estimate_told, forecast_of, row_named


def diff_plan_files(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words what changed from one to the other.

    Raises:
        UsageError: one plan recommends nothing, or does not state its model and cluster.
    """
    first, second = forecast_of(before), forecast_of(after)
    for name, one, other in zip(_NAMES, _of(first), _of(second), strict=True):
        if one != other:
            yield f"{name}: {one} -> {other}"
    rows = [estimate_told(made, row_named(told)) for made, told in ((first, before), (second, after))]
    yield from layout_differences(*rows)


_NAMES = ("cluster", "parameters", "length", "global batch", "precision")


def _of(forecast: CostModel) -> tuple[str, ...]:
    facts = forecast.facts
    numbers = (facts.parameters, facts.length, facts.global_batch_size)
    return (str(forecast.fleet), *(f"{number:,}" for number in numbers), facts.precision)
