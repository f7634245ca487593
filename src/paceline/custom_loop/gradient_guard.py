"""Placeholders for gradients that are not reduced yet, between backward and step; reading one raises an error."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.parallel.placement import ParallelizedModel
from paceline.parallel.sharding.row_shards import RowShard
from paceline.parallel.sharding.unit_guard import parameter_in_loss_error
from paceline.torch_internals.private_api import disabled_torch_function, in_backward, make_wrapper_tensor

_INSTEAD = "placed.clip(1.0), placed.norm(), or placed.gradients(), whose tensors may be changed in place"


@dataclass(kw_only=True)
class ReplacedGradients:
    """The parameters whose gradient the user has dropped (`None`), set to zero, or replaced."""

    gone: list[str] = field(default_factory=list)
    zeroed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)


class GradientGuard:
    """The placeholders of one placed model: for its parameters and, if they differ, for the optimizers' shards.

    `is_sharded`: ranks hold shards of the gradients; otherwise they hold full gradients after the reduction.
    """

    def __init__(self, placed: ParallelizedModel, *, apart: bool) -> None:
        self._rows = [
            _Row(member.name, [_holder(member), member.parameter], apart=apart) for member in placed.named_parameters
        ]
        self.is_down = False

    def hide(self, *, is_over: bool = False) -> None:
        """Hide the gradients. `is_over`: the step is complete, so a gradient that is added now would be discarded."""
        if self.is_down:
            return
        for row in self._rows:
            row.hide(is_over=is_over)
        self.is_down = True

    def show(self) -> ReplacedGradients:
        """Show the gradients again.

        Raises:
            UsageError: another tensor has replaced a gradient.
        """
        found = ReplacedGradients()
        if not self.is_down:
            return found
        self.is_down = False
        for row in self._rows:
            row.show(found)
        if found.replaced:
            raise UsageError(
                f"the gradient of {found.replaced[0]} was replaced between backward and step; the "
                "new tensor would be lost.",
                cause="parameter.grad = ..., before the gradients are reduced over the ranks",
                hint=f"placed.gradients()[{found.replaced[0]!r}].copy_(...)",
            )
        return found


class _Row:
    """One parameter: the model's own tensor and the optimizer's shard, which may be the same tensor.

    Autograd writes to one of these tensors or, under fsdp, to the gathered parameter, whose gradient fsdp removes.
    """

    def __init__(self, name: str, tensors: Sequence[nn.Parameter], *, apart: bool) -> None:
        self._name = name
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._stand_ins = [_Unready.of(tensor, name, apart) for tensor in self._tensors]
        self._kept: list[Tensor | None] = []

    def hide(self, *, is_over: bool) -> None:
        self._kept = [tensor.grad for tensor in self._tensors]
        for tensor, stand_in in zip(self._tensors, self._stand_ins, strict=True):
            tensor.grad = None  # a gradient of another type can only be set after None
            tensor.grad = stand_in
            stand_in.is_over, stand_in.is_zeroed = is_over, False

    def show(self, found: ReplacedGradients) -> None:
        now = [tensor.grad for tensor in self._tensors]
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.grad = kept
        self._kept = []
        if any(one is None for one in now):
            found.gone.append(self._name)
        elif any(one is not known for one, known in zip(now, self._stand_ins, strict=True)):
            found.replaced.append(self._name)
        elif any(stand_in.is_zeroed for stand_in in self._stand_ins):
            found.zeroed.append(self._name)


class _Unready(Tensor):
    """A gradient that can't be read; it records zero_grad."""

    known_as: str
    apart: bool
    is_over: bool
    is_zeroed: bool

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(parameter: Tensor, name: str, apart: bool) -> "_Unready":
        """Return the placeholder for the gradient of `parameter`."""
        made: _Unready = make_wrapper_tensor(_Unready, like=parameter, shape=parameter.shape)
        made.known_as, made.apart, made.is_over, made.is_zeroed = name, apart, False, False
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Record zeroing, ignore additions after the step, and refuse every other operation."""
        del types, kwargs
        what = func.overloadpacket.__name__
        own = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(one, cls)]
        if what in ("zero_", "_foreach_zero_"):
            for one in own:
                one.is_zeroed = True
            return args[0] if what == "zero_" else None
        if in_backward() and own[0].is_over:
            return own[0]
        raise own[0]._refusal(what)

    def tolist(self) -> Any:
        """Raise an error, as every read does."""
        raise self._refusal("tolist")

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raise an error, as every read does."""
        raise self._refusal("numpy")

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Return a short text, because debuggers ask for it."""
        return f"<the gradient of {self.known_as}: placed.gradients() has it>"

    def _refusal(self, what: str) -> UsageError:
        if what.startswith("_amp"):
            return UsageError(
                "pl.place does not support fp16 loss scaling.",
                cause="torch.amp.GradScaler, which inspects each rank's own gradients",
                hint="torch.autocast(..., dtype=torch.bfloat16) around forward and loss, without a scaler",
            )
        if in_backward():
            return UsageError(
                f"another backward reached {self.known_as} between placed.backward and the optimizer's step.",
                cause="loss.backward(), which does not reduce gradients over the ranks",
                hint="placed.backward(loss)",
            )
        if self.apart:
            why = "is stored in parts on the ranks, apart from the model's parameters"
        else:
            why = "is not reduced yet: each rank has the gradient of its own samples"
        return UsageError(
            f"the gradient of {self.known_as} {why}.",
            cause=f"{what.strip('_')} on parameter.grad, as torch.nn.utils.clip_grad_norm_ does",
            hint=_INSTEAD,
        )


def _holder(member: Any) -> nn.Parameter:
    found: nn.Parameter = member.model_parameter if isinstance(member, RowShard) else member.parameter
    return found


class GradientLeaves:
    """The tensors that backward writes to; a layer that is temporarily frozen is left out."""

    def __init__(self, placed: ParallelizedModel) -> None:
        self._pairs = [
            (leaf, _holder(member))
            for member, leaf in zip(placed.named_parameters, placed.leaf_parameters, strict=True)
        ]
        self._rows = [(m.name, _holder(m)) for m in placed.named_parameters if isinstance(_holder(m), DTensor)]

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run backward into these tensors.

        Raises:
            LayoutError, UsageError: the loss uses a sharded (DTensor) parameter directly, or every parameter is frozen.
        """
        rows = [(name, holder) for name, holder in self._rows if holder.requires_grad]
        if isinstance(loss, DTensor):
            raise parameter_in_loss_error(rows[0][0] if rows else "a parameter")
        leaves = [leaf for leaf, holder in self._pairs if leaf.requires_grad and holder.requires_grad]
        if not leaves:
            raise UsageError(
                "every parameter is frozen, so there is no gradient.", hint="parameter.requires_grad_(True)"
            )
        torch.autograd.backward(loss, retain_graph=retain_graph, inputs=[*leaves, *(holder for _, holder in rows)])
        for name, holder in rows:
            if holder.grad is not None:
                raise parameter_in_loss_error(name)
