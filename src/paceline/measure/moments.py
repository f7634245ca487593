"""What operations need within themselves on a CPU, which no tensor of theirs shows: one table, by what was seen there.

oneDNN turns the operands of a convolution into an order of its own and back; gloo copies what it gathers and what it
reduces. On a GPU the first is a workspace that the reserve covers, and nccl copies nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FEW_CHANNELS = 4  # with fewer, the first layer of images, oneDNN reads the input as it lies


def moment_bytes(func: Any, args: Any) -> int:
    """The most that it holds beyond what was there before, its results included; 0 of what is not known here."""
    known = _KNOWN.get(func._schema.name)
    return 0 if known is None else known(args)


def _convolution(args: Any) -> int:
    source, weight = args[0], args[1]
    stride, padding, dilation, transposed = args[3:7]
    if not _is_reordered(source):
        return 0
    size = [source.shape[0], weight.shape[1] * args[8] if transposed else weight.shape[0]]
    for place, length in enumerate(source.shape[2:]):
        kernel = dilation[place % len(dilation)] * (weight.shape[2 + place] - 1) + 1
        step, pad = stride[place % len(stride)], padding[place % len(padding)]
        size.append((length - 1) * step - 2 * pad + kernel if transposed else (length + 2 * pad - kernel) // step + 1)
    output: int = torch.Size(size).numel() * source.element_size()
    return int(max(_read(source) + weight.nbytes + output, 2 * output))


def _convolution_backward(args: Any) -> int:
    gradient, source, weight, wanted = args[0], args[1], args[2], args[10]
    if not _is_reordered(source):
        return 0
    found = [0]
    if wanted[0]:
        found += [gradient.nbytes + weight.nbytes + source.nbytes, 2 * source.nbytes]
    if wanted[1]:
        before = source.nbytes if wanted[0] else 0
        found.append(before + gradient.nbytes + _read(source) + 2 * weight.nbytes)
    return max(found)


def _is_reordered(source: Tensor) -> bool:
    """Images whose channels lie last are read and written as they lie."""
    return source.dim() == 4 and not source.is_contiguous(memory_format=torch.channels_last)


def _read(source: Tensor) -> int:
    return source.nbytes if source.shape[1] >= _FEW_CHANNELS else 0


def gloo_copies(func: Any, args: Any) -> int:
    """Bytes of the copy that gloo keeps until a collective is waited for: of what it gathers, of what it reduces."""
    name = func._schema.name
    if name == "c10d::_allgather_base_":
        return int(args[0].nbytes)
    return int(args[1].nbytes) if name == "c10d::_reduce_scatter_base_" else 0


_KNOWN: dict[str, Callable[[Any], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
