"""Combination of loss terms into one number for backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.job import Job


def weighted_loss(terms: Mapping[str, tuple[Tensor, Any]], known: Mapping[str, float] | None) -> Tensor:
    """Return the loss for backward: the only sum, or the terms divided by their global counts, by 1 if a count is 0."""
    if known is None:
        (total, _), *rest = terms.values()
        if rest:
            raise ValueError("several terms without counts")
        return total
    parts = [value / (known[name] or 1.0) for name, (value, _) in terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def leaves_of(losses: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return the parameters that a backward of these losses would reach, each once."""
    open_nodes = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    seen, found = set(open_nodes), []
    while open_nodes:
        node = open_nodes.pop()
        leaf = getattr(node, "variable", None)  # only nodes that accumulate into a leaf's gradient have one
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        open_nodes += new
    return found


def known_counts(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """Return the global counts of these microbatches, if the job gives them before the forward."""
    if job.count is None:
        return None
    totals: dict[str, float] = {}
    for batch in data:
        found = job.count(batch)
        for name, value in (found if isinstance(found, Mapping) else {"loss": found}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def counts_of_part(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """Return the counts of one share or site; a count of 0 becomes 1, so that such a term adds nothing."""
    found = known_counts(job, data)
    return None if found is None else {name: count or 1.0 for name, count in found.items()}
