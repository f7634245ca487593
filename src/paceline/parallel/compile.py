"""Compile a model block by block.

All blocks of a class share one compilation. A block that cannot be compiled runs uncompiled. Only a block's forward is
compiled. Hooks on the block, such as those that start its random stream or gather its weights, run before and after the
forward as usual. Activation checkpointing recomputes the compiled forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel.activation_checkpointing.buffer_guard import BlockBuffers, BufferSnapshot
from paceline.parallel.activation_checkpointing.checkpointing import RecomputedForward, Undo, repeated_blocks
from paceline.parallel.activation_checkpointing.kv_cache import KVCaches
from paceline.parallel.module_access.blocks import Block
from paceline.torch_internals.private_api import enable_compile_errors
from paceline.torch_internals.rng import get_rng_states, set_rng_states

Report = Callable[[str], None]
_NUM_GUARDED_CALLS = 2  # the first calls of the compiled forward compile it; if one fails, buffers are restored


def compile_blocks(model: nn.Module, *, report: Report, blocks: Sequence[Block] | None = None) -> Undo:
    """Compile each block's forward, or the model's if it has no blocks; return a function that undoes it.

    Call this after remat and before sharding. A block that can't be compiled runs uncompiled, and `report` is called
    once with its name and the reason. Random numbers are those of the uncompiled model, so results differ by rounding
    only.
    """
    chosen = list(blocks) if blocks is not None else repeated_blocks(model)
    full_model = Block(index=0, name="", module=model)
    undos = [_compile_forward(block.name, block.module, report) for block in chosen or [full_model]]

    def undo() -> None:
        for undo_block in reversed(undos):
            undo_block()

    return undo


class CompiledForward:
    """A forward that runs compiled; after a failure, all calls run the original forward.

    The first call in training mode and the first call in eval mode run uncompiled, to check for writes to buffers.
    """

    def __init__(self, *, name: str, block: nn.Module, forward: Callable[..., Any], report: Report) -> None:
        self.__wrapped__ = self._uncompiled = forward
        self._compile_errors = enable_compile_errors()
        self._compiled: Callable[..., Any] | None = torch.compile(
            forward, options={"fallback_random": True, "layout_optimization": False}
        )
        self._name, self._block, self._report = name or type(block).__name__, block, report
        self._caches = KVCaches(block=block, forward=forward)
        self._buffers = BlockBuffers(name=name, block=block)
        self._num_calls = 0
        self._checked_modes: set[bool] = set()  # values of `block.training` for which buffer writes were checked

    def select_forward(self) -> Callable[..., Any]:
        """Return the function, compiled or not, that a call and its recomputation in backward both run."""
        if self._compiled is None:
            return self._uncompiled
        if self._block.training in self._checked_modes:
            return self._run
        first_call = [self._check_buffer_writes]

        def run_check_once(*args: Any, **kwargs: Any) -> Any:
            return (first_call.pop() if first_call else self._uncompiled)(*args, **kwargs)

        return run_check_once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, compiled if possible."""
        return self.select_forward()(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward; if this fails, restore random generators and buffers, and run the original one."""
        if self._compiled is None:
            return self._uncompiled(*args, **kwargs)
        if torch.is_grad_enabled() and self._caches.find_filled(args, kwargs) is None:
            positional, named = self._caches.without_caches(args, kwargs)
        else:
            positional, named = list(args), kwargs
        states = get_rng_states(_cuda_device(self._block))
        snapshot = BufferSnapshot(self._buffers) if self._num_calls < _NUM_GUARDED_CALLS else None
        try:
            output = self._compiled(*positional, **named)
        except self._compile_errors as error:
            reason = " ".join(str(error).split("\n\n")[0].split())[:300]
            self._disable_compilation(f"{type(error).__name__}: {reason}")
            set_rng_states(states, _cuda_device(self._block))
            if snapshot is not None:
                snapshot.restore()
            return self._uncompiled(*args, **kwargs)
        self._num_calls += 1
        return output

    def _check_buffer_writes(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward uncompiled once, and disable compilation if it writes to a buffer.

        If a forward reads and writes a buffer, a compiled backward reads the new value, and gradients are silently
        wrong (pytorch#197039). Statistics of normalization layers are only written, so they are allowed.
        """
        self._checked_modes.add(self._block.training)
        snapshot = BufferSnapshot(BlockBuffers(name=self._name, block=self._block))
        output = self._uncompiled(*args, **kwargs)
        written_names = snapshot.finish_first_run()
        if written_names:
            self._disable_compilation(
                f"its forward writes to the buffer {written_names[0]}, so its gradients would be wrong"
            )
        return output

    def _disable_compilation(self, reason: str) -> None:
        self._compiled = None
        self._report(f"note: {self._name} runs uncompiled: {reason}")


def _compile_forward(name: str, block: nn.Module, report: Report) -> Undo:
    forward = block.forward
    if isinstance(forward, RecomputedForward):
        recomputed, uncompiled = forward, forward.inner
        if recomputed.is_selective:
            recomputed.disable_selective()
            report(f"note: {name} is compiled: remat=selective can't see into it and recomputes all of it")
        recomputed.inner = CompiledForward(name=name, block=block, forward=uncompiled, report=report)
        return lambda: setattr(recomputed, "inner", uncompiled)
    previous_forward = vars(block).get("forward")
    vars(block)["forward"] = CompiledForward(name=name, block=block, forward=forward, report=report)

    def undo() -> None:
        del vars(block)["forward"]
        if previous_forward is not None:
            vars(block)["forward"] = previous_forward

    return undo


def _cuda_device(block: nn.Module) -> torch.device | None:
    device = next((p.device for p in block.parameters()), None)
    return device if device is not None and device.type == "cuda" else None
