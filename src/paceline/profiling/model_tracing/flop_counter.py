"""Count the cost of each part of a forward: FLOPs of matmuls, bytes that other operations move, bytes saved.

The parts are the blocks, and the operations before the first and after the last block.
"""

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

BEFORE_BLOCKS, AFTER_BLOCKS = "", "\0"
"""The names of the parts before the first block and after the last block."""


@dataclass(kw_only=True)
class LayerCounts:
    """The counts of one part.

    A multiply-add is two FLOPs. `masked_flops` are those that attention skips because of a causal mask. `moved_bytes`
    are read and written by operations other than matmuls. `fused_bytes` are those that remain after a compiler fuses
    these operations. `matmul_result_bytes` are created by matmuls, `saved_bytes` are saved for backward, and
    `output_bytes` are the output to the next part. `largest_bytes` is the largest result of one operation.
    `reduced_bytes` and `reduced_calls` count all-reduces, and `exchanged_bytes` the inputs of all-to-alls.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    masked_flops: float = 0.0
    moved_bytes: float = 0.0
    fused_bytes: float = 0.0
    saved_bytes: float = 0.0
    matmul_result_bytes: float = 0.0
    output_bytes: float = 0.0
    largest_bytes: float = 0.0
    reduced_bytes: float = 0.0
    reduced_calls: int = 0
    exchanged_bytes: float = 0.0

    @property
    def values(self) -> list[float]:
        """Return all counts as floats."""
        return [float(getattr(self, field.name)) for field in fields(self)]


class FlopCounter:
    """A counter that adds each operation of a forward to the counts of the running part.

    Use `FakeExecutionMode(on_operation=counter.observe)`. `costs` has the counts by part.
    """

    def __init__(self, model: nn.Module, *, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._last_block = list(blocks)[-1] if blocks else ""
        self._part = BEFORE_BLOCKS
        self._saved_tensors: list[Tensor] = []  # references counted storages, so that no new storage gets the same id
        self._counted_ids = {id(t.untyped_storage()) for t in [*model.parameters(), *model.buffers()]}
        self._fusion = Fusion()
        self.costs = {name: LayerCounts() for name in (BEFORE_BLOCKS, *blocks, AFTER_BLOCKS)}

    @contextmanager
    def count_forward(self) -> Iterator[None]:
        """Count a forward, and the loss after it, in this context."""
        handles = []
        for name, block in self._blocks.items():
            handles.append(block.register_forward_pre_hook(self._enter_hook(name), prepend=True))
            handles.append(block.register_forward_hook(self._leave_hook(name)))
        self._part = BEFORE_BLOCKS
        try:
            with saved_tensors_hooks(self._count_saved, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operation."""
        counts, name = self.costs[self._part], func._schema.name
        if name.startswith("c10d::"):
            self._count_collective(counts, name, args)
            return
        results = [tensor for tensor in tensor_leaves(result) if not tensor.is_meta]
        input_ids = {id(tensor.untyped_storage()) for tensor in tensor_leaves(args)}
        new_bytes = sum(tensor.nbytes for tensor in results if id(tensor.untyped_storage()) not in input_ids)
        counts.largest_bytes = max(counts.largest_bytes, float(new_bytes))
        base_name = name.partition(".")[0]
        if base_name in _ATTENTION_OPERATORS or base_name in _MATMUL_FLOPS:
            self._count_matmul(counts, base_name, args, results)
            counts.matmul_result_bytes += new_bytes
        elif new_bytes or any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            inputs = [tensor for tensor in tensor_leaves(args) if not tensor.is_meta]
            counts.moved_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args)) + sum(t.nbytes for t in results)
            counts.fused_bytes += self._fusion.add_operation(inputs, results)

    def _count_matmul(self, counts: LayerCounts, name: str, args: Any, results: Sequence[Tensor]) -> None:
        counts.fused_bytes += self._fusion.add_matmul(
            (tensor for tensor in tensor_leaves(args) if not tensor.is_meta), results
        )
        if name in _ATTENTION_OPERATORS:
            computed, masked = _attention_flops(args)
            counts.attention_flops, counts.masked_flops = (
                counts.attention_flops + computed,
                counts.masked_flops + masked,
            )
        else:
            counts.matmul_flops += _MATMUL_FLOPS[name](args, results)

    def _count_collective(self, counts: LayerCounts, name: str, args: Any) -> None:
        if name.startswith("c10d::allreduce"):
            counts.reduced_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args[0]))
            counts.reduced_calls += 1
        elif name.startswith("c10d::alltoall"):
            counts.exchanged_bytes += sum(tensor.nbytes for tensor in tensor_leaves(args[1]))

    def _count_saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._counted_ids and tensor.layout is torch.strided:
            self._counted_ids.add(id(storage))
            self._saved_tensors.append(tensor)
            self.costs[self._part].saved_bytes += storage.nbytes()
        return tensor

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._fusion.end_chain(())
            self._part = name

        return enter

    def _leave_hook(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            counts = self.costs[name]
            counts.output_bytes = float(sum(tensor.nbytes for tensor in tensor_leaves(output)))
            counts.fused_bytes += self._fusion.end_chain(tensor_leaves(output))
            if name == self._last_block:
                self._part = AFTER_BLOCKS

        return leave


def _matmul_flops(args: Sequence[Any], results: Sequence[Tensor]) -> float:
    return float(2 * results[0].numel() * args[0].shape[-1])


def _addmm_flops(args: Sequence[Any], results: Sequence[Tensor]) -> float:
    return float(2 * results[0].numel() * args[1].shape[-1])


def _convolution_flops(args: Sequence[Any], results: Sequence[Tensor]) -> float:
    source, weight, is_transposed = args[0], args[1], args[6]
    flops_per_element = math.prod(weight.shape[1:])
    return float(2 * flops_per_element * (source.numel() if is_transposed else results[0].numel()))


def _attention_flops(args: Sequence[Any]) -> tuple[float, float]:
    """Return the FLOPs of attention's two matmuls: those that are computed, and those that a causal mask skips."""
    query, key = args[0], args[1]
    total = 4.0 * query.numel() * key.shape[-2]
    computed = 0.5 * total if any(arg is True for arg in args[3:]) else total
    return computed, total - computed


def _grouped_matmul_flops(args: Sequence[Any], results: Sequence[Tensor]) -> float:
    return float(2 * results[0].numel() * args[0].shape[-1])


def _recurrent_flops(args: Sequence[Any], results: Sequence[Tensor]) -> float:
    positions = math.prod(args[0].shape[:2])
    return float(2 * positions * (args[1].numel() + args[2].numel()))


_MATMUL_FLOPS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], float]] = {
    "aten::mm": _matmul_flops,
    "aten::bmm": _matmul_flops,
    "aten::addmm": _addmm_flops,
    "aten::baddbmm": _addmm_flops,
    "aten::convolution": _convolution_flops,
    "aten::_grouped_mm": _grouped_matmul_flops,
    "aten::mkldnn_rnn_layer": _recurrent_flops,
}
_ATTENTION_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
}
