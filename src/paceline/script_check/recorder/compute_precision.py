"""The coarsest type in which a model computes: that of its weights, or of autocast, also where it begins inside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.script_check.recorder.live_modules import is_compiled
from paceline.script_check.recorder.tensor_print import rounding_of

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class ComputePrecision:
    """The largest machine epsilon of all models that were observed."""

    def __init__(self, *, guard: Guard) -> None:
        self._guard = guard
        self._modules: set[int] = set()
        self.eps = 0.0

    def observe(self, module: nn.Module) -> None:
        """Look at a module that is about to run: once at its weights, and into its first forward."""
        self._look_at_autocast()
        if id(module) in self._modules:
            return
        self._modules.add(id(module))
        self.eps = max([self.eps, *(rounding_of(p.dtype) for p in module.parameters())])
        leaf = next((each for each in module.modules() if each._parameters and not each._modules), None)
        if leaf is None or is_compiled(module):
            return
        handles: list[RemovableHandle] = []

        def look(*_: object) -> None:
            handles.pop().remove()
            self._look_at_autocast()

        handles.append(leaf.register_forward_hook(self._guard(look)))

    def _look_at_autocast(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(kind):
                self.eps = max(self.eps, rounding_of(torch.get_autocast_dtype(kind)))
