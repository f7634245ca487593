"""The versions of a stage's weights, one per update, that microbatches in flight still need.

A version is a set of leaf tensors that replace the parameters while a forward or a backward runs. The autograd graph of
a forward references these tensors. So nothing must be restored for the backward, and a version is freed with the last
graph that references it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from paceline.errors import JobError
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.torch_internals.private_api import tensor_version

Weights = Mapping[str, Tensor]
"""The tensors of one version of the weights, by parameter name."""


class WeightVersions:
    """The stored weight versions of a stage. A version's number is the number of updates before it.

    `is_direct`: each microbatch uses the newest weights and finishes before the next one starts, so no version is
    stored. `newest` is the version of the parameters themselves.
    """

    def __init__(self, model: nn.Module, *, named_parameters: Sequence[NamedParameter], is_direct: bool) -> None:
        self._call_wrapper = _CallWrapper(model)
        self._parameters = {member.name: member.parameter for member in named_parameters}
        self._is_direct = is_direct
        self._versions: dict[int, Weights] = {}
        self._gradients_before_backward: dict[str, Tensor | None] = {}
        self._oldest = 0
        self.newest = 0

    @property
    def names(self) -> list[str]:
        """The names of this stage's parameters."""
        return list(self._parameters)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the versions that `get` accepts; autograd graphs may reference older versions."""
        return {self.newest, *self._versions}

    def available_version(self, number: int) -> int:
        """Return `number`, or the oldest version that was loaded from a checkpoint if `number` is older than that."""
        return max(number, self._oldest)

    def get(self, number: int) -> Weights | None:
        """Return the weights after `number` updates; None stands for the parameters themselves."""
        if self._is_direct:
            assert number == self.newest
            return None
        if number == self.newest:
            self._store_newest()
        return self._versions[number]

    def run_with(self, weights: Weights | None, call: Callable[[], Any]) -> Any:
        """Call `call` with these weights in place of the parameters, and return its result."""
        if weights is None:
            return call()
        return functional_call(
            self._call_wrapper, {f"model.{name}": tensor for name, tensor in weights.items()}, (call,)
        )

    def version_counters(self, weights: Weights | None) -> list[int]:
        """Return the autograd version counters of these weights, which change at each in-place write."""
        return [tensor_version(tensor) for tensor in (self._parameters if weights is None else weights).values()]

    def prepare_backward(self, weights: Weights | None) -> None:
        """Prepare a backward on these weights: their gradients accumulate into the parameters' `.grad`."""
        for name, tensor in (weights or {}).items():
            tensor.grad = self._parameters[name].grad
            self._gradients_before_backward[name] = tensor.grad

    def collect_gradients(self, weights: Weights | None) -> None:
        """Move the gradients of these weights to the parameters, after the backward.

        Raises:
            JobError: the backward changed a parameter's own gradient, so the forward did not use the given weights.
        """
        for name, tensor in (weights or {}).items():
            parameter = self._parameters[name]
            if parameter.grad is not self._gradients_before_backward.pop(name):
                raise JobError(
                    f"the forward does not use {name} through the attribute of its module, so it can't be "
                    "given another weight version.",
                    cause="the parameter is stored in a list, a closure or a second Python attribute",
                    hint="self.weight of its own module in forward, or --update sync",
                )
            parameter.grad, tensor.grad = tensor.grad, None

    def before_update(self, *, needed: int) -> None:
        """Store the current version before the parameters change. `needed` is the oldest version still needed."""
        if not self._is_direct and needed <= self.newest:
            self._store_newest()

    def after_update(self, *, needed: int) -> None:
        """Increment `newest` and drop the versions before `needed`."""
        self.newest += 1
        self._drop_before(needed)

    def saved_state(self) -> dict[int, dict[str, Tensor]]:
        """Return the older versions, by number, for a checkpoint between two steps."""
        return {
            number: {name: tensor.detach() for name, tensor in weights.items()}
            for number, weights in sorted(self._versions.items())
            if number < self.newest
        }

    def resume(self, *, newest: int, older_weights: Mapping[int, Weights]) -> None:
        """Resume after `newest` updates with these older versions."""
        self.newest = newest
        self._versions = {
            number: _clone_as_parameters(self._to_device(weights)) for number, weights in older_weights.items()
        }
        self._oldest = min([newest, *older_weights])

    def _to_device(self, weights: Weights) -> Weights:
        return {name: tensor.to(self._parameters[name].device) for name, tensor in weights.items()}

    def _store_newest(self) -> None:
        if self.newest not in self._versions:
            self._versions[self.newest] = _clone_as_parameters(self._parameters)

    def _drop_before(self, needed: int) -> None:
        self._versions = {number: weights for number, weights in self._versions.items() if number >= needed}


class _CallWrapper(nn.Module):
    """A wrapper module whose call runs any function, so that `functional_call` can replace the model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def _clone_as_parameters(weights: Weights) -> Weights:
    with torch.no_grad():
        return {name: nn.Parameter(tensor.detach().clone()) for name, tensor in weights.items()}
