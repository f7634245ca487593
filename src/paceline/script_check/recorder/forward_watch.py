"""The forward passes of the outermost module of a foreign script.

A global hook sees them. It is removed while the module runs, so that `torch.compile` sees no global hook, and a hook on
this one module sets it again afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.script_check.recorder.live_modules import unwrap
from paceline.script_check.recorder.sample_keys import sample_keys
from paceline.script_check.recorder.source_lines import calling_line
from paceline.script_check.recording import ForwardCall
from paceline.torch_internals.pytree import tensor_leaves

_MAX_SAMPLES = 4096  # whose keys are written for each call
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class _OpenCall:
    """A call that has begun. `rng_state` is the state of the random numbers before it."""

    module: nn.Module
    rng_state: Tensor
    line: str


class ForwardWatch:
    """The forward passes of outermost modules in training mode, since the last `take`.

    `begin(module)` is called before each of them, and `see_batch(class, args, kwargs)` after it. `guard` wraps the
    hooks, so that their faults end no training. `own_outputs` are the addresses of what the models returned in the
    step. `is_fed` is set if the next call gets another recording's batch.
    """

    def __init__(
        self, *, guard: Guard, begin: Callable[[nn.Module], None], see_batch: Callable[[str, Any, Any], None]
    ) -> None:
        self._guard = guard
        self._begin = begin
        self._see_batch = see_batch
        self.is_fed = False
        self.own_outputs: set[int] = set()
        self._calls: list[ForwardCall] = []
        self._draws = False
        self._inner: set[int] = set()  # modules below an outermost one; checkpointing calls them again in backward
        self._global_hook: RemovableHandle | None = None
        self._leave_hook: RemovableHandle | None = None
        self._watch()

    def take(self) -> tuple[tuple[ForwardCall, ...], bool]:
        """Return the calls since the last time, and whether one of them drew random numbers."""
        calls, draws = tuple(self._calls), self._draws
        self._calls, self._draws = [], False
        self.own_outputs.clear()
        return calls, draws

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in (self._global_hook, self._leave_hook):
            if hook is not None:
                hook.remove()
        self._global_hook = self._leave_hook = None

    def is_outermost(self, module: nn.Module) -> bool:
        """Return whether a call of the module would be one of an outermost module."""
        return self._is_watching and id(module) not in self._inner and not isinstance(module, nn.modules.loss._Loss)

    def _watch(self) -> None:
        self._global_hook = register_module_forward_pre_hook(self._guard(self._enter))
        self._is_watching = True

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self.is_outermost(module):
            return
        is_training = torch.is_grad_enabled() and unwrap(module).training
        assert self._global_hook is not None
        self._global_hook.remove()
        self._is_watching = False
        self._inner |= {id(each) for each in module.modules() if each is not module}
        call = _OpenCall(module=module, rng_state=torch.get_rng_state(), line=calling_line()) if is_training else None
        leave = self._guard(partial(self._leave, call))
        self._leave_hook = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        if is_training:
            self._begin(module)

    def _leave(self, call: _OpenCall | None, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._leave_hook is not None:
            self._leave_hook.remove()
        self._watch()
        if call is None:
            return
        self._draws |= not torch.equal(call.rng_state, torch.get_rng_state())
        keys = sample_keys(args, kwargs, own_outputs=self.own_outputs)
        name, outputs = type(unwrap(module)).__name__, list(tensor_leaves(output))
        has_parameters = any(True for _ in module.parameters())
        if has_parameters:
            self._see_batch(name, args, kwargs)
        self.own_outputs |= {tensor.data_ptr() for tensor in outputs}
        self._calls.append(
            ForwardCall(
                module=name,
                has_parameters=has_parameters,
                samples=tuple((keys or [])[:_MAX_SAMPLES]),
                num_samples=len(keys or []),
                line=call.line,
                is_fed=self.is_fed,
                returns_loss=any(not tensor.dim() and tensor.requires_grad for tensor in outputs),
            )
        )
        self.is_fed = False
