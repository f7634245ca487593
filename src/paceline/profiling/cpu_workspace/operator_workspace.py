"""Workspace of CPU operators: the memory that they use in addition to their tensors. The formulas are measured.

oneDNN converts the operands of a convolution into its internal memory layout, and the results back. gloo copies the
results of an all-gather and the input of a reduce-scatter. On a GPU no formula is needed: plans reserve memory on each
device, which covers the workspace of convolutions, and nccl copies nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.profiling.cpu_workspace.convolution_workspace import Convolution
from paceline.torch_internals.dispatch_modes import op_name
from paceline.torch_internals.private_api import has_amx_tiles


def peak_operator_bytes(func: Any, args: Any, *, threads: int = 1) -> int:
    """Return the peak bytes that an operator allocates, including its results; 0 for operators without a formula."""
    name = op_name(func)
    if name == "aten::convolution":
        return _convolution_of(args[0], args[1], args[2], args[3:9], threads).forward_bytes()
    if name != "aten::convolution_backward":
        return 0
    gradient, output_mask = args[0], args[10]
    call = _convolution_of(args[1], args[2], args[3] or None, args[4:10], threads)
    has_expected_order = gradient.is_contiguous() or (call.channels_last and _is_channels_last(gradient))
    copied_bytes = 0 if has_expected_order else int(gradient.nbytes)
    return copied_bytes + call.backward_bytes(source=output_mask[0], weight=output_mask[1], bias=output_mask[2])


def _convolution_of(source: Tensor, weight: Tensor, bias: Any, options: Any, threads: int) -> Convolution:
    stride, padding, dilation, transposed, _, groups = options
    num_dims = source.dim() - 2

    def expand(values: Any) -> tuple[int, ...]:
        return tuple(values[dim % len(values)] for dim in range(num_dims))

    return Convolution(
        batch_size=source.shape[0],
        in_channels=source.shape[1],
        out_channels=weight.shape[1] * groups if transposed else weight.shape[0],
        input_size=tuple(source.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=expand(stride),
        padding=expand(padding),
        dilation=expand(dilation),
        groups=groups,
        transposed=transposed,
        has_bias=bias is not None,
        item_bytes=source.element_size(),
        channels_last=_is_channels_last(source),
        threads=threads,
        block_channels=_floats_per_register(),
        has_tiles=has_amx_tiles(),
    )


@cache
def _floats_per_register() -> int:
    """Return how many float32 numbers a register of this machine holds."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _is_channels_last(source: Tensor) -> bool:
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders.get(source.dim())
    return order is not None and not source.is_contiguous() and source.is_contiguous(memory_format=order)


def gloo_copies(func: Any, args: Any) -> tuple[int, Any]:
    """Return the bytes that gloo copies for a collective, and the tensors that gloo references.

    Both last until the collective is waited for. gloo references all arguments of a collective. The exception is the
    input of a reduce-scatter, which gloo copies.
    """
    name = op_name(func)
    if name == "c10d::_allgather_base_":
        return int(args[0].nbytes), args
    return (int(args[1].nbytes), args[0]) if name == "c10d::_reduce_scatter_base_" else (0, args)
