"""Placeholders that hide gradients from the user's script. Reading a placeholder is an error.

They hide gradients that are not reduced yet, between backward and step. If each rank holds shards of the gradients,
they also hide the reduced gradients, before and after the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from paceline.errors import UsageError
from paceline.parallel.placement import ParallelizedModel
from paceline.parallel.sharding.row_shards import RowShard
from paceline.parallel.sharding.unit_guard import parameter_in_loss_error
from paceline.torch_internals.private_api import disabled_torch_function, is_in_backward, make_wrapper_tensor

_ALTERNATIVES = "placed.clip(1.0), placed.norm(), or placed.gradients(), whose tensors may be changed in place"


@dataclass(kw_only=True)
class ReplacedGradients:
    """The names of the parameters whose gradient the user has set to None, set to zero, or replaced."""

    set_to_none: list[str] = field(default_factory=list)
    set_to_zero: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


class GradientGuard:
    """The placeholders of one model: for its parameters and, if these differ, for the optimizers' shards.

    `is_sharded`: each rank holds shards of the gradients. Otherwise each rank holds full gradients after the reduction.
    `is_hidden` is True while the placeholders are in place of the gradients.
    """

    def __init__(self, parallelized: ParallelizedModel, *, is_sharded: bool) -> None:
        self._parameters = [
            _GuardedParameter(member.name, [_model_parameter(member), member.parameter], is_sharded=is_sharded)
            for member in parallelized.named_parameters
        ]
        self.is_hidden = False

    def hide(self, *, is_step_over: bool = False) -> None:
        """Replace the gradients by placeholders. After the step (`is_step_over`), they ignore what a backward adds."""
        if self.is_hidden:
            return
        for parameter in self._parameters:
            parameter.hide(is_step_over=is_step_over)
        self.is_hidden = True

    def show(self) -> ReplacedGradients:
        """Put the gradients back, and return what the user has done to the placeholders.

        Raises:
            UsageError: the user has replaced a gradient by another tensor.
        """
        replaced_gradients = ReplacedGradients()
        if not self.is_hidden:
            return replaced_gradients
        self.is_hidden = False
        for parameter in self._parameters:
            parameter.show(replaced_gradients)
        if replaced_gradients.replaced:
            raise UsageError(
                f"the gradient of {replaced_gradients.replaced[0]} was replaced between backward and step; the "
                "new tensor would be lost.",
                cause="parameter.grad = ..., before the gradients are reduced over the ranks",
                hint=f"placed.gradients()[{replaced_gradients.replaced[0]!r}].copy_(...)",
            )
        return replaced_gradients


class _GuardedParameter:
    """One parameter, and a placeholder for the gradient of each of its tensors.

    These tensors are the model's own parameter and the optimizer's shard, which are often the same tensor. Autograd
    writes the gradient to one of them. Under fsdp, it writes to the gathered parameter instead, and fsdp removes this
    gradient.
    """

    def __init__(self, name: str, tensors: Sequence[nn.Parameter], *, is_sharded: bool) -> None:
        self._name = name
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._placeholders = [_UnreducedGradient.from_parameter(tensor, name, is_sharded) for tensor in self._tensors]
        self._hidden_gradients: list[Tensor | None] = []

    def hide(self, *, is_step_over: bool) -> None:
        """Replace the gradients by placeholders."""
        self._hidden_gradients = [tensor.grad for tensor in self._tensors]
        for tensor, placeholder in zip(self._tensors, self._placeholders, strict=True):
            tensor.grad = None  # a gradient of another type can only be set after None
            tensor.grad = placeholder
            placeholder.is_step_over, placeholder.is_zeroed = is_step_over, False

    def show(self, replaced_gradients: ReplacedGradients) -> None:
        """Put the gradients back. Add the parameter's name to `replaced_gradients` if a placeholder was changed."""
        current_gradients = [tensor.grad for tensor in self._tensors]
        for tensor, hidden in zip(self._tensors, self._hidden_gradients, strict=True):
            tensor.grad = hidden
        self._hidden_gradients = []
        pairs = zip(current_gradients, self._placeholders, strict=True)
        if any(gradient is None for gradient in current_gradients):
            replaced_gradients.set_to_none.append(self._name)
        elif any(gradient is not placeholder for gradient, placeholder in pairs):
            replaced_gradients.replaced.append(self._name)
        elif any(placeholder.is_zeroed for placeholder in self._placeholders):
            replaced_gradients.set_to_zero.append(self._name)


