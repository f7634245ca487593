"""Track the activation memory of each part of a model in a forward and backward: kept for backward, or transient.

The parts are the blocks, and the operations before the first and after the last block.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from paceline.profiling.model_tracing.flop_counter import AFTER_BLOCKS, BEFORE_BLOCKS
from paceline.torch_internals.private_api import is_in_backward
from paceline.torch_internals.pytree import tensor_leaves


@dataclass(kw_only=True)
class ActivationUsage:
    """Activation bytes of one part.

    `kept_bytes` are those that exist when backward begins. `transient_bytes` is the peak of the additional bytes while
    the part runs forward or backward: those that neither this part nor an earlier one keeps for backward.
    """

    kept_bytes: float = 0.0
    transient_bytes: float = 0.0


class ActivationTracker:
    """A tracker that observes each operation of a forward and its backward.

    Use `FakeExecutionMode(on_operation=tracker.observe)`. Tensors that existed before the forward are not counted. A
    block's backward begins when the gradient of its output exists. `usage` has the results by part.
    """

    def __init__(self, *, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._order = [BEFORE_BLOCKS, *blocks, AFTER_BLOCKS]
        self._part = BEFORE_BLOCKS
        # by id of the storage: its bytes, the part that created it, and a reference
        self._live: dict[int, tuple[int, str, weakref.ref[UntypedStorage]]] = {}
        self._bytes = 0  # of all live storages
        self._part_start_bytes = 0  # of all live storages when the running part began
        # after the forward: the bytes that a part and all earlier parts keep
        self._kept_up_to_part: dict[str, float] | None = None
        self._forward_peaks = dict.fromkeys(self._order, 0.0)
        self.usage = {name: ActivationUsage() for name in self._order}

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track in this context. It must contain a forward with its loss, `end_forward()`, and the backward."""
        handles = []
        for name, block in self._blocks.items():
            handles.append(block.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            handles.append(block.register_forward_hook(partial(self._leave, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._live.clear()

    def end_forward(self) -> None:
        """End the forward. Tensors that exist at this time are counted as kept for backward."""
        sums = dict.fromkeys(self._order, 0.0)
        for size, part, _ in self._live.values():
            sums[part] += size
        total, self._kept_up_to_part = 0.0, {}
        for name in self._order:
            total += sums[name]
            self._kept_up_to_part[name] = total
            self.usage[name].kept_bytes = sums[name]
            self.usage[name].transient_bytes = max(0.0, self._forward_peaks[name] - sums[name])
        self._part = AFTER_BLOCKS

    def observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count the new tensors of one operation, and update the peak of the running part."""
        input_ids = {id(tensor.untyped_storage()) for tensor in tensor_leaves([args, kwargs]) if _is_plain(tensor)}
        for tensor in tensor_leaves(result):
            if _is_plain(tensor) and id(tensor.untyped_storage()) not in input_ids:
                self._track_storage(tensor.untyped_storage())
        if self._kept_up_to_part is None:
            self._forward_peaks[self._part] = max(
                self._forward_peaks[self._part], float(self._bytes - self._part_start_bytes)
            )
        else:
            usage = self.usage[self._part]
            usage.transient_bytes = max(usage.transient_bytes, self._bytes - self._kept_up_to_part[self._part])

    def _track_storage(self, storage: UntypedStorage) -> None:
        storage_id = id(storage)
        if storage_id in self._live:
            return
        self._live[storage_id] = (
            storage.nbytes(),
            self._part,
            weakref.ref(storage, lambda _: self._forget(storage_id)),
        )
        self._bytes += storage.nbytes()

    def _forget(self, storage_id: int) -> None:
        entry = self._live.pop(storage_id, None)
        if entry is not None:
            self._bytes -= entry[0]

    def _start_part(self, name: str) -> None:
        self._part, self._part_start_bytes = name, self._bytes

    def _enter(self, name: str, *_: Any) -> None:
        if not is_in_backward():
            self._start_part(name)

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if is_in_backward():  # a forward that activation checkpointing repeats
            return
        for tensor in tensor_leaves(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._backward_hook(name))
        next_part = self._order[self._order.index(name) + 1]
        self._start_part(next_part)

    def _backward_hook(self, name: str) -> Callable[[Tensor], None]:
        def start_backward(_: Tensor) -> None:
            self._part = name

        return start_backward


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
