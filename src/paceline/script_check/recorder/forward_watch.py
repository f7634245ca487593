"""The forward passes of the outermost module of a foreign script.

A global hook sees them. It is removed while the module runs, so that `torch.compile` sees no global hook, and a hook on
this one module sets it again afterwards.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.script_check.recorder.live_modules import inactive_modules, unwrap
from paceline.script_check.recorder.sample_keys import (
    OutputKey,
    count_targets,
    has_loss_count,
    output_key,
    row_shape,
    sample_keys,
)
from paceline.script_check.recorder.source_lines import calling_line
from paceline.script_check.recording import ForwardCall
from paceline.torch_internals.pytree import tensor_leaves

_MAX_SAMPLES = 4096  # whose keys are written for each call
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class _OpenCall:
    """A call that has begun. `rng_state` is the state of the random numbers before it."""

    rng_state: bytes
    line: str
    is_training: bool


class ForwardWatch:
    """The forward passes of outermost modules since the last `take`.

    Those in eval mode belong to them if their outputs get a gradient. `begin(module)` is called before each pass that
    may have a backward, and `see_batch(class, args, kwargs)` after each one in training mode. `guard` wraps the hooks,
    so that their faults end no training. `own_outputs` has the keys of what the models returned in the step.
    `is_fed` is set if the next call gets another recording's batch.
    """

    def __init__(
        self, *, guard: Guard, begin: Callable[[nn.Module], None], see_batch: Callable[[str, Any, Any], None]
    ) -> None:
        self._guard = guard
        self._begin = begin
        self._see_batch = see_batch
        self.is_fed = False
        self.own_outputs: set[OutputKey] = set()
        self._calls: list[ForwardCall] = []
        self._inner: set[int] = set()  # modules below an outermost one; checkpointing calls them again in backward
        self._global_hook: RemovableHandle | None = None
        self._leave_hook: RemovableHandle | None = None
        self._watch()

    def take(self) -> tuple[ForwardCall, ...]:
        """Return the calls since the last time."""
        calls, self._calls = tuple(self._calls), []
        self.own_outputs.clear()
        return calls

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
        assert self._global_hook is not None
        self._global_hook.remove()
        self._is_watching = False
        self._inner |= {id(each) for each in module.modules() if each is not module}
        call = None
        if torch.is_grad_enabled():
            call = _OpenCall(rng_state=_rng_state(), line=calling_line(), is_training=unwrap(module).training)
        leave = self._guard(partial(self._leave, call))
        self._leave_hook = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        if call is not None:
            self._begin(module)

    def _leave(self, call: _OpenCall | None, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._leave_hook is not None:
            self._leave_hook.remove()
        self._watch()
        if call is None:
            return
        keys = None
        with suppress(Exception):  # inputs of a kind that can't be read are no samples, and end no recording
            keys = sample_keys(args, kwargs, own_outputs=self.own_outputs)
        name, outputs = type(unwrap(module)).__name__, list(tensor_leaves(output))
        finished = ForwardCall(
            module=name,
            has_parameters=any(True for _ in module.parameters()),
            samples=tuple((keys or [])[:_MAX_SAMPLES]),
            num_samples=len(keys or []),
            line=call.line,
            is_fed=self.is_fed,
            returns_loss=any(not tensor.dim() and tensor.requires_grad for tensor in outputs),
            num_targets=count_targets(args, kwargs),
            is_weighted=has_loss_count(kwargs),
            random_state=0 if call.rng_state == _rng_state() else _digest(call.rng_state),
            is_training=call.is_training,
            inactive=inactive_modules(module),
            row_shape=row_shape(args, kwargs, own_outputs=self.own_outputs) if keys else (),
        )
        if not call.is_training:
            self._add_if_differentiated(finished, outputs)
            return
        if finished.has_parameters:
            self._see_batch(name, args, kwargs)
        self.own_outputs |= {key for tensor in outputs if (key := output_key(tensor)) is not None}
        self._calls.append(finished)
        self.is_fed = False

    def _add_if_differentiated(self, call: ForwardCall, outputs: Sequence[Tensor]) -> None:
        """Add a call when its output gets a gradient: an evaluation with gradients switched on gets none."""
        pending = [call]

        def add(_: Any) -> None:
            if pending:
                self._calls.append(pending.pop())

        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._guard(add))


def _rng_state() -> bytes:
    """Return the state of the random numbers of the CPU and of the current GPU."""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return state


def _digest(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little")
