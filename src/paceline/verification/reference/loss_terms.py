"""Loss terms, as one number for backward."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.job import Job


def weighted_loss(terms: Mapping[str, tuple[Tensor, Any]], known: Mapping[str, float] | None) -> Tensor:
    """What backward runs on: the only sum, or the quotients with the joint counts; a term without targets as it is."""
    if known is None:
        (total, _), *rest = terms.values()
        if rest:
            raise ValueError("several terms without counts")
        return total
    parts = [value / (known[name] or 1.0) for name, (value, _) in terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def leaves_of(losses: Sequence[Tensor]) -> list[nn.Parameter]:
    """The parameters that a backward of these would reach, each once."""
    open_nodes = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    seen, found = set(open_nodes), []
    while open_nodes:
        node = open_nodes.pop()
        leaf = getattr(node, "variable", None)  # of the nodes that add to a leaf's gradient
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        open_nodes += new
    return found


def known_counts(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """The joint counts of these microbatches, where the job gives them before the forward."""
    if job.count is None:
        return None
    totals: dict[str, float] = {}
    for batch in data:
        found = job.count(batch)
        for name, value in (found if isinstance(found, Mapping) else {"loss": found}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def counts_of_part(job: Job, data: Sequence[Any]) -> dict[str, float] | None:
    """The same of one share or site, which may have nothing of a term: that term then gives nothing."""
    found = known_counts(job, data)
    return None if found is None else {name: count or 1.0 for name, count in found.items()}
