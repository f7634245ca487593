"""A loss over the whole global batch in one process: each microbatch forward by itself, one loss over all."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.nested import leaves, rebuilt


def part_of(values: Sequence[Any], *, live: int) -> Any:
    """All microbatches' outputs (or batches) as one, of which autograd knows only one microbatch's."""
    columns = zip(*(leaves(value) for value in values), strict=True)
    return rebuilt(values[live], _columns(columns, live))


def _columns(columns: Any, live: int) -> Iterator[Tensor]:
    for tensors in columns:
        own = tensors[live]
        if own.dim():
            yield torch.cat([t if j == live else t.detach() for j, t in enumerate(tensors)])
        else:  # everybody's: each microbatch has its part of the gradient
            yield own.detach() + (own - own.detach()) / len(tensors) if own.requires_grad else own
