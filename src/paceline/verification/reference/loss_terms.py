"""Combination of loss terms into one number for backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.job import Job


def weighted_loss(terms: Mapping[str, tuple[Tensor, Any]], counts: Mapping[str, float] | None) -> Tensor:
    """Return the loss for backward: the only sum, or the terms divided by their global counts, by 1 if a count is 0."""
    if counts is None:
        (total, _), *rest = terms.values()
        if rest:
            raise ValueError("several terms without counts")
        return total
    parts = [value / (counts[name] or 1.0) for name, (value, _) in terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def reachable_parameters(losses: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the parameters that a backward of these losses would reach, each once."""
    open_nodes = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    visited, parameters = set(open_nodes), []
    while open_nodes:
        node = open_nodes.pop()
        leaf = getattr(node, "variable", None)  # only nodes that accumulate into a leaf's gradient have one
        if isinstance(leaf, nn.Parameter):
            parameters.append(leaf)
        new = {other for other, _ in node.next_functions if other is not None} - visited
        visited |= new
        open_nodes += new
    return parameters


def sum_target_counts(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """Return the global counts of these microbatches, if the job gives them before the forward."""
    if job.count is None:
        return None
    totals: dict[str, float] = {}
    for batch in data:
        counts = job.count(batch)
        for name, value in (counts if isinstance(counts, Mapping) else {"loss": counts}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def nonzero_counts(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """Return the counts of one share or site; a count of 0 becomes 1, so that such a term adds nothing."""
    counts = sum_target_counts(job, data)
    return None if counts is None else {name: count or 1.0 for name, count in counts.items()}
