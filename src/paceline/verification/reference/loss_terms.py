"""Combine loss terms into one loss for backward, and sum the counts of their targets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.job import Job


def weighted_loss(terms: Mapping[str, tuple[Tensor, Any]], counts: Mapping[str, float] | None) -> Tensor:
    """Return the loss for backward: the sum of the terms, each divided by its global count (by 1 if that is 0).

    Without `counts` there must be only one term, which is not divided.
    """
    if counts is None:
        (total, _), *rest = terms.values()
        if rest:
            raise ValueError("several terms without counts")
        return total
    weighted_terms = [value / (counts[name] or 1.0) for name, (value, _) in terms.items()]
    return torch.stack(weighted_terms).sum() if len(weighted_terms) > 1 else weighted_terms[0]


def reachable_parameters(losses: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the parameters that a backward of these losses would reach, each once."""
    unvisited = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    visited, parameters = set(unvisited), []
    while unvisited:
        node = unvisited.pop()
        leaf = getattr(node, "variable", None)  # only nodes that accumulate into a leaf's gradient have one
        if isinstance(leaf, nn.Parameter):
            parameters.append(leaf)
        new_nodes = {next_node for next_node, _ in node.next_functions if next_node is not None} - visited
        visited |= new_nodes
        unvisited += new_nodes
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
    """Return the counts of one share or site, by loss term; 0 becomes 1, because a term is divided by its count."""
    counts = sum_target_counts(job, data)
    return None if counts is None else {name: count or 1.0 for name, count in counts.items()}