class _UnreducedGradient(Tensor):
    """A placeholder for a gradient. Almost every operation on it raises an error.

    Zeroing does not: the placeholder records it. After the step, the placeholder ignores what a backward adds.
    """

    parameter_name: str
    is_sharded: bool
    is_step_over: bool
    is_zeroed: bool

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def from_parameter(parameter: Tensor, name: str, is_sharded: bool) -> "_UnreducedGradient":
        """Return the placeholder for the gradient of `parameter`."""
        placeholder: _UnreducedGradient = make_wrapper_tensor(_UnreducedGradient, like=parameter, shape=parameter.shape)
        placeholder.parameter_name, placeholder.is_sharded, placeholder.is_step_over, placeholder.is_zeroed = (
            name,
            is_sharded,
            False,
            False,
        )
        return placeholder

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Record zeroing, ignore what a backward adds after the step, and refuse every other operation."""
        del types, kwargs
        operation = func.overloadpacket.__name__
        values = [value for arg in args for value in (arg if isinstance(arg, list | tuple) else [arg])]
        placeholders = [value for value in values if isinstance(value, cls)]
        if operation in ("zero_", "_foreach_zero_"):
            for placeholder in placeholders:
                placeholder.is_zeroed = True
            return args[0] if operation == "zero_" else None
        if is_in_backward() and placeholders[0].is_step_over:
            return placeholders[0]
        raise placeholders[0]._refusal(operation)

    @override
    def tolist(self) -> Any:
        """Raise an error, as every read does."""
        raise self._refusal("tolist")

    @override
    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raise an error, as every read does."""
        raise self._refusal("numpy")

    @override
    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Return a short text, because debuggers ask for it."""
        return f"<the gradient of {self.parameter_name}: placed.gradients() has it>"

    def _refusal(self, operation: str) -> UsageError:
        if operation.startswith("_amp"):
            return UsageError(
                "pl.place does not support fp16 loss scaling.",
                cause="torch.amp.GradScaler, which inspects each rank's own gradients",
                hint="torch.autocast(..., dtype=torch.bfloat16) around forward and loss, without a scaler",
            )
        if is_in_backward():
            return UsageError(
                f"another backward reached {self.parameter_name} between placed.backward and the optimizer's step.",
                cause="loss.backward(), which does not reduce gradients over the ranks",
                hint="placed.backward(loss)",
            )
        if self.is_sharded:
            reason = "is stored in parts on the ranks, apart from the model's parameters"
        else:
            reason = "is not reduced yet: each rank has the gradient of its own samples"
        return UsageError(
            f"the gradient of {self.parameter_name} {reason}.",
            cause=f"{operation.strip('_')} on parameter.grad, as torch.nn.utils.clip_grad_norm_ does",
            hint=_ALTERNATIVES,
        )


def _model_parameter(member: Any) -> nn.Parameter:
    parameter: nn.Parameter = member.model_parameter if isinstance(member, RowShard) else member.parameter
    return parameter


class GradientLeaves:
    """The tensors to which backward writes gradients. The tensors of temporarily frozen layers are left out."""

    def __init__(self, parallelized: ParallelizedModel) -> None:
        self._pairs = [
            (leaf, _model_parameter(member))
            for member, leaf in zip(parallelized.named_parameters, parallelized.leaf_parameters, strict=True)
        ]
        self._dtensor_parameters = [
            (m.name, _model_parameter(m))
            for m in parallelized.named_parameters
            if isinstance(_model_parameter(m), DTensor)
        ]

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run backward into these tensors.

        Raises:
            LayoutError, UsageError: the loss uses a sharded (DTensor) parameter directly, or every parameter is frozen.
        """
        dtensors = [(name, parameter) for name, parameter in self._dtensor_parameters if parameter.requires_grad]
        if isinstance(loss, DTensor):
            raise parameter_in_loss_error(dtensors[0][0] if dtensors else "a parameter")
        leaves = [leaf for leaf, parameter in self._pairs if leaf.requires_grad and parameter.requires_grad]
        if not leaves:
            raise UsageError(
                "every parameter is frozen, so there is no gradient.", hint="parameter.requires_grad_(True)"
            )
        inputs = [*leaves, *(parameter for _, parameter in dtensors)]
        torch.autograd.backward(loss, retain_graph=retain_graph, inputs=inputs)
        for name, parameter in dtensors:
            if parameter.grad is not None:
                raise parameter_in_loss_error(name)
