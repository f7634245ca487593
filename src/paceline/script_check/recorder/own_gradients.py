"""The gradients that a rank computes itself, before any reduction: hooks on the parameters see them in the backward.

A hook on a leaf tensor runs before the gradient is accumulated, and before DistributedDataParallel reduces it. With
FSDP2, the leaves of the backward are the whole parameters that exist during the forward; each module has them when its
own forward begins.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.script_check.recorder.live_modules import is_compiled
from paceline.script_check.recorder.source_lines import calling_line
from paceline.script_check.recorder.tensor_print import project_tensor, rounding_of

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class OwnGradients:
    """The projections of this rank's own gradients by the id of the parameter, for each backward pass since a step."""

    def __init__(self, *, guard: Guard) -> None:
        self._guard = guard
        self._passes: dict[int, list[tuple[float, ...]]] = {}
        self._discarded: dict[int, int] = {}
        self._hooked: dict[int, Any] = {}  # the tensors, so that their ids stay theirs
        self._lines: dict[int, str] = {}
        self._modules: set[int] = set()
        self.eps = 0.0
        self.is_active = True
        """False during steps that are not recorded."""

    def observe(self, module: nn.Module) -> None:
        """Hook the parameters of a module that is about to run."""
        if id(module) in self._modules and all(id(p) in self._hooked for p in module.parameters() if p.requires_grad):
            return
        self._modules.add(id(module))
        sharded = {id(p) for p in module.parameters() if hasattr(p, "placements")}
        for p in module.parameters():
            if p.requires_grad and id(p) not in self._hooked and id(p) not in sharded:
                self._hook(p, owner=p)
        if sharded and not is_compiled(module):
            for each in module.modules():
                owners = {name: p for name, p in each._parameters.items() if p is not None and id(p) in sharded}
                if owners:
                    each.register_forward_pre_hook(self._guard(partial(self._observe_whole, owners)))
                    self._hooked |= {id(p): p for p in owners.values()}

    def take(self, parameter: Tensor) -> tuple[tuple[float, ...], ...]:
        """Return the projections for one parameter, and forget them."""
        return tuple(self._passes.pop(id(parameter), ()))

    def take_line(self, parameters: Iterable[Tensor]) -> str:
        """Return the user's line that called the first backward pass of some parameters, and forget it."""
        lines = [self._lines.pop(id(p), "") for p in parameters]
        return next(filter(None, lines), "")

    def take_discarded(self) -> int:
        """Return how many backward passes since the last step were set to zero, and forget it."""
        count = max(self._discarded.values(), default=0)
        self._discarded.clear()
        return count

    def _observe_whole(self, owners: dict[str, Any], module: nn.Module, _: Any) -> None:
        """Hook the whole parameters that FSDP2 has put into a module."""
        if not torch.is_grad_enabled():
            return
        for name, owner in owners.items():
            whole = module._parameters.get(name)
            is_whole = isinstance(whole, Tensor) and whole.requires_grad and not hasattr(whole, "placements")
            if whole is not None and is_whole and id(whole) not in self._hooked:
                self._hook(whole, owner=owner)

    def _hook(self, tensor: Tensor, *, owner: Any) -> None:
        self._hooked[id(tensor)] = tensor
        tensor.register_hook(self._guard(partial(self._record, tensor, owner)))

    def _record(self, tensor: Tensor, owner: Any, gradient: Tensor | None) -> None:
        if gradient is None:  # of a function that gives a parameter no gradient
            return
        if not self.is_active:
            return
        passes = self._passes.setdefault(id(owner), [])
        if passes and tensor is owner and (owner.grad is None or not owner.grad.any()):
            self._discarded[id(owner)] = self._discarded.get(id(owner), 0) + len(passes)
            self._lines.pop(id(owner), None)
            passes.clear()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        passes.append(project_tensor(gradient))
        self.eps = max(self.eps, rounding_of(gradient.dtype))
        if not self._lines.get(id(owner)):
            self._lines[id(owner)] = calling_line()
