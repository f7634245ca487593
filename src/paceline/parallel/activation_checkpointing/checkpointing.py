"""Activation checkpointing of a model's blocks: activations are freed in forward and recomputed in backward.

Blocks are not wrapped in another module. Only the `forward` of the block's *instance* is replaced, so names stay
unchanged. The second run is bitwise equal to the first, because torch restores the random generators and autocast, and
this package restores the buffers. Chen et al., "Training deep nets with sublinear memory cost", arXiv 1604.06174.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from paceline.config.activation_checkpointing import Remat, RematKind
from paceline.errors import JobError, LayoutError
from paceline.parallel.activation_checkpointing.buffer_guard import BlockBuffers, BufferSnapshot
from paceline.parallel.activation_checkpointing.kv_cache import KVCaches
from paceline.parallel.activation_checkpointing.saved_ops import Contexts, checkpoint_contexts
from paceline.parallel.module_access.blocks import Block, find_blocks, has_blocks
from paceline.torch_internals.private_api import NormBase

Undo = Callable[[], None]
_MUTATED_MESSAGE = "selective activation checkpoint has been mutated"


def apply_remat(model: nn.Module, *, policy: Remat, blocks: Sequence[Block] | None = None) -> Undo:
    """Apply activation checkpointing to the blocks that `policy` selects, and return a function that undoes it.

    `blocks` are in execution order; the default is the model's repeated blocks. Call this before the blocks are
    compiled or sharded.

    Raises:
        LayoutError: the model already checkpoints, has no repeated block, or a block cannot be recomputed.
    """
    if not policy.is_on:
        return lambda: None
    _refuse_checkpointed(model)
    candidates = list(blocks) if blocks is not None else repeated_blocks(model)
    if not candidates:
        raise LayoutError(
            f"remat={policy}: {type(model).__name__} has no repeated block.",
            cause="remat looks for modules of one class in a ModuleList or a Sequential, and finds none",
            hint="remat=none, or name them: --place.blocks layer1,layer2",
        )
    context_fn = checkpoint_contexts(policy.keep) if policy.kind is RematKind.SELECTIVE else noop_context_fn
    undos = [_wrap_forward(block.name, block.module, context_fn) for block in _select_blocks(candidates, policy)]
    return lambda: _undo_all(reversed(undos))


def repeated_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of the model's chain that have submodules, each once; an empty list if it has no chain."""
    chain = find_blocks(model) if has_blocks(model) else ()
    unique_blocks = {id(block.module): block for block in chain if next(block.module.children(), None) is not None}
    return list(unique_blocks.values())


def _select_blocks(blocks: Sequence[Block], policy: Remat) -> list[Block]:
    """Return the first block of every group of `policy.every` consecutive blocks.

    The first one is chosen because checkpointing the model's last block saves the least memory.
    """
    return list(blocks)[:: policy.every]


class RecomputedForward:
    """A block's forward that is recomputed in backward. `inner` is the original forward, or the compiled one."""

    def __init__(self, *, name: str, block: nn.Module, inner: Callable[..., Any], context_fn: Contexts) -> None:
        self.inner = self.__wrapped__ = inner
        self._name, self._context_fn = name, context_fn
        self.is_selective = context_fn is not noop_context_fn
        self._buffers = BlockBuffers(name=name, block=block)
        self._caches = KVCaches(block=block, forward=inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, checkpointed if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        self._refuse_filled_cache(self._caches.find_filled(args, kwargs))
        snapshot = BufferSnapshot(self._buffers)
        output = checkpoint(
            _CheckpointedCall(self, snapshot), *args, use_reentrant=False, context_fn=self._context_fn, **kwargs
        )
        snapshot.finish_first_run()
        return output

    def disable_selective(self) -> None:
        """Recompute the full block, without a selective policy."""
        self._context_fn, self.is_selective = noop_context_fn, False

    def recompute(self, call: "_CheckpointedCall", args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the forward for the second time, in backward."""
        try:
            with call.snapshot.use_saved_buffers():
                return call.inner(*args, **kwargs)
        except RuntimeError as error:
            if _MUTATED_MESSAGE not in str(error):
                raise
            raise JobError(
                f"{self._name} overwrites a result that remat=selective keeps.",
                cause="an in-place operation after a convolution or a matmul, such as nn.ReLU(inplace=True)",
                hint="inplace=False there, or remat=full",
            ) from error

    def _refuse_filled_cache(self, cache: str | None) -> None:
        if cache is not None:
            raise JobError(
                f"{self._name} gets a cache that is not empty ({cache}), and remat would append to it twice.",
                cause="a trained prefix, or a cache kept from another forward",
                hint="remat=none",
            )


class _CheckpointedCall:
    """One call of a block, which torch's checkpoint runs once in forward and again in backward."""

    def __init__(self, recomputed: RecomputedForward, snapshot: BufferSnapshot) -> None:
        self._recomputed, self.snapshot = recomputed, snapshot
        self.inner = getattr(recomputed.inner, "select_forward", lambda: recomputed.inner)()
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positional, named = KVCaches.with_copied_caches(args, kwargs)
        if self._has_run:
            return self._recomputed.recompute(self, positional, named)
        self._has_run = True
        return self.inner(*positional, **named)


def _wrap_forward(name: str, block: nn.Module, context_fn: Contexts) -> Undo:
    if isinstance(block, NormBase | torch.jit.ScriptModule):
        kind = "a single normalisation layer" if isinstance(block, NormBase) else "a ScriptModule"
        raise LayoutError(
            f"remat: {name} is {kind} ({type(block).__name__}), which can't be recomputed by itself.",
            hint="name the block that contains it, or remat=none",
        )
    previous_forward = vars(block).get("forward")
    vars(block)["forward"] = RecomputedForward(name=name, block=block, inner=block.forward, context_fn=context_fn)

    def undo() -> None:
        del vars(block)["forward"]
        if previous_forward is not None:
            vars(block)["forward"] = previous_forward

    return undo


def _refuse_checkpointed(model: nn.Module) -> None:
    """Raise LayoutError if a module of the model already checkpoints its activations."""
    for name, module in model.named_modules():
        has_own_checkpointing = getattr(module, "gradient_checkpointing", False) is True
        if (
            has_own_checkpointing
            or type(module).__name__ == "CheckpointWrapper"
            or isinstance(vars(module).get("forward"), RecomputedForward)
        ):
            raise LayoutError(
                f"{name or type(model).__name__} already checkpoints its activations; remat would do it twice.",
                cause="gradient_checkpointing_enable(), checkpoint_wrapper(), or an earlier remat",
                hint="remove it from model=, or remat=none, which keeps it",
            )


def _undo_all(undos: Iterable[Undo]) -> None:
    for undo in undos:
        undo()
