"""A decorator for backward passes without a second derivative, which raises our own error when one is needed."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from paceline.errors import LayoutError, UserLine, line_now

Backward = Callable[..., Any]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, line: UserLine | None) -> Tensor:
        ctx.line = line
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise LayoutError(
            "a second-order gradient goes through operations that are split over the tensor-parallel ranks.",
            where="" if ctx.line is None else str(ctx.line),
            cause="autograd.grad(..., create_graph=True), as in a gradient penalty; sums over ranks have only a first "
            "derivative",
            hint="--layout ddp or zero2; or --place.replicate NAME for each module that it goes through",
        )


def once(backward: Backward) -> Backward:
    """Mark a backward as once differentiable, and raise on any double backward.

    Unlike torch's `once_differentiable`, this also raises if the gradient depends only on the forward's values.
    """

    @wraps(backward)
    def found(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            given = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return given
        line = line_now()
        many = given if isinstance(given, tuple) else (given,)
        marked = tuple(_marked(g, line) if isinstance(g, Tensor) and g.is_floating_point() else g for g in many)
        return marked if isinstance(given, tuple) else marked[0]

    return found


def _marked(gradient: Tensor, line: UserLine | None) -> Tensor:
    marked: Tensor = _Refused.apply(gradient.detach().requires_grad_(), line)  # type: ignore[no-untyped-call]
    return marked
