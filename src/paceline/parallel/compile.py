"""`torch.compile`, block by block: all blocks of a class share one compilation; a block that fails runs uncompiled.

Only a block's forward is compiled. Hooks on the block, such as those that start its random stream or gather its
weights, run around it unchanged; activation checkpointing recomputes the compiled forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel.activation_checkpointing.buffer_guard import BlockBuffers, BufferSnapshot
from paceline.parallel.activation_checkpointing.checkpointing import RecomputedForward, Undo, repeated_blocks
from paceline.parallel.activation_checkpointing.kv_cache import Caches
from paceline.parallel.module_access.blocks import Block
from paceline.torch_internals.private_api import compile_errors
from paceline.torch_internals.rng import get_states, set_states

Say = Callable[[str], None]
_TRIALS = 2


def compile_blocks(model: nn.Module, *, say: Say, blocks: Sequence[Block] | None = None) -> Undo:
    """Compile each block's forward, or the model's if it has no blocks; return a function that undoes it.

    Call this after remat and before sharding. A block that can't be compiled runs uncompiled, and `report` is called
    once with its name and the reason. Random numbers are those of the uncompiled model, so results differ by rounding
    only.
    """
    found = list(blocks) if blocks is not None else repeated_blocks(model)
    whole = Block(index=0, name="", module=model)
    undos = [_wrap(block.name, block.module, say) for block in found or [whole]]

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo


class CompiledForward:
    """A forward that is compiled at its first call, and uncompiled from the first failure on."""

    def __init__(self, *, name: str, block: nn.Module, inner: Callable[..., Any], say: Say) -> None:
        self.__wrapped__ = self._plain = inner
        self._fails = compile_errors()
        self._fast: Callable[..., Any] | None = torch.compile(
            inner, options={"fallback_random": True, "layout_optimization": False}
        )
        self._name, self._block, self._say = name or type(block).__name__, block, say
        self._caches = Caches(block=block, forward=inner)
        self._buffers = BlockBuffers(name=name, block=block)
        self._trials = 0
        self._looked: set[bool] = set()

    def pinned(self) -> Callable[..., Any]:
        """Return the function that the next call runs, compiled or not, so that the recomputation runs the same one."""
        if self._fast is None:
            return self._plain
        if self._block.training in self._looked:
            return self._run
        first = [self._look]

        def look(*args: Any, **kwargs: Any) -> Any:
            return (first.pop() if first else self._plain)(*args, **kwargs)

        return look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, compiled if possible."""
        return self.pinned()(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._fast is None:
            return self._plain(*args, **kwargs)
        if torch.is_grad_enabled() and self._caches.filled(args, kwargs) is None:
            given, named = self._caches.without(args, kwargs)
        else:
            given, named = list(args), kwargs
        states = get_states(_gpu(self._block))
        entry = BufferSnapshot(self._buffers) if self._trials < _TRIALS else None
        try:
            output = self._fast(*given, **named)
        except self._fails as error:
            said = " ".join(str(error).split("\n\n")[0].split())[:300]
            self._give_up(f"{type(error).__name__}: {said}")
            set_states(states, _gpu(self._block))
            if entry is not None:
                entry.restore()
            return self._plain(*args, **kwargs)
        self._trials += 1
        return output

    def _look(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward uncompiled once, and disable compilation if it writes to a buffer.

        If a forward reads and writes a buffer, a compiled backward reads the new value: gradients are silently wrong
        (pytorch#197039). Statistics of normalization layers are only written, so they are allowed.
        """
        self._looked.add(self._block.training)
        entry = BufferSnapshot(BlockBuffers(name=self._name, block=self._block))
        output = self._plain(*args, **kwargs)
        written = entry.leave()
        if written:
            self._give_up(f"its forward writes to the buffer {written[0]}, so its gradients would be wrong")
        return output

    def _give_up(self, why: str) -> None:
        self._fast = None
        self._say(f"note: {self._name} runs uncompiled: {why}")


def _wrap(name: str, block: nn.Module, say: Say) -> Undo:
    forward = block.forward
    if isinstance(forward, RecomputedForward):
        rerun, plain = forward, forward.inner
        if rerun.is_selective:
            rerun.keep_nothing()
            say(f"note: {name} is compiled: remat=selective can't see into it and recomputes all of it")
        rerun.inner = CompiledForward(name=name, block=block, inner=plain, say=say)
        return lambda: setattr(rerun, "inner", plain)
    before = vars(block).get("forward")
    vars(block)["forward"] = CompiledForward(name=name, block=block, inner=forward, say=say)

    def undo() -> None:
        del vars(block)["forward"]
        if before is not None:
            vars(block)["forward"] = before

    return undo


def _gpu(block: nn.Module) -> torch.device | None:
    device = next((p.device for p in block.parameters()), None)
    return device if device is not None and device.type == "cuda" else None
