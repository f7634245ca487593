"""A decorator for backward functions that cannot be differentiated, with an error that names the user's line."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.errors import LayoutError, UserLine, current_user_line

Backward = Callable[..., Any]


class _NoDoubleBackward(torch.autograd.Function):
    """An identity function whose backward raises LayoutError."""

    @staticmethod
    @override
    def forward(ctx: Any, gradient: Tensor, line: UserLine | None) -> Tensor:
        ctx.line = line
        return gradient.view_as(gradient)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise LayoutError(
            "a second-order gradient goes through operations that are split over the tensor-parallel ranks.",
            where="" if ctx.line is None else str(ctx.line),
            cause="autograd.grad(..., create_graph=True), as in a gradient penalty; sums over ranks have only a first "
            "derivative",
            hint="--layout ddp or zero2; or --place.replicate NAME for each module that it goes through",
        )


def once_differentiable(backward: Backward) -> Backward:
    """Mark a backward as once differentiable: a double backward raises `LayoutError`.

    Unlike torch's `once_differentiable`, this also raises if the incoming gradient does not require gradients.
    """

    @wraps(backward)
    def checked_backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        line = current_user_line()
        gradient_tuple = gradients if isinstance(gradients, tuple) else (gradients,)
        results = tuple(
            _forbid_double_backward(g, line) if isinstance(g, Tensor) and g.is_floating_point() else g
            for g in gradient_tuple
        )
        return results if isinstance(gradients, tuple) else results[0]

    return checked_backward


def _forbid_double_backward(gradient: Tensor, line: UserLine | None) -> Tensor:
    result: Tensor = _NoDoubleBackward.apply(gradient.detach().requires_grad_(), line)  # type: ignore[no-untyped-call]
    return result
