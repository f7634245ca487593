"""Time the forward and backward of each block on one example batch, to balance pipeline stages."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.private_api import CallInterceptor


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Median seconds of each block, forward and backward.

    `first` has the forward and backward seconds of the operations before the first block (embedding). `last` has those
    of the operations after the last block (head and loss).
    """

    names: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    first: tuple[float, float]
    last: tuple[float, float]

    @property
    def block_seconds(self) -> tuple[float, ...]:
        """The seconds of each block, forward plus backward."""
        return tuple(forward + backward for forward, backward in zip(self.forward, self.backward, strict=True))


def time_blocks(
    model: nn.Module,
    *,
    blocks: Mapping[str, nn.Module],
    call: Callable[[], Tensor],
    repeats: int = 5,
    materialize_block: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> BlockTimes:
    """Time a forward and backward block by block. `blocks` are in the order of the forward.

    `call` runs the forward and returns a scalar. `materialize_block` returns a context in which a block's parameters
    have memory, and in which the block is timed. Each block runs on inputs detached from the graph, so that its
    backward is timed separately. Parameters get no gradient. Buffers and random streams advance as in any forward.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rounds = [_Round(model, blocks, device, materialize_block).run(call) for _ in range(repeats + 1)][1:]
    medians = [median(column) for column in zip(*(timed_round.seconds() for timed_round in rounds), strict=True)]
    forward, backward = medians[::2], medians[1::2]
    return BlockTimes(
        names=tuple(blocks),
        forward=tuple(forward[1:-1]),
        backward=tuple(backward[1:-1]),
        first=(forward[0], backward[0]),
        last=(forward[-1], backward[-1]),
    )


class _Round:
    """One timed forward of the model. The backward of each block runs right after the forward of this block."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        device: torch.device,
        materialize_block: Callable[[nn.Module], AbstractContextManager[object]],
    ) -> None:
        self._model, self._blocks, self._device = model, blocks, device
        self._materialize_block = materialize_block
        # forward and backward seconds: before the first block, after the last block, and of each block
        self._first = (0.0, 0.0)
        self._last = (0.0, 0.0)
        self._block_times: dict[str, tuple[float, float]] = {}
        self._start_time = 0.0  # of the operations since the last block, or since the start

    def run(self, call: Callable[[], Tensor]) -> "_Round":
        interceptors = [CallInterceptor(module, self._interceptor(name)) for name, module in self._blocks.items()]
        try:
            self._start_time = self._read_clock()
            result = call()
            end_time = self._read_clock()
            self._last = (end_time - self._start_time, self._time_backward([result], list(self._model.parameters())))
        finally:
            for interceptor in reversed(interceptors):
                interceptor.undo()
        return self

    def seconds(self) -> list[float]:
        """Return forward and backward seconds alternately: before the blocks, of each block, after the blocks."""
        return [*self._first, *(seconds for name in self._blocks for seconds in self._block_times[name]), *self._last]

    def _interceptor(self, name: str) -> Callable[..., Any]:
        def intercept(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            first_seconds = self._read_clock() - self._start_time
            outputs: list[Tensor] = []
            leaves: list[Tensor] = []
            args, kwargs = _detach((args, kwargs), outputs, leaves)
            if not self._block_times:
                self._first = (first_seconds, self._time_backward(outputs, list(self._model.parameters())))
            with self._materialize_block(self._blocks[name]):
                output = self._time_block(name, leaves, lambda: call(*args, **kwargs))
            self._start_time = self._read_clock()
            return output

        return intercept

    def _time_block(self, name: str, leaves: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        start_time = self._read_clock()
        output = call()
        forward = self._read_clock() - start_time
        outputs: list[Tensor] = []
        output = _detach(output, outputs, [])
        weights = [p for p in self._blocks[name].parameters() if p.requires_grad]
        self._block_times[name] = (forward, self._time_backward(outputs, [*leaves, *weights]))
        return output

    def _time_backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
        differentiable = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
        targets = [tensor for tensor in inputs if tensor.requires_grad]
        if not differentiable or not targets:
            return 0.0
        gradients = [torch.ones_like(tensor) for tensor in differentiable]
        start_time = self._read_clock()
        torch.autograd.grad(differentiable, targets, gradients, allow_unused=True)
        return self._read_clock() - start_time

    def _read_clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _detach(value: Any, originals: list[Tensor], leaves: list[Tensor]) -> Any:
    """Return a copy of nested values in which tensors are detached from the graph.

    Append the tensors that require gradients to `originals`, and the leaves that replace them to `leaves`.
    """
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        originals.append(value)
        leaves.append(value.detach().requires_grad_())
        return leaves[-1].clone()
    if isinstance(value, Mapping):
        parts = {key: _detach(part, originals, leaves) for key, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        items = [_detach(part, originals, leaves) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
