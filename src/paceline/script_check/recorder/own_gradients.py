"""The gradients that a rank computes itself, before any reduction: hooks on the parameters see them in the backward.

A hook on a leaf tensor runs before the gradient is accumulated, and before DistributedDataParallel reduces it. With
FSDP2, the leaves of the backward are the whole parameters that exist during the forward; each module has them when its
own forward begins. With FSDP1, the leaves are flat parameters, which are whole during the backward.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.script_check.recorder.live_modules import is_compiled
from paceline.script_check.recorder.source_lines import calling_line
from paceline.script_check.recorder.tensor_print import has_only_zeros, project_tensor, rounding_of
from paceline.torch_internals.flat_parameters import FlatParameterParts, find_flat_parameters

_ELSEWHERE = ("main_grad", "_hp_mapping")
"""Attributes of parameters whose gradients are added up elsewhere after each pass, in Megatron-LM and DeepSpeed."""
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class OwnGradients:
    """The projections of this rank's own gradients for each backward pass since a step.

    The key of a parameter is its id, or `flat_key` for an original parameter of FSDP1.
    """

    def __init__(self, *, guard: Guard) -> None:
        self._guard = guard
        self._passes: dict[Hashable, list[tuple[float, ...]]] = {}
        self._discarded: dict[Hashable, int] = {}
        self._hooked: dict[int, Any] = {}  # the tensors, so that their ids stay theirs
        self._lines: dict[Hashable, str] = {}
        self._modules: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self.unreadable: set[str] = set()
        """Reasons for which gradients could not be read."""
        self.eps = 0.0
        self.is_active = True
        """False during steps that are not recorded."""

    def observe(self, module: nn.Module) -> None:
        """Hook the parameters of a module that is about to run."""
        if id(module) in self._modules and all(id(p) in self._hooked for p in module.parameters() if p.requires_grad):
            return
        self._modules.add(id(module))
        for parts in find_flat_parameters(module):
            self._observe_flat(parts)
        sharded = {id(p) for p in module.parameters() if hasattr(p, "placements")}
        for p in module.parameters():
            if p.requires_grad and id(p) not in self._hooked and id(p) not in sharded:
                self._hook(p, partial(self._record, p, p))
        if sharded and not is_compiled(module):
            for each in module.modules():
                owners = {name: p for name, p in each._parameters.items() if p is not None and id(p) in sharded}
                if owners:
                    observe = self._guard(partial(self._observe_whole, owners))
                    self._handles.append(each.register_forward_pre_hook(observe))
                    self._hooked |= {id(p): p for p in owners.values()}

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def seen_parameters(self) -> list[Tensor]:
        """Return the parameters that have an own gradient since the last step."""
        return [tensor for key, tensor in self._hooked.items() if key in self._passes]

    def take(self, key: Hashable) -> tuple[tuple[float, ...], ...]:
        """Return the projections for one parameter, and forget them."""
        return tuple(self._passes.pop(key, ()))

    def take_line(self, keys: Iterable[Hashable]) -> str:
        """Return the user's line that called the first backward pass of some parameters, and forget it."""
        lines = [self._lines.pop(key, "") for key in keys]
        return next(filter(None, lines), "")

    def take_discarded(self) -> int:
        """Return how many backward passes since the last step were set to zero, and forget it."""
        count = max(self._discarded.values(), default=0)
        self._discarded.clear()
        return count

    def _observe_flat(self, parts: FlatParameterParts) -> None:
        """Hook a flat parameter of FSDP1; its original parameters, which no backward reaches, need no hook."""
        flat = parts.parameter
        if id(flat) in self._hooked or not flat.requires_grad:
            return
        self._hook(flat, partial(self._record_flat, parts))
        self._hooked |= {id(each.original): each.original for each in parts.pieces if each.original is not None}

    def _observe_whole(self, owners: dict[str, Any], module: nn.Module, _: Any) -> None:
        """Hook the whole parameters that FSDP2 has put into a module."""
        if not torch.is_grad_enabled():
            return
        for name, owner in owners.items():
            whole = module._parameters.get(name)
            is_whole = isinstance(whole, Tensor) and whole.requires_grad and not hasattr(whole, "placements")
            if whole is not None and is_whole and id(whole) not in self._hooked:
                self._hook(whole, partial(self._record, whole, owner))

    def _hook(self, tensor: Tensor, record: Callable[..., None]) -> None:
        self._hooked[id(tensor)] = tensor
        self._handles.append(tensor.register_hook(self._guard(record)))

    def _record(self, tensor: Tensor, owner: Any, gradient: Tensor | None) -> None:
        if gradient is None or not self.is_active:  # None: of a function that gives a parameter no gradient
            return
        passes = self._passes.setdefault(id(owner), [])
        is_elsewhere = any(hasattr(owner, name) for name in _ELSEWHERE)
        if passes and tensor is owner and not is_elsewhere and (owner.grad is None or has_only_zeros(owner.grad)):
            self._discarded[id(owner)] = self._discarded.get(id(owner), 0) + len(passes)
            self._lines.pop(id(owner), None)
            passes.clear()
        self._add(id(owner), gradient)

    def _record_flat(self, parts: FlatParameterParts, gradient: Tensor | None) -> None:
        if gradient is None or not self.is_active:
            return
        whole = gradient.reshape(-1)
        for number, piece in enumerate(parts.pieces):
            self._add(flat_key(parts.parameter, number), whole[piece.offset : piece.offset + piece.numel])

    def _add(self, key: Hashable, gradient: Tensor) -> None:
        try:
            self._passes.setdefault(key, []).append(project_tensor(gradient))
        except Exception as error:  # a tensor of a kind that can't be read
            self._passes.pop(key, None)
            self.unreadable.add(f"own gradients: {type(error).__name__}: {error}")
            return
        self.eps = max(self.eps, rounding_of(gradient.dtype))
        if not self._lines.get(key):
            self._lines[key] = calling_line()


def flat_key(parameter: Tensor, number: int) -> Hashable:
    """Return the key of the original parameter `number` of a flat parameter."""
    return id(parameter), number
