"""Timing of each block, forward and backward, on one example, for balancing pipeline stages."""

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
    """Median seconds; `first` and `last` are the parts before the first block (embedding) and after the last."""

    names: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    first: tuple[float, float]
    last: tuple[float, float]

    @property
    def both(self) -> tuple[float, ...]:
        """Return forward plus backward seconds of each block."""
        return tuple(one + other for one, other in zip(self.forward, self.backward, strict=True))


def time_blocks(
    model: nn.Module,
    *,
    blocks: Mapping[str, nn.Module],
    call: Callable[[], Tensor],
    repeats: int = 5,
    held: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
) -> BlockTimes:
    """Time a forward that ends in a scalar, block by block. `blocks` are in the order of the forward.

    `hold_block` returns a context in which a block has its memory while it is timed. Each block runs on inputs detached
    from the graph, so that its backward is timed separately. Parameters get no gradient. Buffers and random streams
    advance as in any forward.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rounds = [_Round(model, blocks, device, held).run(call) for _ in range(repeats + 1)][1:]
    middle = [median(column) for column in zip(*(each.seconds() for each in rounds), strict=True)]
    forward, backward = middle[::2], middle[1::2]
    return BlockTimes(
        names=tuple(blocks),
        forward=tuple(forward[1:-1]),
        backward=tuple(backward[1:-1]),
        first=(forward[0], backward[0]),
        last=(forward[-1], backward[-1]),
    )


class _Round:
    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        device: torch.device,
        held: Callable[[nn.Module], AbstractContextManager[object]],
    ) -> None:
        self._model, self._blocks, self._device, self._held = model, blocks, device, held
        self._first = (0.0, 0.0)
        self._last = (0.0, 0.0)
        self._each: dict[str, tuple[float, float]] = {}
        self._began = 0.0

    def run(self, call: Callable[[], Tensor]) -> "_Round":
        gates = [CallInterceptor(module, self._gate(name)) for name, module in self._blocks.items()]
        try:
            self._began = self._now()
            result = call()
            ended = self._now()
            self._last = (ended - self._began, self._backward([result], list(self._model.parameters())))
        finally:
            for gate in reversed(gates):
                gate.undo()
        return self

    def seconds(self) -> list[float]:
        """Return forward and backward seconds in turn: first, each block, last."""
        return [*self._first, *(second for name in self._blocks for second in self._each[name]), *self._last]

    def _gate(self, name: str) -> Callable[..., Any]:
        def gate(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = self._now() - self._began
            live: list[Tensor] = []
            cut: list[Tensor] = []
            args, kwargs = _detached((args, kwargs), live, cut)
            if not self._each:
                self._first = (before, self._backward(live, list(self._model.parameters())))
            with self._held(self._blocks[name]):
                output = self._block(name, cut, lambda: call(*args, **kwargs))
            self._began = self._now()
            return output

        return gate

    def _block(self, name: str, cut: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        began = self._now()
        output = call()
        forward = self._now() - began
        found: list[Tensor] = []
        output = _detached(output, found, [])
        weights = [p for p in self._blocks[name].parameters() if p.requires_grad]
        self._each[name] = (forward, self._backward(found, [*cut, *weights]))
        return output

    def _backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
        live = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not live or not wanted:
            return 0.0
        gradients = [torch.ones_like(tensor) for tensor in live]
        began = self._now()
        torch.autograd.grad(live, wanted, gradients, allow_unused=True)
        return self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _detached(value: Any, live: list[Tensor], cut: list[Tensor]) -> Any:
    """Return a copy detached from the graph; the originals are added to `live`, the detached leaves to `cut`."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        live.append(value)
        cut.append(value.detach().requires_grad_())
        return cut[-1].clone()
    if isinstance(value, Mapping):
        parts = {key: _detached(part, live, cut) for key, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        each = [_detached(part, live, cut) for part in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value
