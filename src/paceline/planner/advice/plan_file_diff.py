"""Describe how two plan.json files differ: in their inputs, and in the layouts that they recommend."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.planner.advice.layout_diff import layout_differences
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.search.evaluate_named_layout import cost_model_from_json, estimate_from_row, find_row


def diff_plan_files(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on what changed between the JSON of two plans.

    Raises:
        UsageError: a plan recommends no layout, or does not state its model and cluster.
    """
    cost_model_before, cost_model_after = cost_model_from_json(before), cost_model_from_json(after)
    for name, text_before, text_after in zip(
        _INPUT_NAMES, _input_texts(cost_model_before), _input_texts(cost_model_after), strict=True
    ):
        if text_before != text_after:
            yield f"{name}: {text_before} -> {text_after}"
    estimates = [
        estimate_from_row(cost_model, find_row(plan))
        for cost_model, plan in ((cost_model_before, before), (cost_model_after, after))
    ]
    yield from layout_differences(*estimates)


_INPUT_NAMES = ("cluster", "parameters", "length", "global batch", "precision")


def _input_texts(cost_model: CostModel) -> tuple[str, ...]:
    profile = cost_model.profile
    numbers = (profile.parameters, profile.length, profile.global_batch_size)
    return (str(cost_model.cluster), *(f"{number:,}" for number in numbers), profile.precision)
