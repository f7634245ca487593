"""The cost of one forward, by part: FLOPs of matmuls, bytes moved by other operations, bytes saved."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.profiling.model_tracing.compile_fusion import Fusion
from paceline.torch_internals.pytree import tensor_leaves

FIRST, LAST = "", "\0"
"""The names of the parts before the first block and after the last."""


@dataclass(kw_only=True)
class LayerCounts:
    """The counts of one part.

    `products` and `attention` are FLOPs of matmuls (a multiply-add is two), `masked` those that attention skips by a
    causal mask. Bytes are counted as moved by other operations, saved for backward, created by matmuls
    (`product_bytes`), output to the next part, all-reduced and exchanged by all-to-all. `fused_bytes` are the moved
    bytes that remain after a compiler fuses operations, `largest_bytes` is the largest result of one operation.
    """

    products: float = 0.0
    attention: float = 0.0
    masked: float = 0.0
    moved_bytes: float = 0.0
    fused_bytes: float = 0.0
    saved_bytes: float = 0.0
    product_bytes: float = 0.0
    output_bytes: float = 0.0
    largest_bytes: float = 0.0
    reduced_bytes: float = 0.0
    reduced_calls: int = 0
    exchanged_bytes: float = 0.0

    @property
    def values(self) -> list[float]:
        """Return all counts as floats."""
        return [float(getattr(self, each.name)) for each in fields(self)]


class FlopCounter:
    """A counter that adds each operation of a forward to the part that runs.

    Use `FakeExecutionMode(on_operation=counter.observe)`.
    """

    def __init__(self, model: nn.Module, *, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._last = list(blocks)[-1] if blocks else ""
        self._part = FIRST
        self._held: list[Tensor] = []  # keeps counted storages alive, so that no new one gets the same id
        self._known = {id(t.untyped_storage()) for t in [*model.parameters(), *model.buffers()]}
        self._fusion = Fusion()
        self.costs = {name: LayerCounts() for name in (FIRST, *blocks, LAST)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a forward, and the loss after it, in this context."""
        handles = []
        for name, block in self._blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter(name), prepend=True))
            handles.append(block.register_forward_hook(self._leave(name)))
        self._part = FIRST
        try:
            with saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operation."""
        cost, name = self.costs[self._part], func._schema.name
        if name.startswith("c10d::"):
            self._message(cost, name, args)
            return
        made = [tensor for tensor in tensor_leaves(result) if not tensor.is_meta]
        given = {id(tensor.untyped_storage()) for tensor in tensor_leaves(args)}
        new = sum(tensor.nbytes for tensor in made if id(tensor.untyped_storage()) not in given)
        cost.largest_bytes = max(cost.largest_bytes, float(new))
        short = name.partition(".")[0]
        if short in _ATTENTION or short in _PRODUCTS:
            self._product(cost, short, args, made)
            cost.product_bytes += new
        elif new or any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            taken = [tensor for tensor in tensor_leaves(args) if not tensor.is_meta]
            cost.moved_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args)) + sum(t.nbytes for t in made)
            cost.fused_bytes += self._fusion.joined(taken, made)

    def _product(self, cost: LayerCounts, name: str, args: Any, made: Sequence[Tensor]) -> None:
        cost.fused_bytes += self._fusion.product((tensor for tensor in tensor_leaves(args) if not tensor.is_meta), made)
        if name in _ATTENTION:
            done, masked = _scores(args)
            cost.attention, cost.masked = cost.attention + done, cost.masked + masked
        else:
            cost.products += _PRODUCTS[name](args, made)

    def _message(self, cost: LayerCounts, name: str, args: Any) -> None:
        if name.startswith("c10d::allreduce"):
            cost.reduced_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args[0]))
            cost.reduced_calls += 1
        elif name.startswith("c10d::alltoall"):
            cost.exchanged_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args[1]))

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known and tensor.layout is torch.strided:
            self._known.add(id(storage))
            self._held.append(tensor)
            self.costs[self._part].saved_bytes += storage.nbytes()
        return tensor

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._fusion.end(())
            self._part = name

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            own = self.costs[name]
            own.output_bytes = float(sum(tensor.nbytes for tensor in tensor_leaves(output)))
            own.fused_bytes += self._fusion.end(tensor_leaves(output))
            if name == self._last:
                self._part = LAST

        return leave


def _matrix(args: Sequence[Any], made: Sequence[Tensor]) -> float:
    return float(2 * made[0].numel() * args[0].shape[-1])


def _matrix_added(args: Sequence[Any], made: Sequence[Tensor]) -> float:
    return float(2 * made[0].numel() * args[1].shape[-1])


def _convolution(args: Sequence[Any], made: Sequence[Tensor]) -> float:
    source, weight, is_transposed = args[0], args[1], args[6]
    each = math.prod(weight.shape[1:])
    return float(2 * each * (source.numel() if is_transposed else made[0].numel()))


def _scores(args: Sequence[Any]) -> tuple[float, float]:
    """Return the FLOPs of both matmuls of attention: those computed, and those that a causal mask skips."""
    query, key = args[0], args[1]
    every = 4.0 * query.numel() * key.shape[-2]
    made = 0.5 * every if any(arg is True for arg in args[3:]) else every
    return made, every - made


def _grouped(args: Sequence[Any], made: Sequence[Tensor]) -> float:
    return float(2 * made[0].numel() * args[0].shape[-1])


def _recurrent(args: Sequence[Any], made: Sequence[Tensor]) -> float:
    positions = math.prod(args[0].shape[:2])
    return float(2 * positions * (args[1].numel() + args[2].numel()))


_PRODUCTS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], float]] = {
    "aten::mm": _matrix,
    "aten::bmm": _matrix,
    "aten::addmm": _matrix_added,
    "aten::baddbmm": _matrix_added,
    "aten::convolution": _convolution,
    "aten::_grouped_mm": _grouped,
    "aten::mkldnn_rnn_layer": _recurrent,
}
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
}
